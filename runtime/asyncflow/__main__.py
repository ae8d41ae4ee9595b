"""Entry point of ``asyncflow`` and of ``python -m asyncflow``; it also handles Ctrl-C during the imports."""

import gc
import sys

_INTERRUPTED = 130
"""Exit status after Ctrl-C; equal to ``asyncflow.cli.INTERRUPTED``, which may not have been imported yet."""


def main() -> None:
    """Run the command line of this process."""
    try:
        from asyncflow import cli

        cli.main()
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        sys.exit(_INTERRUPTED)
    finally:
        gc.freeze()  # the process ends: no search for garbage in all of its modules


if __name__ == "__main__":
    main()
