"""The command line with stand-ins for roles: ``standin_cli.py STEPS PAUSE_S ARGUMENTS...``."""

import sys

from standin_launcher import install

from asyncflow import cli

install(*sys.argv[1:3])
sys.exit(cli.invoke(sys.argv[3:]))
