"""The command line with stand-ins for roles: ``standin_cli.py STEPS PAUSE_S ARGUMENTS...``."""

import sys
from pathlib import Path

from asyncflow import cli
from asyncflow.commands import run
from asyncflow.substrates.local.terms import Launch

ROLE = str(Path(__file__).with_name("standin_role.py"))
steps, pause_s, arguments = sys.argv[1], sys.argv[2], sys.argv[3:]


def launcher(_plan, *, folder, driver, http_port):
    def launch(seat, attempt):
        return Launch(argv=[sys.executable, ROLE, seat.role, str(http_port), str(folder.path), steps, pause_s], env={})

    return launch


run.launcher = launcher
sys.exit(cli.invoke(arguments))
