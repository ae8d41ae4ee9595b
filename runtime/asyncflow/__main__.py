"""``python -m asyncflow``: the command line."""

from asyncflow.cli import main

if __name__ == "__main__":
    main()
