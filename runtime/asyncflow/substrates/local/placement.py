"""How a replica of a plan becomes a command line on this machine.

Invariant: what is added to the plan is what only this machine knows: paths, loopback ports, the interpreter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from asyncflow.api.names import TOKEN_FILE_ENV
from asyncflow.plan.roles import JobPlan, Role
from asyncflow.substrates.local.crew import Seat
from asyncflow.substrates.local.folder import RunFolder
from asyncflow.substrates.local.terms import Launch


def launcher(plan: JobPlan, *, folder: RunFolder, driver: str, http_port: int) -> Callable[[Seat, int], Launch]:
    """Give the function that says how to start a seat as an attempt.

    driver: the address that the driver listens on; http_port: of the driver's service, which alone is known beforehand.
    """
    own = {TOKEN_FILE_ENV: str(folder.token), "PYTHONSAFEPATH": "1"}
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
        return Launch(argv=argv, env={**own, **role.env})

    return launch
