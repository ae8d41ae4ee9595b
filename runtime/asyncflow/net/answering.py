"""Where streams are answered: one listening socket, and all who connected to it.

Invariants: a peer that has not shaken hands in time, sends what is no message, or does not read what it asked for is
cut off, and nobody else notices; where there are too many, those who have not shaken hands make room first.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import socket as sockets
from collections.abc import Callable, Hashable, Sequence

from asyncflow.errors import AsyncFlowError, ProtocolError
from asyncflow.net.flow import Flow, tune
from asyncflow.net.frames import Buffer
from asyncflow.net.handshake import HELLO_SIZE, PROOF_SIZE, Handshake
from asyncflow.net.keys import Keys
from asyncflow.net.stream import Inbox, Outbox, staging

_MAX_PEERS = 8192
_MAX_UNREAD = 4096
_SHAKE_S = 10.0
_FULL_S = 0.1


class Answering:
    """Listens for streams. deliver: gets each message, and the number of the peer that sent it.

    dropped: told why a peer was cut off for good; keys: of the job, None for plain text; most: bytes of one message.
    """

    def __init__(
        self,
        listening: sockets.socket,
        *,
        keys: Keys | None,
        most: int,
        deliver: Callable[[int, list[memoryview]], None],
        dropped: Callable[[str], None],
    ) -> None:
        self.closed = False
        self._socket = listening
        self._keys = keys
        self._most = most
        self._deliver = deliver
        self._dropped = dropped
        self._peers: dict[int, Flow] = {}
        self._strangers: dict[int, None] = {}
        self._numbers = itertools.count()
        self._staging = staging()
        self._loop = asyncio.get_running_loop()
        self._listen()

    def send(self, peer: int, key: Hashable, parts: Sequence[Buffer]) -> None:
        """Send ``parts`` to ``peer``, unless it is gone; ``key`` names the message."""
        flow = self._peers.get(peer)
        if flow is None or flow.outbox is None:
            return
        if len(flow.outbox) >= _MAX_UNREAD:
            self._cut_off(peer, "a peer does not read what it asked for")
            return
        flow.outbox.push(key, parts)
        flow.flush()

    def close(self) -> None:
        """Close all streams at once."""
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._socket)
            self._socket.close()
            for flow in self._peers.values():
                flow.close()
            self._peers.clear()
            self._strangers.clear()

    def _listen(self) -> None:
        if not self.closed:
            self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        try:
            socket, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left: those who wait to be let in must not keep the loop busy
            self._loop.remove_reader(self._socket)
            self._loop.call_later(_FULL_S, self._listen)
            return
        if len(self._peers) >= _MAX_PEERS:
            if not self._strangers:
                socket.close()
                self._dropped("too many peers")
                return
            self._cut_off(next(iter(self._strangers)), "too many peers")
        socket.setblocking(False)
        tune(socket)
        peer = next(self._numbers)
        self._peers[peer] = Flow(
            socket,
            size=HELLO_SIZE,
            shake=self._shaking(peer, socket),
            deliver=functools.partial(self._deliver, peer),
            lost=lambda why: self._forget(peer, why),
        )
        self._strangers[peer] = None
        self._loop.call_later(_SHAKE_S, self._cut_off_stranger, peer)

    def _shaking(self, peer: int, socket: sockets.socket) -> Callable[[bytes], tuple[Inbox, Outbox] | int]:
        handshake = Handshake(self._keys)
        greeted = False

        def shake(came: bytes) -> tuple[Inbox, Outbox] | int:
            nonlocal greeted
            if greeted:
                handshake.proved(came)
                del self._strangers[peer]
                inbox = Inbox(most=self._most, seal=handshake.incoming, staging=self._staging)
                return inbox, Outbox(seal=handshake.outgoing)
            greeted = True
            welcome = handshake.welcome(came)
            if socket.send(welcome) < len(welcome):
                raise ProtocolError("a peer takes no welcome")
            return PROOF_SIZE

        return shake

    def _cut_off_stranger(self, peer: int) -> None:
        if peer in self._strangers:
            self._cut_off(peer, "a peer did not shake hands")

    def _cut_off(self, peer: int, why: str) -> None:
        self._peers[peer].close()
        self._forget(peer, ProtocolError(why))

    def _forget(self, peer: int, why: AsyncFlowError) -> None:
        self._strangers.pop(peer, None)
        if self._peers.pop(peer, None) is not None and isinstance(why, ProtocolError):
            self._dropped(str(why))
