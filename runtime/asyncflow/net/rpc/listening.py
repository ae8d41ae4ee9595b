"""A socket that listens, and the address by which others reach it.

Invariants: an address that a dying predecessor still holds is waited for, but not for long; the address of a server
whose port was chosen for it says which server it is, so it never leads to another one that gets that port later.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import NamedTuple

from asyncflow.errors import Refused
from asyncflow.net.hosts import Place, address_of, dialled, host_and_port, look_up, server_of
from asyncflow.net.retry import delays
from asyncflow.net.stream.server import ANYBODY, new_server

_BIND_S = 3.0
_LONGEST_DELAY_S = 0.2
_BACKLOG = 1024


class Listening(NamedTuple):
    """A socket that listens. address: that others dial; server: which one answers there."""

    address: str
    server: bytes
    socket: socket.socket


async def listen(bind: str, *, name: str, advertise: str) -> Listening:
    """Listen at ``bind``, for whoever has that ``name``.

    bind: with which server it is where that is settled already; advertise: the host that others dial, where that is
    another. Raises Refused where it cannot listen there, and ManifestError where that is no address.
    """
    where, server = host_and_port(bind), server_of(bind)
    if not where[1] and server == ANYBODY:
        server = new_server()
    deadline = asyncio.get_running_loop().time() + _BIND_S
    try:
        async with asyncio.timeout_at(deadline):
            place = (await asyncio.wrap_future(look_up(*where)))[0]
        made = await _bound(place, deadline)
    except OSError as error:
        hint = "Another process may hold that address; choose another or end that process"
        raise Refused(f"cannot listen at {bind}: {error}", where=name, hint=hint) from error
    try:
        host, port = made.getsockname()[:2]
        return Listening(address_of(await dialled(host, advertise), port, server=server), server, made)
    except BaseException:
        made.close()
        raise


async def _bound(place: Place, deadline: float) -> socket.socket:
    waits = delays(longest=_LONGEST_DELAY_S)
    while True:
        made = socket.socket(place[0])
        try:
            made.setblocking(False)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(place[1])
            made.listen(_BACKLOG)
        except OSError as error:
            made.close()
            if error.errno != errno.EADDRINUSE or asyncio.get_running_loop().time() > deadline:
                raise
        else:
            return made
        await asyncio.sleep(next(waits))
