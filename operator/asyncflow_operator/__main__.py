"""``python -m asyncflow_operator``."""

from asyncflow_operator.main import main

if __name__ == "__main__":
    main()
