"""Translation of a plan's replicas into command lines on this machine.

Invariant: what is added to the plan is what only this machine knows: paths, loopback ports, devices, the interpreter. A
replica serves at the same ports however often it starts again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from asyncflow.api.names import TOKEN_FILE_ENV
from asyncflow.plan.roles import Role
from asyncflow.substrates.local.crew import Seat
from asyncflow.substrates.local.devices import hand_out
from asyncflow.substrates.local.folder import RunFolder
from asyncflow.substrates.local.terms import Launch


def seats_of(roles: Sequence[Role]) -> list[Seat]:
    """Return every replica of ``roles``, in plan order."""
    return [Seat(role.name, index) for role in roles for index in range(role.replicas)]


def launcher(
    roles: Sequence[Role], *, folder: RunFolder, driver: str, http_ports: Mapping[Seat, int]
) -> Callable[[Seat, int], Launch]:
    """Return the function that says how to start a seat as an attempt.

    driver: the address that all dial; http_ports: where each seat serves /metrics, and the first one its status.
    Raises ManifestError where this machine has too few devices.
    """
    devices = hand_out(roles)
    own = {TOKEN_FILE_ENV: str(folder.token), "PYTHONSAFEPATH": "1"}
    named: dict[str, Role] = {role.name: role for role in roles}

    def launch(seat: Seat, attempt: int) -> Launch:
        role = named[seat.role]
        argv = role.command(
            index=seat.index,
            attempt=attempt,
            driver=driver,
            job=str(folder.job),
            workdir=str(folder.path),
            http_port=http_ports[seat],
            python=sys.executable,
        )
        http = f"http://127.0.0.1:{http_ports[seat]}"
        return Launch(argv=argv, env={**own, **devices.get(seat, {}), **role.env}, http=http)

    return launch
