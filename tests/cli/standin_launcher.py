"""Stand-ins in place of the roles of a run that this process supervises."""

import sys
from pathlib import Path

from asyncflow.local import site
from asyncflow.local.placement import Launch

ROLE = str(Path(__file__).with_name("standin_role.py"))


def install(steps: str, pause_s: str) -> None:
    """Make roles stand-ins that make ``steps`` steps, of ``pause_s`` seconds each."""

    def launcher(_roles, *, folder, issuer, driver, places, control_port):
        def launch(replica, attempt):
            port = str(places.port(replica))
            argv = [sys.executable, ROLE, replica.role, port, str(folder.path), steps, pause_s]
            return Launch(argv=argv, env={}, http=f"http://127.0.0.1:{port}")

        return launch

    site.launcher = launcher
    site.modules_of = lambda _role: ()  # a fork server would import the real roles
