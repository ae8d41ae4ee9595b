"""Addresses: what they name, where that is now, which one others dial, and a socket that listens at one.

Ports and the addresses of pods are used again, soon, by others. So the address of a server whose port was chosen for it
says which server that is, ``tcp://HOST:PORT/SERVER``, by bytes drawn at random, and never leads to another server that
gets the port later.

Invariants: an address that is given to others never says "all interfaces"; a name is looked up in a thread of its own,
once at a time however many ask, so that no event loop and no deadline waits for a name server; an address that a dying
predecessor still holds is waited for, but not for long.
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
from asyncflow.rpc.framing import ANYBODY, SERVER_SIZE, new_server
from asyncflow.rpc.retry import delays

SCHEME = "tcp://"
EVERYWHERE = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104 - only where the address says so
_LAST_PORT = 65_535
_ALL = ("0.0.0.0", "::", "*", "")  # noqa: S104 - compared with
_SERVER = re.compile(f"(?!0+$)[0-9a-f]{{{2 * SERVER_SIZE}}}")

Place: TypeAlias = tuple[socket.AddressFamily, tuple[Any, ...]]
"""Where a socket connects to or is bound: its family, and the address as that family writes it."""

_under_way: dict[tuple[int, str, int], Future[list[Place]]] = {}


def host_and_port(address: str) -> tuple[str, int]:
    """Return where ``address`` is, ``tcp://HOST:PORT[/SERVER]``: IPv6 hosts in brackets, ``*`` for any host or port;
    any host is all addresses of this machine, by IPv6 too where it has that.

    Raises ManifestError where it is none.
    """
    where, slash, server = address.removeprefix(SCHEME).partition("/")
    host, _, port = where.rpartition(":")
    number = "0" if port == "*" else port
    placed = address.startswith(SCHEME) and host and number.isdecimal() and int(number) <= _LAST_PORT
    if not placed or (slash and not _SERVER.fullmatch(server)):
        hint = f"An address is {SCHEME}HOST:PORT[/SERVER], SERVER {2 * SERVER_SIZE} hexadecimal digits, not all 0"
        raise ManifestError(f"{address!r} is no address", hint=hint)
    return EVERYWHERE if host == "*" else host.strip("[]"), int(number)


def server_of(address: str) -> bytes:
    """Return which server ``address``, which is one, names; ``ANYBODY`` where it does not say."""
    return bytes.fromhex(address.removeprefix(SCHEME).partition("/")[2]) or ANYBODY


def address_of(host: str, port: int, *, server: bytes = ANYBODY) -> str:
    """Write an address."""
    where = f"{SCHEME}[{host}]:{port}" if ":" in host else f"{SCHEME}{host}:{port}"
    return where if server == ANYBODY else f"{where}/{server.hex()}"


def is_loopback(host: str) -> bool:
    """Return whether only processes of this host reach ``host``, a number or a name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def dialled(bound: str, advertise: str = "") -> str:
    """Return ``advertise`` if it is set, else ``bound``, or this machine's own address if that is all interfaces.

    Raises Refused where this machine's own name has no address.
    """
    if advertise or bound not in _ALL:
        return advertise or bound
    name = socket.gethostname()
    try:
        return str((await asyncio.wrap_future(look_up(name, 0)))[0][1][0])
    except OSError as error:
        hint = "Say which address others dial (advertise)"
        raise Refused(f"this machine's name {name!r} has no address: {error}", hint=hint) from error


async def places_of(host: str, port: int, *, within_s: float) -> list[Place]:
    """Return what ``look_up`` finds; for a number at once, however late this process is.

    Raises OSError, in words, where the name has no address, or none within ``within_s`` seconds.
    """
    found = look_up(host, port)
    if not found.done():
        try:
            async with asyncio.timeout(within_s):
                await asyncio.wrap_future(found)
        except TimeoutError:
            if found.done():
                return found.result()
            raise OSError(f"the name {host!r} is still looked up after {within_s:g} s") from None
    return found.result()


def look_up(host: str, port: int) -> Future[list[Place]]:
    """Begin to look up where ``host`` is; the result, IPv4 first, is there at once where it is no name.

    It is an OSError, in words, where the name has no address (yet).
    """
    asked: Future[list[Place]] = Future()
    asked.set_running_or_notify_cancel()  # whoever waits no longer takes nothing from the others
    try:
        asked.set_result(_places(host, port, socket.AI_NUMERICHOST))
    except OSError:
        key = (os.getpid(), host, port)
        found = _under_way.setdefault(key, asked)
        if found is asked:
            try:
                threading.Thread(target=_look_up, args=(key,), name=f"look up {host}", daemon=True).start()
            except RuntimeError as error:
                _under_way.pop(key).set_exception(OSError(f"the name {host!r} cannot be looked up: {error}"))
        return found
    return asked


def _look_up(key: tuple[int, str, int]) -> None:
    _, host, port = key
    try:
        places = _places(host, port, 0)
    except (OSError, UnicodeError) as error:
        _under_way.pop(key).set_exception(OSError(f"the name {host!r} has no address yet ({error})"))
    else:
        _under_way.pop(key).set_result(places)


def _places(host: str, port: int, flags: int) -> list[Place]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    places = [(family, place) for family, _, _, _, place in found]
    return sorted(places, key=lambda place: place[0] != socket.AF_INET)


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
    try:
        made = await _bound((await places_of(*where, within_s=_BIND_S))[0])
    except OSError as error:
        hint = "Another process may hold that address; choose another or end that process"
        raise Refused(f"cannot listen at {bind}: {error}", where=name, hint=hint) from error
    try:
        host, port = made.getsockname()[:2]
        return Listening(address_of(await dialled(host, advertise), port, server=server), server, made)
    except BaseException:
        made.close()
        raise


async def _bound(place: Place) -> socket.socket:
    deadline = asyncio.get_running_loop().time() + _BIND_S
    waits = delays(longest=_LONGEST_DELAY_S)
    while True:
        try:
            both = place[1][0] == EVERYWHERE == "::"
            made = socket.create_server(place[1], family=place[0], backlog=_BACKLOG, dualstack_ipv6=both)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or asyncio.get_running_loop().time() > deadline:
                raise
        else:
            made.setblocking(False)
            return made
        await asyncio.sleep(next(waits))
