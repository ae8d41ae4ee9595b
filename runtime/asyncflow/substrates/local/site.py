"""One machine made ready for one crew: its ports, its supervisor and the supervisor's log.

Invariant: the ports that the crew was given stay its own, through all restarts, for as long as the context lasts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from asyncflow.net.hosts import address_of
from asyncflow.net.stream.server import new_server
from asyncflow.plan.roles import Role
from asyncflow.substrates.local.folder import RunFolder
from asyncflow.substrates.local.logs import open_log
from asyncflow.substrates.local.placement import launcher, seats_of
from asyncflow.substrates.local.ports import PortReservation
from asyncflow.substrates.local.supervisor import Supervisor
from asyncflow.substrates.local.terms import Limits
from asyncflow.telemetry.logs import setup_logging


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """A crew that is ready to start. address: that all dial; http_port: of the service of the first seat."""

    supervisor: Supervisor
    address: str
    http_port: int


@contextmanager
def site(roles: Sequence[Role], *, folder: RunFolder, limits: Limits, port: int = 0) -> Iterator[Site]:
    """Yield the place at which ``roles`` run from ``folder``, whose first one all dial at ``port`` (0: any).

    Raises AsyncFlowError where a port or a device is not to be had.
    """
    seats = seats_of(roles)
    reserved = PortReservation(1 + len(seats), first=port)
    with open_log(folder.log("supervisor")) as log, reserved as (rpc_port, *ports):
        setup_logging("supervisor", 0, stream=log)
        http_ports = dict(zip(seats, ports, strict=True))
        http_port = http_ports[seats[0]]
        named = {} if port else {"server": new_server()}
        address = address_of("127.0.0.1", rpc_port, **named)
        supervisor = Supervisor(
            roles=roles,
            launch=launcher(roles, folder=folder, driver=address, http_ports=http_ports),
            folder=folder,
            driver=address,
            http=f"http://127.0.0.1:{http_port}",
            limits=limits,
        )
        yield Site(supervisor=supervisor, address=address, http_port=http_port)
