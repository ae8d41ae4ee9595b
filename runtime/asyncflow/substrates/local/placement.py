"""How a replica of a plan becomes a command line on this machine.

Invariant: what is added to the plan is what only this machine knows: paths, loopback ports, the interpreter.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from asyncflow.plan.roles import JobPlan, Role
from asyncflow.substrates.local.crew import Seat
from asyncflow.substrates.local.folder import RunFolder
from asyncflow.substrates.local.terms import Launch

TOKEN_FILE_ENV = "ASYNCFLOW_TOKEN_FILE"  # noqa: S105 — a name, not a token
"""Variable that names the file with the bearer token of the driver's POST routes."""


def launcher(
    plan: JobPlan, *, folder: RunFolder, driver: str, http_port: int, modules: Path
) -> Callable[[Seat, int], Launch]:
    """Give the function that says how to start a seat as an attempt.

    driver: the address that the driver listens on; http_port: of the driver's service, which alone is known beforehand;
    modules: folder of the user's own modules, such as a reward function.
    """
    path = os.pathsep.join(filter(None, (str(modules), os.environ.get("PYTHONPATH"))))
    roles: dict[str, Role] = {role.name: role for role in plan.roles}

    def launch(seat: Seat, attempt: int) -> Launch:
        role = roles[seat.role]
        argv = role.command(
            index=seat.index,
            attempt=attempt,
            driver=driver,
            job=str(folder.job),
            workdir=str(folder.path),
            http_port=http_port if role.leader else None,
            python=sys.executable,
        )
        return Launch(argv=argv, env={"PYTHONPATH": path, **role.env, TOKEN_FILE_ENV: str(folder.token)})

    return launch
