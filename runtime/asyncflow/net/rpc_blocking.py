"""A connection for one thread at a time that blocks: the messages of ``wire`` over one DEALER, no event loop.

The thread sleeps in the socket itself, at most ``LOOK_S`` at once, and then looks whether the peer is still there. So
a call costs one send and one receive, and a peer that went away is noticed soon.

Invariant: a link that broke, or on which an answer did not come in time, is never used again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import msgspec
import zmq

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, PeerLost, ProtocolError, from_wire
from asyncflow.net import wire
from asyncflow.net.dialling import Health, dial
from asyncflow.net.doors import secret_of
from asyncflow.net.flow import SCHEME
from asyncflow.net.frames import Buffer
from asyncflow.net.keys import Keys
from asyncflow.net.stream import Part
from asyncflow.net.stream_link import StreamLink

LOOK_S = 0.1
"""How long a thread sleeps at most before it looks whether what it waits for can still come."""

_MORE = int(zmq.SNDMORE)
_NOW = int(zmq.NOBLOCK)


class Link:
    """One connection to ``address``, for whoever holds it. gone: why it is used no more, if that is so."""

    def __init__(self, address: str, *, keys: Keys | None, max_message: int) -> None:
        self.address = address
        self.gone: AsyncFlowError | None = None
        self._health = Health()
        self._socket, self._monitor = dial(address, keys=keys, max_message=max_message)
        self._socket.setsockopt(zmq.SNDTIMEO, int(LOOK_S * 1e3))
        self._waits_ms = -1
        self._max_message = max_message

    def send(
        self, call: int, method: str, request: msgspec.Struct, frames: Sequence[Buffer], *, deadline: float
    ) -> None:
        """Send a call as soon as the peer is connected. Raises DeadlineExceeded, PeerLost, ProtocolError."""
        body = wire.encode(request)
        if frames:
            wire.check_size(f"the call of {method}", body, frames, limit=self._max_message)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(f"{method} was not sent in time: {self._health.state}", where=self.address)
            header = wire.encode(wire.Call(call, method, min(left, wire.MAX_TIMEOUT), len(frames)))
            try:
                self._socket.send(header, _MORE)
                break
            except zmq.Again:
                self._look()
        try:
            last = len(frames)
            self._socket.send(body, _MORE if last else 0)
            for number, frame in enumerate(frames, 1):
                flags = _MORE if number < last else 0
                self._socket.send(frame, flags, copy=memoryview(frame).nbytes < wire.ZERO_COPY)
        except zmq.Again:
            raise PeerLost(f"the connection broke while {method} was sent", where=self.address) from None

    def forget(self, call: int) -> None:
        """Tell the peer, if it can be told at once, that nobody waits for ``call`` any more."""
        try:
            self._socket.send(wire.encode(wire.Cancel(call)), _NOW)
        except zmq.Again:
            return

    def receive(self, seconds: float) -> list[zmq.Frame]:
        """Give the next message, waiting up to ``seconds``; nothing if none came. Raises PeerLost."""
        if self.gone is not None:
            raise self.gone
        waits_ms = max(0, int(seconds * 1e3 + 0.999))
        if waits_ms != self._waits_ms:
            self._socket.setsockopt(zmq.RCVTIMEO, waits_ms)
            self._waits_ms = waits_ms
        try:
            return self._parts(0)
        except zmq.Again:
            pass
        try:
            self._look()
        except PeerLost:
            with contextlib.suppress(zmq.Again):
                return self._parts(_NOW)
            raise
        return []

    def _parts(self, flags: int) -> list[zmq.Frame]:
        frame = self._socket.recv(flags, copy=False)
        parts = [frame]
        while frame.more:
            frame = self._socket.recv(copy=False)
            parts.append(frame)
        return parts

    def _look(self) -> None:
        """Take in what happened to the connection. PeerLost if it broke."""
        while self._monitor.poll(0):
            self._health.learn(self._monitor.recv_multipart())
        if self._health.lost:
            hint = "Nobody knows whether the call was done"
            raise PeerLost("the connection to the peer broke", where=self.address, hint=hint)

    @property
    def state(self) -> str:
        """How the connection is, in words."""
        return self._health.state

    @property
    def ready(self) -> bool:
        """Whether a message is here of which the socket knows nothing any more: never."""
        return False

    @property
    def socket(self) -> wire.Socket:
        """What to poll when there are several links to wait for."""
        return self._socket

    def close(self) -> None:
        """Close it; what was not sent is dropped."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)


def link_to(address: str, *, keys: Keys | None, max_message: int) -> Link | StreamLink:
    """Make a connection to ``address``, by whatever it names."""
    if address.startswith(SCHEME):
        return StreamLink(address, secret=secret_of(keys), max_message=max_message)
    return Link(address, keys=keys, max_message=max_message)


def read_answer(parts: Sequence[zmq.Frame | Part], *, where: str) -> tuple[int, AsyncFlowError | None]:
    """Give the call that a message answers, -1 where it is none, and the error if it is one."""
    try:
        header = wire.to_client(parts[0].buffer)
        if isinstance(header, wire.Failure):
            return header.call, from_wire(wire.error_body(parts[1].buffer))
    except (IndexError, *wire.MALFORMED):
        return -1, None
    if len(parts) == 2 + header.frames:
        return header.call, None
    return header.call, ProtocolError(f"an answer of {header.frames} frames came in {len(parts)} parts", where=where)
