"""Where streams are answered: one listening socket, one more for callers of this host, and all who connected.

Invariants: a peer that has not shaken hands in time, sends what is no message, or leaves too many answers unread is cut
off; one for which too many bytes lie unread is heard no more until they went; and nobody else notices. Where there are
too many peers, those who have not shaken hands make room first.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import socket as sockets
from collections.abc import Callable, Hashable, Sequence

from asyncflow.errors import AsyncFlowError, ProtocolError
from asyncflow.net.arena import unix
from asyncflow.net.frames import Buffer
from asyncflow.net.keys import Keys
from asyncflow.net.rpc.flow import Flow, tune
from asyncflow.net.rpc.staging import staging
from asyncflow.net.stream.handshake import HELLO_SIZE, PROOF_SIZE
from asyncflow.net.stream.inbox import Inbox
from asyncflow.net.stream.outbox import Outbox

_MAX_PEERS = 8192
_MAX_UNREAD = 4096
_MOST_UNSENT = 64 << 20
"""Bytes of answers from which on a peer is heard no more until it has read them; one answer may have more."""
_SHAKE_S = 10.0
_FULL_S = 0.1


class Answering:
    """Listens for streams. deliver: gets each message, and the number of the peer that sent it.

    nearby: listens to callers of this host, if there is such a socket; server: which one this is; dropped: told
    why a peer was cut off for good; keys: of the job, None for plain text; most: bytes of one message.
    """

    def __init__(
        self,
        listening: sockets.socket,
        *,
        nearby: sockets.socket | None,
        server: bytes,
        keys: Keys | None,
        most: int,
        deliver: Callable[[int, list[memoryview]], None],
        dropped: Callable[[str], None],
    ) -> None:
        self.closed = False
        self._listening = [listening] if nearby is None else [listening, nearby]
        self._server = server
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
        if (flow := self._peers.get(peer)) is not None:
            flow.send(key, parts)

    def close(self) -> None:
        """Close all streams at once."""
        if not self.closed:
            self.closed = True
            for listening in self._listening:
                self._loop.remove_reader(listening)
                listening.close()
            for flow in self._peers.values():
                flow.close()
            self._peers.clear()
            self._strangers.clear()

    def _listen(self) -> None:
        for listening in self._listening:
            if not self.closed:
                self._loop.add_reader(listening, self._accept, listening)

    def _accept(self, listening: sockets.socket) -> None:
        try:
            socket, _ = listening.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left: those who wait to be let in must not keep the loop busy
            self._loop.remove_reader(listening)
            self._loop.call_later(_FULL_S, self._listen)
            return
        if listening.family == sockets.AF_UNIX:
            known = unix.accepted(socket)
            if known is None:
                self._dropped("a caller of this host runs as another user")
                return
            socket = known
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
            most_unread=_MAX_UNREAD,
            most_unsent=_MOST_UNSENT,
        )
        self._strangers[peer] = None
        self._loop.call_later(_SHAKE_S, self._cut_off_stranger, peer)

    def _shaking(self, peer: int, socket: sockets.socket) -> Callable[[bytes], tuple[Inbox, Outbox] | int]:
        handshake = unix.shaking(socket, self._keys, server=self._server)
        greeted = False

        def shake(came: bytes) -> tuple[Inbox, Outbox] | int:
            nonlocal greeted
            if greeted:
                handshake.proved(came)
                del self._strangers[peer]
                return unix.boxes(socket, handshake, most=self._most, staging=self._staging)
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
