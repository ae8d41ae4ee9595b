"""Messages in a byte stream, without any I/O: their framing, the greetings of both sides, the headers of calls.

A message of parts is one *block* (number of parts, size of each, bytes of the small ones), preceded by its length, then
each large part. Large parts are neither joined nor copied: they are sent from the sender's memory, and received into
their final memory. If both sides share memory (``shm``), a block may hold the location of a large part in place of its
size: the highest bit is set, then come the page and, in the lowest 40 bits, the size in bytes. A call is a message
``[header, body, *frames]``: header and body are msgpack, frames are raw bytes.

The first message of each side is its greeting: ``[magic, the caller's URI]`` and ``[magic, server]``. The URI
(``identity.ProcessIdentity.uri``) is empty if the caller has no certificate. Over TLS it must be the URI in the
certificate. From a Unix socket it is trusted: the kernel proves that the caller runs as the same user, who could read
the certificates anyway. A caller whose intended server has ended and left its port to another server disconnects. The
greetings prove no identity: that is done by TLS or the kernel.

Invariants: messages arrive complete, unchanged and in order, or the stream ends with a ProtocolError. A size above
``most`` is refused, and memory is written only by received bytes. The number of unsent bytes is known. Any received
bytes result in a message of this protocol or in an error that describes the violation.
"""

from __future__ import annotations

import functools
import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta, Struct

from asyncflow.errors import AsyncFlowError, ProtocolError, Refused, from_wire
from asyncflow.identity import ProcessIdentity
from asyncflow.rpc.columns import LARGE, Buffer

SERVER_SIZE = 8
ANY_SERVER = bytes(SERVER_SIZE)
"""Matches any server; no server has this id."""


def new_server() -> bytes:
    """Return a new random server id."""
    return os.urandom(SERVER_SIZE)


MAX_PARTS = 1 << 17
LENGTH = struct.Struct("<Q")
COUNT = struct.Struct("<I")


@functools.lru_cache(64)
def table_of(count: int) -> struct.Struct:
    """Return the format of the start of a block of ``count`` parts: their number, and the size of each."""
    return struct.Struct(f"<I{count}Q")


_DIRECT = 1 << 14
"""A large part with at least this many missing bytes is received directly into its memory."""
_IN_SHARED_MEMORY = 1 << 63
_SIZE_BITS = 40
PIECE = 1 << 18
"""Maximum bytes of a large part that are sent in one chunk."""


class _Staging(threading.local):
    """Memory of each thread for received bytes that are copied elsewhere."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(1 << 16))


_staging = _Staging()

Take: TypeAlias = Callable[[int, int], memoryview]
Put: TypeAlias = Callable[[memoryview], int | None]


class Inbox:
    """Received messages: ``room`` returns memory for the next bytes, ``took`` processes them. No memory is reused.

    most: maximum bytes of one message, which may be changed between two messages; take: returns the part of a given
    size at a page of shared memory.
    """

    def __init__(self, *, most: int, take: Take | None = None) -> None:
        self.most = most
        self._take = take
        self._stream = bytearray()
        self._parts: list[memoryview] = []
        self._missing: deque[memoryview] = deque()
        self._filled = 0
        self._direct = False

    def room(self) -> memoryview:
        """Return the memory for the next bytes, to be filled before this thread calls ``room`` of another inbox."""
        self._direct = bool(self._missing) and len(self._missing[0]) - self._filled >= _DIRECT
        return self._missing[0][self._filled :] if self._direct else _staging.memory

    def took(self, count: int) -> list[list[memoryview]]:
        """Process ``count`` bytes that were written into ``room``, and return the messages completed by them."""
        begin = 0
        if self._direct:
            self._filled += count
        else:
            self._stream += _staging.memory[:count]
        whole = []
        while self._missing or begin < len(self._stream):
            if not self._missing:
                block = self._block(begin)
                if block is None:
                    break
                begin += LENGTH.size + len(block)
                self._parse_block(block)
            if self._missing:
                begin += self._fill(begin)
                if self._missing:
                    break
            whole.append(self._parts)
            self._parts = []
        if begin:
            self._stream = self._stream[begin:]  # the parts keep the old one
        return whole

    def close(self) -> None:
        """Release incomplete messages; nothing more is received."""
        self._stream = bytearray()
        self._missing.clear()
        self._parts = []

    def _fill(self, begin: int) -> int:
        """Fill large parts with the stream from ``begin`` on; return the number of bytes used."""
        at = begin
        while self._missing:
            part = self._missing[0]
            step = min(len(part) - self._filled, len(self._stream) - at)
            part[self._filled : self._filled + step] = self._stream[at : at + step]
            at += step
            self._filled += step
            if self._filled < len(part):
                break
            self._missing.popleft()
            self._filled = 0
        return at - begin

    def _block(self, begin: int) -> memoryview | None:
        """Return the block that begins at ``begin``; None if it is incomplete."""
        if len(self._stream) - begin < LENGTH.size:
            return None
        (size,) = LENGTH.unpack_from(self._stream, begin)
        if not COUNT.size <= size <= self.most + COUNT.size + 8 * MAX_PARTS:
            if is_tls(self._stream[begin:]):
                raise ProtocolError("the peer speaks TLS, and this process has no certificate")
            raise ProtocolError(f"a message begins with {size} bytes, but at most {self.most} are allowed")
        begin += LENGTH.size
        return memoryview(self._stream)[begin : begin + size] if len(self._stream) - begin >= size else None

    def _parse_block(self, block: memoryview) -> None:
        """Start the message that ``block`` describes: take its small parts, and allocate memory for the large ones."""
        (count,) = COUNT.unpack_from(block)
        at = COUNT.size + 8 * count
        if count > MAX_PARTS or at > len(block):
            raise ProtocolError(f"a block of {len(block)} bytes cannot name {count} parts")
        _, *sizes = table_of(count).unpack_from(block)
        total = len(block) - at
        parts, large = self._parts, []
        for size in sizes:
            if size >= LARGE:
                if self._take is not None and size & _IN_SHARED_MEMORY:
                    page, size = (size ^ _IN_SHARED_MEMORY) >> _SIZE_BITS, size & ((1 << _SIZE_BITS) - 1)
                    parts.append(self._take(page, size))
                else:
                    large.append(len(parts))
                    parts.append(memoryview(b""))
                total += size
                continue
            parts.append(block[at : at + size])
            at += size
        if at != len(block):
            raise ProtocolError(f"the small parts of a message do not fill its block of {len(block)} bytes")
        if total > self.most:
            raise ProtocolError(f"a message has {total} bytes, but at most {self.most} are allowed")
        for index in large:
            parts[index] = np.empty(sizes[index], np.uint8).data
            self._missing.append(parts[index])


class Outbox:
    """Messages to send, by key, in order. put: copies a large part to shared memory, returns its page or None."""

    def __init__(self, *, put: Put | None = None) -> None:
        self._put = put
        self._messages: dict[Hashable, tuple[Sequence[Buffer], int]] = {}
        self._waiting = 0
        self._in_progress = 0
        self._extents: Iterator[Buffer] | None = None

    def __len__(self) -> int:
        return len(self._messages)

    def push(self, key: Hashable, parts: Sequence[Buffer]) -> None:
        """Append a message. Its large parts must not change until they were sent."""
        self.withdraw(key)
        size = sum([len(part) if type(part) is bytes else memoryview(part).nbytes for part in parts])
        self._messages[key] = parts, size
        self._waiting += size

    def withdraw(self, key: Hashable) -> bool:
        """Remove a message of which no byte was sent yet, and return whether it was removed."""
        if (message := self._messages.pop(key, None)) is None:
            return False
        self._waiting -= message[1]
        return True

    def next(self) -> Buffer | None:
        """Return the bytes to send next, at most ``PIECE`` of a large part; None if all were sent."""
        piece = next(self._extents, None) if self._extents is not None else None
        if piece is None:
            self._extents = None
            if self._messages:
                parts, size = self._messages.pop(next(iter(self._messages)))
                self._waiting -= size
                piece, self._extents = self._encode(parts)
        return piece

    def close(self) -> None:
        """Release all unsent messages; nothing more is sent."""
        self._messages.clear()
        self._extents = None
        self._waiting = self._in_progress = 0

    @property
    def idle(self) -> bool:
        """True if all messages were sent."""
        return self._extents is None and not self._messages

    @property
    def unsent(self) -> int:
        """Number of unsent bytes, large parts included."""
        return self._waiting + self._in_progress

    def _encode(self, parts: Sequence[Buffer]) -> tuple[Buffer, Iterator[Buffer] | None]:
        """Return the block of a message, and an iterator of the chunks of its large parts, None if it has none."""
        words: list[int] = []
        small: list[Buffer] = []
        large: list[memoryview] = []
        for part in parts:
            size = len(part) if type(part) is bytes else memoryview(part).nbytes
            if size < LARGE:
                small.append(part)
                words.append(size)
                continue
            view = memoryview(part).cast("B")
            page = None if self._put is None else self._put(view)
            words.append(size if page is None else _IN_SHARED_MEMORY | page << _SIZE_BITS | size)
            if page is None:
                large.append(view)
        self._in_progress = sum(map(len, large))
        return _block(words, small), self._chunks(large) if large else None

    def _chunks(self, large: Sequence[memoryview]) -> Iterator[Buffer]:
        for view in large:
            for begin in range(0, len(view), PIECE):
                piece = view[begin : begin + PIECE]
                self._in_progress -= len(piece)
                yield piece


def _block(words: Sequence[int], small: Sequence[Buffer]) -> bytes:
    """Return a block, preceded by its length. words: the entry of each part in the block's table."""
    table = table_of(len(words)).pack(len(words), *words)
    rest = b"".join(small)
    return b"".join([LENGTH.pack(len(table) + len(rest)), table, rest])


_MAGIC = b"AFh5"
_TLS = b"\x16\x03"
LONGEST_GREETING = 512
"""Maximum bytes of a greeting."""


def is_tls(received: bytes | bytearray) -> bool:
    """Return whether the received bytes start a TLS handshake."""
    return received.startswith(_TLS)


def hello(process: ProcessIdentity | None) -> bytes:
    """Return the greeting of a caller. Raises ProtocolError if its name is too long."""
    uri = process.uri.encode() if process is not None else b""
    if len(uri) > LONGEST_GREETING // 2:
        raise ProtocolError(f"the name of {process} of job {process and process.job} is too long")
    return _block([len(_MAGIC), len(uri)], [_MAGIC, uri])


def caller(parts: Sequence[memoryview]) -> ProcessIdentity | None:
    """Return the caller that a greeting names, None if it names none. Raises ProtocolError if it is malformed."""
    uri = _greeting(parts)
    found = ProcessIdentity.of(uri.decode(errors="replace")) if uri else None
    if uri and found is None:
        raise ProtocolError("the peer's greeting holds an invalid name")
    return found


def welcome(server: bytes) -> bytes:
    """Return the greeting by which a server admits a caller."""
    return _block([len(_MAGIC), len(server)], [_MAGIC, server])


def check_welcome(parts: Sequence[memoryview], *, dialled: bytes) -> None:
    """Check the greeting of a server. Raises ProtocolError if it is not the server that was dialled."""
    if _greeting(parts) != dialled != ANY_SERVER:
        raise ProtocolError("another server is at this address now", hint="The server that was dialled has ended")


def _greeting(parts: Sequence[memoryview]) -> bytes:
    if len(parts) != 2 or parts[0] != _MAGIC:
        hint = "Does one side have a certificate, and the other none?"
        raise ProtocolError("the peer does not speak this protocol", hint=hint)
    return bytes(parts[1])


MAX_MESSAGE = 1 << 30
"""Maximum bytes of a message, frames included, by default."""
MAX_FRAMES = 65_536
MAX_TIMEOUT = 7 * 86_400.0
_HEADER_ROOM = 1024

CallId = Annotated[int, Meta(ge=0)]


class Call(Struct, frozen=True, array_like=True, tag="c1"):
    """Header of a request. timeout: seconds for which the caller still waits; frames: number of frames."""

    call: CallId
    method: Annotated[str, Meta(max_length=128)]
    timeout: float
    frames: Annotated[int, Meta(ge=0, le=MAX_FRAMES)]


class Cancel(Struct, frozen=True, array_like=True, tag="x1"):
    """Header without a body: the caller of ``call`` has stopped waiting."""

    call: CallId


class Answer(Struct, frozen=True, array_like=True, tag="a1"):
    """Header of a reply with the result of the handler in body and frames."""

    call: CallId
    frames: Annotated[int, Meta(ge=0, le=MAX_FRAMES)]


class Failure(Struct, frozen=True, array_like=True, tag="f1"):
    """Header of an error reply: the body is ``AsyncFlowError.to_wire()``."""

    call: CallId


MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors that a decoder raises for malformed bytes, for example invalid UTF-8 or too deep nesting."""

encode = msgspec.msgpack.Encoder().encode
to_server = msgspec.msgpack.Decoder(Call | Cancel).decode
to_client = msgspec.msgpack.Decoder(Answer | Failure).decode
error_body = msgspec.msgpack.Decoder(dict[str, str]).decode

_build_lock = threading.Lock()
os.register_at_fork(before=_build_lock.acquire, after_in_parent=_build_lock.release, after_in_child=_build_lock.release)


def encode_request(method: str, request: Struct) -> bytes:
    """Return the body of a call. Raises Refused for values that msgpack lacks, such as texts that are not Unicode."""
    try:
        return encode(request)
    except (TypeError, OverflowError, RecursionError, UnicodeEncodeError) as wrong:
        hint = "Use Unicode texts, and Python's numbers and booleans"
        raise Refused(f"a value cannot be sent: {wrong}", where=method, hint=hint) from None


@functools.cache
def decoder_of(kind: Hashable) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder of ``kind``. Thread-safe: msgspec crashes if two threads build one for a struct concurrently.

    A fork waits until no decoder is being built.
    """
    with _build_lock:
        return msgspec.msgpack.Decoder(kind)


def fits(header: Call, parts: int) -> bool:
    """Return whether a request's header fits its number of parts (header, body and frames) and its timeout is valid."""
    return parts == 2 + header.frames and 0 < header.timeout <= MAX_TIMEOUT


def check_size(what: str, method: str, body: bytes, frames: Sequence[Buffer], *, limit: int) -> int:
    """Return the bytes of a message. Raises ProtocolError if it has more than ``limit`` bytes, or too many frames."""
    size = len(body) + (sum([memoryview(frame).nbytes for frame in frames]) if frames else 0)
    if size + _HEADER_ROOM > limit or len(frames) > MAX_FRAMES:
        hint = f"Split it: at most {limit} bytes and {MAX_FRAMES} frames go in one message"
        raise ProtocolError(f"{what} {method} has {size} bytes in {len(frames)} frames", hint=hint)
    return size


def read_answer(parts: Sequence[memoryview], *, where: str) -> tuple[int, AsyncFlowError | None]:
    """Return the id of the call that a message answers, -1 if it is malformed, and the error of an error reply."""
    try:
        header = to_client(parts[0])
    except (IndexError, *MALFORMED):
        return -1, None
    if isinstance(header, Failure):
        try:
            return header.call, from_wire(error_body(parts[1]))
        except (IndexError, *MALFORMED):
            return header.call, ProtocolError("the peer sent an error that cannot be decoded", where=where)
    if len(parts) == 2 + header.frames:
        return header.call, None
    return header.call, ProtocolError(f"a reply of {header.frames} frames came in {len(parts)} parts", where=where)
