"""One zmq socket driven by an asyncio loop, and the headers of the messages that calls are made of.

A message is ``[header, body, *frames]``: header and body msgpack, frames raw bytes. zmq's file descriptor is edge
triggered: it may stay silent although something can be read after any send or receive. ``Wire`` is the one place that
knows it, by asking the socket again after whatever it did.

Invariants: nothing here ever blocks the loop; a message is sent whole or not at all; one busy peer cannot keep the loop
for more than ``_BURST`` messages at a time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Annotated, TypeAlias

import msgspec
import zmq
from msgspec import Meta, Struct

from asyncflow.errors import ProtocolError
from asyncflow.net.frames import Buffer
from asyncflow.net.stream import Part

ZERO_COPY = 64 * 1024
"""Bytes from which on a frame is sent from where it lies, and given out where it arrived; smaller ones are copied."""

MAX_FRAMES = 65_536
MAX_TIMEOUT = 7 * 86_400.0
_HEADER_ROOM = 1024
_BURST = 64
_HIGH_WATER = 4096
_MAX_SOCKETS = 16_384
_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_READ = int(zmq.POLLIN)
_READ_WRITE = int(zmq.POLLIN | zmq.POLLOUT)

Socket: TypeAlias = "zmq.Socket[bytes]"
CallId = Annotated[int, Meta(ge=0)]


class Call(Struct, frozen=True, array_like=True, tag="c1"):
    """Header of a request. timeout: seconds that the caller will still wait; frames: how many follow the body."""

    call: CallId
    method: Annotated[str, Meta(max_length=128)]
    timeout: float
    frames: Annotated[int, Meta(ge=0, le=MAX_FRAMES)]


class Cancel(Struct, frozen=True, array_like=True, tag="x1"):
    """Header without a body: the caller of ``call`` waits no longer."""

    call: CallId


class Answer(Struct, frozen=True, array_like=True, tag="a1"):
    """Header of a reply: body and frames are what the handler gave."""

    call: CallId
    frames: Annotated[int, Meta(ge=0, le=MAX_FRAMES)]


class Failure(Struct, frozen=True, array_like=True, tag="f1"):
    """Header of a reply that is an error: the body is ``AsyncFlowError.to_wire()``."""

    call: CallId


MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError)
"""What a decoder raises for bytes that are not what they should be; msgspec passes on what UTF-8 has to say."""

encode = msgspec.msgpack.Encoder().encode
to_server = msgspec.msgpack.Decoder(Call | Cancel).decode
to_client = msgspec.msgpack.Decoder(Answer | Failure).decode
error_body = msgspec.msgpack.Decoder(dict[str, str]).decode


def check_call(header: Call, parts: int) -> None:
    """Refuse a request whose header does not fit its ``parts`` (header, body and frames) or whose timeout is none."""
    if parts != 2 + header.frames:
        raise ProtocolError(f"a request of {header.frames} frames came in {parts} parts")
    if not (math.isfinite(header.timeout) and 0 < header.timeout <= MAX_TIMEOUT):
        raise ProtocolError(f"a request has a timeout of {header.timeout} s")


def check_size(what: str, body: bytes, frames: Sequence[Buffer], *, limit: int) -> int:
    """Give the bytes of a message; ProtocolError where it holds more than ``limit`` of them, or too many frames."""
    size = len(body) + sum(memoryview(frame).nbytes for frame in frames)
    if size + _HEADER_ROOM > limit or len(frames) > MAX_FRAMES:
        hint = f"Split it: at most {limit} bytes and {MAX_FRAMES} frames go in one message"
        raise ProtocolError(f"{what} has {size} bytes in {len(frames)} frames", hint=hint)
    return size


def views(parts: Sequence[zmq.Frame | Part]) -> list[memoryview]:
    """Give writable views of received frames; the small ones are copied so that they pin no receive buffer."""
    return [memoryview(bytearray(part.buffer) if len(part) < ZERO_COPY else part.buffer) for part in parts]


def context() -> zmq.Context[Socket]:
    """Give this process's zmq context, with room for more sockets than zmq's own default of 1023."""
    made: zmq.Context[Socket] = zmq.Context.instance()
    made.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
    return made


def open_socket(kind: int, *, max_message: int) -> Socket:
    """Make a socket that never lingers, bounds what it queues, and notices within 25 s that a host vanished."""
    socket = context().socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    socket.setsockopt(zmq.TCP_MAXRT, 25_000)
    return socket


class Wire:
    """Sends and receives multipart messages on ``socket`` from the running loop; owns the socket.

    deliver: called with the parts of each message that came; it must not raise, and may send.
    """

    def __init__(self, socket: Socket, deliver: Callable[[list[zmq.Frame]], None]) -> None:
        self._socket = socket
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._outbox: dict[Hashable, Sequence[Buffer]] = {}
        self._again = False
        self._turning = False
        self.closed = False
        self._loop.add_reader(self._fd, self._turn)
        self._look()

    def send(self, key: Hashable, parts: Sequence[Buffer]) -> None:
        """Send ``parts`` now, or as soon as the socket takes them; ``key`` names the message for ``withdraw``."""
        if self._outbox or not self._try(parts):
            self._outbox[key] = parts
        if not self._turning:
            self._look()

    def withdraw(self, key: Hashable) -> bool:
        """Take back the message ``key`` if it has not left yet, and say whether that was so."""
        return self._outbox.pop(key, None) is not None

    def close(self) -> None:
        """Close the socket at once; what was not sent is dropped."""
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._fd)
            self._outbox.clear()
            self._socket.close(linger=0)

    def drain(self) -> None:
        """Deliver everything that has arrived by now."""
        while not self.closed and self._receive():
            pass

    def _turn(self) -> None:
        self._again = False
        self._turning = True
        quiet = False
        try:
            quiet = self._receive_some()
            if self._outbox:
                quiet = False
                self._send_some()
        finally:
            self._turning = False
            if not quiet:
                self._look()

    def _receive_some(self) -> bool:
        """Deliver a burst of messages; True where there are no more, as the socket itself has just said."""
        for _ in range(_BURST):
            if self.closed or not self._receive() or self.closed:
                return False
            if not int(self._socket.getsockopt(zmq.EVENTS)) & _READ:
                return True
        return False

    def _send_some(self) -> None:
        while not self.closed and self._outbox:
            key = next(iter(self._outbox))
            if not self._try(self._outbox[key]):
                break
            del self._outbox[key]

    def _look(self) -> None:
        """Come back in the next turn of the loop if there is still something that this socket could do."""
        if self.closed or self._again:
            return
        if int(self._socket.getsockopt(zmq.EVENTS)) & (_READ_WRITE if self._outbox else _READ):
            self._again = True
            self._loop.call_soon(self._turn)

    def _receive(self) -> bool:
        receive = self._socket.recv
        try:
            part = receive(_NOBLOCK, copy=False)
        except zmq.Again:
            return False
        parts = [part]
        while part.more:
            part = receive(_NOBLOCK, copy=False)
            parts.append(part)
        self._deliver(parts)
        return True

    def _try(self, parts: Sequence[Buffer]) -> bool:
        send, last = self._socket.send, len(parts) - 1
        for index, part in enumerate(parts):
            small = len(part) < ZERO_COPY if type(part) is bytes else memoryview(part).nbytes < ZERO_COPY
            try:
                send(part, _MORE if index < last else _NOBLOCK, copy=small)
            except zmq.Again:
                # Refused at its first part, a message can wait. Later parts are only refused when the connection broke
                # in between: the message went with it, which the owner learns from the loss of the connection.
                return index > 0
        return True
