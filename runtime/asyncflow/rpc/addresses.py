"""Addresses: parsing, name lookup, the address to advertise to peers, and a socket that listens at an address.

Ports and pod addresses are soon reused by other processes. The address of a server with an automatically chosen port
therefore identifies the server by random bytes, ``tcp://HOST:PORT/SERVER``. Such an address never leads to another
server that gets the same port afterwards.

Invariants: an advertised address never says "all interfaces". Each name is looked up in a separate thread, by one
lookup at a time for all callers, so no event loop and no deadline is delayed by a name server. If the previous process
still holds an address, ``listen`` waits for it, but only briefly.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import re
import socket
import threading
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeAlias

from asyncflow.errors import ManifestError, Refused
from asyncflow.rpc.framing import ANY_SERVER, SERVER_SIZE, new_server
from asyncflow.rpc.retry import delays

SCHEME = "tcp://"
EVERYWHERE = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104 - used only if the address is "*"
_LAST_PORT = 65_535
_ALL = ("0.0.0.0", "::", "*", "")  # noqa: S104 - only compared
_SERVER = re.compile(f"(?!0+$)[0-9a-f]{{{2 * SERVER_SIZE}}}")

Place: TypeAlias = tuple[socket.AddressFamily, tuple[Any, ...]]
"""Address of a socket: its family, and the address in the form of that family."""

_pending: dict[tuple[int, str, int], Future[list[Place]]] = {}


def host_and_port(address: str) -> tuple[str, int]:
    """Return host and port of an address, ``tcp://HOST:PORT[/SERVER]``. IPv6 hosts are in brackets. ``*`` is any host,
    which means all addresses of this machine, including IPv6 if available, or any port.

    Raises ManifestError if ``address`` is not an address.
    """
    where, slash, server = address.removeprefix(SCHEME).partition("/")
    host, _, port = where.rpartition(":")
    number = "0" if port == "*" else port
    valid = address.startswith(SCHEME) and host and number.isdecimal() and int(number) <= _LAST_PORT
    if not valid or (slash and not _SERVER.fullmatch(server)):
        hint = f"An address is {SCHEME}HOST:PORT[/SERVER], SERVER {2 * SERVER_SIZE} hexadecimal digits, not all 0"
        raise ManifestError(f"{address!r} is not an address", hint=hint)
    return EVERYWHERE if host == "*" else host.strip("[]"), int(number)


def server_of(address: str) -> bytes:
    """Return the server that a valid address names; ``ANY_SERVER`` if it names none."""
    return bytes.fromhex(address.removeprefix(SCHEME).partition("/")[2]) or ANY_SERVER


def address_of(host: str, port: int, *, server: bytes = ANY_SERVER) -> str:
    """Return the address of a server."""
    where = f"{SCHEME}[{host}]:{port}" if ":" in host else f"{SCHEME}{host}:{port}"
    return where if server == ANY_SERVER else f"{where}/{server.hex()}"


def is_loopback(host: str) -> bool:
    """Return whether only processes of this host can reach ``host``, a numeric address or a name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def dialled(bound: str, advertise: str = "") -> str:
    """Return ``advertise`` if it is set, otherwise ``bound``; if that is all interfaces, this machine's own address.

    Raises Refused if this machine's own name has no address.
    """
    if advertise or bound not in _ALL:
        return advertise or bound
    name = socket.gethostname()
    try:
        return str((await asyncio.wrap_future(look_up(name, 0)))[0][1][0])
    except OSError as error:
        hint = "Set the address that peers dial (advertise)"
        raise Refused(f"this machine's name {name!r} has no address: {error}", hint=hint) from error


async def places_of(host: str, port: int, *, within_s: float) -> list[Place]:
    """Return the result of ``look_up``. For a numeric address this never waits.

    Raises OSError with a message if the name has no address, or if the lookup takes longer than ``within_s`` seconds.
    """
    found = look_up(host, port)
    if not found.done():
        try:
            async with asyncio.timeout(within_s):
                await asyncio.wrap_future(found)
        except TimeoutError:
            if found.done():
                return found.result()
            raise OSError(f"the lookup of the name {host!r} takes longer than {within_s:g} s") from None
    return found.result()


def look_up(host: str, port: int) -> Future[list[Place]]:
    """Start to look up the addresses of ``host``, IPv4 first. The result of a numeric address is available immediately.

    The future raises OSError with a message if the name has no address (yet).
    """
    future: Future[list[Place]] = Future()
    future.set_running_or_notify_cancel()  # so that a caller that gives up does not cancel it for the other callers
    try:
        future.set_result(_places(host, port, socket.AI_NUMERICHOST))
    except OSError:
        key = (os.getpid(), host, port)
        found = _pending.setdefault(key, future)
        if found is future:
            try:
                threading.Thread(target=_look_up, args=(key,), name=f"look up {host}", daemon=True).start()
            except RuntimeError as error:
                _pending.pop(key).set_exception(OSError(f"the name {host!r} cannot be looked up: {error}"))
        return found
    return future


def _look_up(key: tuple[int, str, int]) -> None:
    _, host, port = key
    try:
        places = _places(host, port, 0)
    except (OSError, UnicodeError) as error:
        _pending.pop(key).set_exception(OSError(f"the name {host!r} has no address yet ({error})"))
    else:
        _pending.pop(key).set_result(places)


def _places(host: str, port: int, flags: int) -> list[Place]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return sorted([(family, place) for family, _, _, _, place in found], key=lambda place: place[0] != socket.AF_INET)


_BIND_S = 3.0
_LONGEST_DELAY_S = 0.2
_BACKLOG = 1024


class Listening(NamedTuple):
    """A listening socket. address: the address that peers dial; server: the server id in that address."""

    address: str
    server: bytes
    socket: socket.socket


async def listen(bind: str, *, name: str, advertise: str) -> Listening:
    """Listen at ``bind``, on behalf of the process ``name``.

    bind: includes the server id if it is already fixed; advertise: the host that peers dial, if it is not the bound
    one. Raises Refused if it cannot listen there, and ManifestError if ``bind`` is not an address.
    """
    where, server = host_and_port(bind), server_of(bind)
    if not where[1] and server == ANY_SERVER:
        server = new_server()
    try:
        sock = await _bind((await places_of(*where, within_s=_BIND_S))[0])
    except OSError as error:
        hint = "Another process may hold that address: choose another one or end that process"
        raise Refused(f"cannot listen at {bind}: {error}", where=name, hint=hint) from error
    try:
        host, port = sock.getsockname()[:2]
        return Listening(address_of(await dialled(host, advertise), port, server=server), server, sock)
    except BaseException:
        sock.close()
        raise


async def _bind(place: Place) -> socket.socket:
    deadline = asyncio.get_running_loop().time() + _BIND_S
    waits = delays(longest=_LONGEST_DELAY_S)
    while True:
        try:
            both = place[1][0] == EVERYWHERE == "::"
            sock = socket.create_server(place[1], family=place[0], backlog=_BACKLOG, dualstack_ipv6=both)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or asyncio.get_running_loop().time() > deadline:
                raise
        else:
            sock.setblocking(False)
            return sock
        await asyncio.sleep(next(waits))
