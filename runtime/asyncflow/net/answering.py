"""Where streams are answered: one listening socket, one more for callers of this host, and all who connected.

Invariant: a peer that has not shaken hands in time, sends what is no message, or does not read what it asked for is cut
off; nobody else notices.
"""

from __future__ import annotations

import asyncio
import itertools
import socket as sockets
from collections.abc import Callable, Hashable, Sequence

from asyncflow.errors import AsyncFlowError, ProtocolError
from asyncflow.net import arena_socket
from asyncflow.net.flow import Deliver, Flow, tune
from asyncflow.net.frames import Buffer
from asyncflow.net.sealed import HELLO_SIZE, PROOF_SIZE, Handshake
from asyncflow.net.stream import Inbox, Outbox, Part, staging

_MAX_PEERS = 8192
_MAX_UNREAD = 4096
_SHAKE_S = 10.0
_FULL_S = 0.1


class Answering:
    """Listens for streams; the first part of each message is its peer. dropped: told why a peer was cut off for good.

    nearby: listens to callers of this host, if there is such a socket; secret: of the job's key, None for plain text;
    most: bytes of one message.
    """

    def __init__(
        self,
        listening: sockets.socket,
        *,
        nearby: sockets.socket | None = None,
        secret: bytes | None,
        most: int,
        deliver: Deliver,
        dropped: Callable[[str], None],
    ) -> None:
        self.closed = False
        self._listening = [listening] if nearby is None else [listening, nearby]
        self._secret = secret
        self._most = most
        self._deliver = deliver
        self._dropped = dropped
        self._peers: dict[bytes, Flow] = {}
        self._names = itertools.count(1)
        self._staging = staging()
        self._loop = asyncio.get_running_loop()
        self._listen()

    def send(self, key: Hashable, parts: Sequence[Buffer]) -> None:
        """Send ``parts`` to the peer that the first one names, unless it is gone."""
        flow = self._peers.get(bytes(parts[0]))
        if flow is None or flow.outbox is None:
            return
        if len(flow.outbox) >= _MAX_UNREAD:
            flow.close()
            self._forget(bytes(parts[0]), ProtocolError("a peer does not read what it asked for"))
            return
        flow.outbox.push(key, parts[1:])
        flow.flush()

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
            known = arena_socket.accepted(socket)
            if known is None:
                self._dropped("a caller of this host runs as another user")
                return
            socket = known
        if len(self._peers) >= _MAX_PEERS:
            socket.close()
            self._dropped("too many peers")
            return
        socket.setblocking(False)
        tune(socket)
        name = next(self._names).to_bytes(8, "big")
        flow = Flow(
            socket,
            size=HELLO_SIZE,
            shake=self._shaking(socket),
            deliver=lambda parts: self._deliver([Part(memoryview(name)), *parts]),
            lost=lambda why: self._forget(name, why),
        )
        self._peers[name] = flow
        self._loop.call_later(_SHAKE_S, self._cut_off_silent, name)

    def _shaking(self, socket: sockets.socket) -> Callable[[bytes], tuple[Inbox, Outbox] | int]:
        handshake = Handshake(self._secret)
        greeted = False

        def shake(came: bytes) -> tuple[Inbox, Outbox] | int:
            nonlocal greeted
            if greeted:
                handshake.proved(came)
                return arena_socket.boxes(
                    socket,
                    incoming=handshake.incoming,
                    outgoing=handshake.outgoing,
                    most=self._most,
                    staging=self._staging,
                )
            greeted = True
            welcome = handshake.welcome(came)
            if socket.send(welcome) < len(welcome):
                raise ProtocolError("a peer takes no welcome")
            return PROOF_SIZE

        return shake

    def _cut_off_silent(self, name: bytes) -> None:
        flow = self._peers.get(name)
        if flow is not None and flow.outbox is None:
            flow.close()
            self._forget(name, ProtocolError("a peer did not shake hands"))

    def _forget(self, name: bytes, why: AsyncFlowError) -> None:
        if self._peers.pop(name, None) is not None and isinstance(why, ProtocolError):
            self._dropped(str(why))
