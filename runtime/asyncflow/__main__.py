"""The entry point of ``asyncflow`` and of ``python -m asyncflow``: Ctrl-C ends it while it imports as it does later."""

import sys

_INTERRUPTED = 130
"""As ``asyncflow.cli`` has it, which may not have been imported yet."""


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
