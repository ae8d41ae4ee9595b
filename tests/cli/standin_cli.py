"""The command line with stand-ins for roles: ``standin_cli.py STEPS PAUSE_S ARGUMENTS...``."""

import sys
from pathlib import Path

from asyncflow import cli
from asyncflow.substrates.local import site
from asyncflow.substrates.local.terms import Launch

ROLE = str(Path(__file__).with_name("standin_role.py"))
steps, pause_s, arguments = sys.argv[1], sys.argv[2], sys.argv[3:]


def launcher(_roles, *, folder, driver, http_ports):
    def launch(seat, attempt):
        port = str(http_ports[seat])
        argv = [sys.executable, ROLE, seat.role, port, str(folder.path), steps, pause_s]
        return Launch(argv=argv, env={}, http=f"http://127.0.0.1:{port}")

    return launch


site.launcher = launcher
sys.exit(cli.invoke(arguments))
