"""Entry point of ``asyncflow`` and of ``python -m asyncflow``; it also handles Ctrl-C during the imports."""

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


if __name__ == "__main__":
    main()
