"""How messages travel: the scheme of an address chooses, zmq sockets (``tcp://``) or plain streams (``stream://``).

Invariant: whoever sends and receives messages through a door knows nothing of what is behind it.
"""

from __future__ import annotations

import asyncio
import errno
import socket as sockets
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import zmq

from asyncflow.errors import Refused
from asyncflow.net import arena_socket, hosts, wire
from asyncflow.net.answering import Answering
from asyncflow.net.calling import Calling
from asyncflow.net.dialling import Health, dial
from asyncflow.net.flow import SCHEME, host_and_port
from asyncflow.net.frames import Buffer
from asyncflow.net.keys import Keys

_BIND_S = 3.0
_BACKLOG = 1024
_STREAMS = "streams"
"""What the secret of sealed streams is derived for."""


class Door(Protocol):
    """What ``wire.Wire`` offers, whichever way the messages go."""

    closed: bool

    def send(self, key: Hashable, parts: Sequence[Buffer]) -> None:
        """Send ``parts`` now, or as soon as they can go; ``key`` names the message."""

    def close(self) -> None:
        """Close it at once; what was not sent is dropped."""


class CallersDoor(Door, Protocol):
    """A door to one peer."""

    def withdraw(self, key: Hashable) -> bool:
        """Take back the message ``key`` if it has not left yet, and say whether that was so."""


def secret_of(keys: Keys | None) -> bytes | None:
    """Give what seals streams, None for plain text."""
    return None if keys is None else keys.derived(_STREAMS)


async def listen(
    bind: str,
    *,
    name: str,
    keys: Keys | None,
    most: int,
    advertise: str,
    deliver: Callable[[list[Any]], None],
    dropped: Callable[[str], None],
) -> tuple[str, Door]:
    """Listen at ``bind``; give the address that others dial, and the door.

    deliver: gets the parts of each message, the first of which names its peer; dropped: told why a peer was cut off.
    An address still held by a predecessor that is just dying is waited for; Refused when it does not come free.
    """
    deadline = asyncio.get_running_loop().time() + _BIND_S
    while True:
        try:
            if bind.startswith(SCHEME):
                return _listen_to_streams(bind, keys, most, advertise, deliver, dropped)
            return _listen_to_zmq(bind, keys, most, advertise, deliver)
        except (zmq.ZMQError, OSError) as error:
            if error.errno != errno.EADDRINUSE or asyncio.get_running_loop().time() > deadline:
                hint = "Another process may hold that address; choose another or end that process"
                raise Refused(f"cannot listen at {bind}: {error}", where=name, hint=hint) from error
        await asyncio.sleep(0.05)


def _listen_to_zmq(
    bind: str, keys: Keys | None, most: int, advertise: str, deliver: Callable[[list[Any]], None]
) -> tuple[str, Door]:
    socket = wire.open_socket(zmq.ROUTER, max_message=most)
    try:
        if keys is not None:
            keys.guard_server(socket)
        socket.bind(bind)
    except BaseException:
        socket.close()
        raise
    endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    if endpoint.startswith("tcp://"):
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        endpoint = f"tcp://{hosts.dialled(host, advertise)}:{port}"
    return endpoint, wire.Wire(socket, deliver)


def _listen_to_streams(
    bind: str,
    keys: Keys | None,
    most: int,
    advertise: str,
    deliver: Callable[[list[Any]], None],
    dropped: Callable[[str], None],
) -> tuple[str, Door]:
    socket = sockets.socket()
    try:
        socket.setblocking(False)
        socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
        socket.bind(host_and_port(bind))
        socket.listen(_BACKLOG)
    except BaseException:
        socket.close()
        raise
    host, port = socket.getsockname()
    address = f"{SCHEME}{hosts.dialled(host, advertise)}:{port}"
    nearby = arena_socket.listening(address)
    return address, Answering(
        socket, nearby=nearby, secret=secret_of(keys), most=most, deliver=deliver, dropped=dropped
    )


def call(
    address: str,
    *,
    keys: Keys | None,
    most: int,
    health: Health,
    deliver: Callable[[list[Any]], None],
    lost: Callable[[str], None],
) -> CallersDoor:
    """Begin to connect to ``address``. lost: told why, once, when the connection was there and is gone."""
    if address.startswith(SCHEME):
        return Calling(
            address,
            secret=secret_of(keys),
            most=most,
            deliver=deliver,
            state=health.say,
            lost=lambda why: lost(str(why)),
        )
    return _Watched(address, keys=keys, most=most, health=health, deliver=deliver, lost=lost)


class _Watched:
    """A zmq socket to one peer, with its monitor."""

    def __init__(
        self,
        address: str,
        *,
        keys: Keys | None,
        most: int,
        health: Health,
        deliver: Callable[[list[Any]], None],
        lost: Callable[[str], None],
    ) -> None:
        self._health = health
        self._lost = lost
        self._socket, monitor = dial(address, keys=keys, max_message=most)
        self._monitor = wire.Wire(monitor, self._event)
        self._wire = wire.Wire(self._socket, deliver)
        self.send = self._wire.send
        self.withdraw = self._wire.withdraw
        self.closed = False

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._socket.disable_monitor()
            self._monitor.close()
            self._wire.close()

    def _event(self, parts: list[zmq.Frame]) -> None:
        self._health.learn([part.bytes for part in parts])
        if self._health.lost:
            self._wire.drain()
            self._lost("the connection to the peer broke")
