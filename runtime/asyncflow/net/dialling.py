"""The calling side of a connection, as a zmq socket and what its monitor says of it.

Invariant: a ``Health`` that was connected and is lost never is healthy again: whoever called on it makes a new one.
"""

from __future__ import annotations

from collections.abc import Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from asyncflow.net import wire
from asyncflow.net.keys import Keys

_CONNECT_MS = 3000
"""A Service may still lead to a pod that is gone: nobody answers there, and the kernel would ask for two minutes."""

_EVENTS = (
    zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)
_STATES = {
    zmq.EVENT_CONNECT_RETRIED: "nobody listens there",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the handshake failed: do both sides hold the key of this job?",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the handshake failed: do both sides hold the key of this job?",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the peer refused the key of this job",
}


class Health:
    """What is known of a connection. lost: it was there and is gone; state: how it is, in words."""

    def __init__(self) -> None:
        self.state = "the connection was not made"
        self.lost = False
        self._connected = False

    def say(self, state: str) -> None:
        """Take in how the connection is, in words."""
        self.state = state

    def learn(self, event: Sequence[bytes]) -> None:
        """Take in one message of the monitor."""
        what = parse_monitor_message(list(event))["event"]
        if what == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._connected = True
            self.state = "it is connected and silent: stopped, overloaded, or it waits for something itself"
        elif what == zmq.EVENT_DISCONNECTED and self._connected:
            self.lost = True
        else:
            self.state = _STATES.get(zmq.Event(what), self.state)


def dial(address: str, *, keys: Keys | None, max_message: int) -> tuple[wire.Socket, wire.Socket]:
    """Begin to connect to ``address``; give the socket, which takes nothing before it is connected, and its monitor."""
    socket = wire.open_socket(zmq.DEALER, max_message=max_message)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
    if keys is not None:
        keys.guard_client(socket)
    monitor: wire.Socket = socket.get_monitor_socket(_EVENTS)
    socket.connect(address)
    return socket, monitor
