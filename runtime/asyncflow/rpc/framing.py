"""Messages in a byte stream, without any I/O: how they are cut, the first one of each side, the headers of calls.

A message of parts is one *block* (how many parts, the size of each, the bytes of the small ones), behind its length,
then each large part. Large parts are neither joined nor copied: they are sent from where they lie and received where
they stay. Where both sides share memory (``shm``), a block may say of a large part where it lies instead of its size:
the highest bit is set, then come the page and, in the lowest 40 bits, the bytes. A call is a message
``[header, body, *frames]``: header and body msgpack, frames raw bytes.

The first message of each side says who calls, then which server answers: ``[magic, the caller's URI]`` and
``[magic, server]``. The URI (``identity.ProcessIdentity.uri``) is empty where the caller has no certificate. Over TLS
it must be the one that its certificate names; from a Unix socket it is believed, since the kernel says that the same
user calls, who could read the certificates anyway. A caller that dialled another server, whose port has been used
again, goes no further. Nothing here is a proof: that is TLS's, or the kernel's.

Invariants: parts come out as they went in, whole messages only and in order, or the stream ends with a ProtocolError;
no size is believed beyond ``most``, and memory is touched only by bytes that came; what lies unsent is known; whatever
bytes come, they are a message of this protocol or an error that says what they are not.
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
ANYBODY = bytes(SERVER_SIZE)
"""Stands for whichever server answers; no server is called so."""


def new_server() -> bytes:
    """Return what no other server is called."""
    return os.urandom(SERVER_SIZE)


MAX_PARTS = 1 << 17
LENGTH = struct.Struct("<Q")
COUNT = struct.Struct("<I")


@functools.lru_cache(64)
def table_of(count: int) -> struct.Struct:
    """Return the beginning of the block of ``count`` parts: their number, and the size of each."""
    return struct.Struct(f"<I{count}Q")


_DIRECT = 1 << 14
"""Missing bytes from which on they are received where they stay."""
_IN_SHARED_MEMORY = 1 << 63
_SIZE_BITS = 40
PIECE = 1 << 18
"""Most bytes that are sent at once of a large part."""


class _Staging(threading.local):
    """Memory of each thread for bytes that do not stay there."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(1 << 16))


_staging = _Staging()

Take: TypeAlias = Callable[[int, int], memoryview]
Put: TypeAlias = Callable[[memoryview], int | None]


class Inbox:
    """Messages that come: ``room`` says where the next bytes go, ``took`` how many came. Parts own their memory.

    most: bytes of one message, which may be changed between two; take: finds a part of so many bytes at a page of
    shared memory.
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
        """Return the memory for the next bytes, which must come before this thread asks for room elsewhere."""
        self._direct = bool(self._missing) and len(self._missing[0]) - self._filled >= _DIRECT
        return self._missing[0][self._filled :] if self._direct else _staging.memory

    def took(self, count: int) -> list[list[memoryview]]:
        """Take in ``count`` bytes that were put into ``room``, and return the messages that are whole now."""
        stream, begin = self._stream, 0
        if self._direct:
            self._filled += count
        else:
            stream += _staging.memory[:count]
        whole = []
        while True:
            if self._missing:
                begin += self._fill(begin)
                if self._missing:
                    break
            else:
                block = self._block(begin)
                if block is None:
                    break
                begin += LENGTH.size + len(block)
                self._cut_up(block)
            if not self._missing:
                whole.append(self._parts)
                self._parts = []
        del stream[:begin]
        return whole

    def close(self) -> None:
        """Release what has not come whole; nothing more comes."""
        self._stream.clear()
        self._missing.clear()
        self._parts = []

    def _fill(self, begin: int) -> int:
        """Fill large parts with what lies in the stream from ``begin`` on; return how many bytes that were."""
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
        """Return the block that begins there; None where it has not come whole."""
        if len(self._stream) - begin < LENGTH.size:
            return None
        (size,) = LENGTH.unpack_from(self._stream, begin)
        if not COUNT.size <= size <= self.most + COUNT.size + 8 * MAX_PARTS:
            if is_tls(self._stream[begin:]):
                raise ProtocolError("the peer speaks TLS, and this process has no certificate")
            raise ProtocolError(f"a message begins with {size} bytes where {self.most} are allowed")
        begin += LENGTH.size
        return memoryview(self._stream[begin : begin + size]) if len(self._stream) - begin >= size else None

    def _cut_up(self, block: memoryview) -> None:
        """Begin the message that ``block`` tells of: with its small parts, and memory for the large ones."""
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
            raise ProtocolError(f"a message of {total} bytes came where {self.most} are allowed")
        for index in large:
            parts[index] = np.empty(sizes[index], np.uint8).data
            self._missing.append(parts[index])


class Outbox:
    """Messages that go, by key, in order. put: copies a large part into shared memory and returns its page, if any."""

    def __init__(self, *, put: Put | None = None) -> None:
        self._put = put
        self._messages: dict[Hashable, tuple[Sequence[Buffer], int]] = {}
        self._waiting = 0
        self._under_way = 0
        self._extents: Iterator[Buffer] | None = None

    def __len__(self) -> int:
        return len(self._messages)

    def push(self, key: Hashable, parts: Sequence[Buffer]) -> None:
        """Put a message behind the others. Its large parts must not change until they went."""
        self.withdraw(key)
        size = sum([len(part) if type(part) is bytes else memoryview(part).nbytes for part in parts])
        self._messages[key] = parts, size
        self._waiting += size

    def withdraw(self, key: Hashable) -> bool:
        """Take back a message of which nothing went yet, and say whether that was so."""
        if (message := self._messages.pop(key, None)) is None:
            return False
        self._waiting -= message[1]
        return True

    def next(self) -> Buffer | None:
        """Return the bytes that go next, at most ``PIECE`` of a large part; None when all went."""
        piece = next(self._extents, None) if self._extents is not None else None
        if piece is None:
            self._extents = None
            if self._messages:
                parts, size = self._messages.pop(next(iter(self._messages)))
                self._waiting -= size
                piece, self._extents = self._cut(parts)
        return piece

    def close(self) -> None:
        """Release what did not go; nothing more goes."""
        self._messages.clear()
        self._extents = None
        self._waiting = self._under_way = 0

    @property
    def idle(self) -> bool:
        """True when all went."""
        return self._extents is None and not self._messages

    @property
    def unsent(self) -> int:
        """The bytes that lie here, large parts included."""
        return self._waiting + self._under_way

    def _cut(self, parts: Sequence[Buffer]) -> tuple[Buffer, Iterator[Buffer] | None]:
        """Return the block of a message, and the pieces of its large parts that come after it, if there are any."""
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
        self._under_way = sum(map(len, large))
        return _block(words, small), self._rest(large) if large else None

    def _rest(self, large: Sequence[memoryview]) -> Iterator[Buffer]:
        for view in large:
            for begin in range(0, len(view), PIECE):
                piece = view[begin : begin + PIECE]
                self._under_way -= len(piece)
                yield piece


def _block(words: Sequence[int], small: Sequence[Buffer]) -> bytes:
    """Return a block, behind its length. words: what it says of each part."""
    table = table_of(len(words)).pack(len(words), *words)
    rest = b"".join(small)
    return b"".join([LENGTH.pack(len(table) + len(rest)), table, rest])


_MAGIC = b"AFh5"
_TLS = b"\x16\x03"
LONGEST_GREETING = 512
"""Most bytes of the first message of a peer."""


def is_tls(came: bytes | bytearray) -> bool:
    """Return whether a peer begins with a handshake of TLS."""
    return came.startswith(_TLS)


def hello(process: ProcessIdentity | None) -> bytes:
    """Return what a caller says. Raises ProtocolError where its name is too long to be said."""
    uri = process.uri.encode() if process is not None else b""
    if len(uri) > LONGEST_GREETING // 2:
        raise ProtocolError(f"{process} of job {process and process.job} has too long a name")
    return _block([len(_MAGIC), len(uri)], [_MAGIC, uri])


def caller(parts: Sequence[memoryview]) -> ProcessIdentity | None:
    """Return who says to call; None where it does not say. Raises ProtocolError where it is no part of this."""
    uri = _greeting(parts)
    found = ProcessIdentity.of(uri.decode(errors="replace")) if uri else None
    if uri and found is None:
        raise ProtocolError("the peer calls itself by what is no name")
    return found


def welcome(server: bytes) -> bytes:
    """Return what a server says that lets a caller in."""
    return _block([len(_MAGIC), len(server)], [_MAGIC, server])


def check_welcome(parts: Sequence[memoryview], *, dialled: bytes) -> None:
    """Take in what a server says. Raises ProtocolError where it is not the one that was dialled."""
    if _greeting(parts) != dialled != ANYBODY:
        raise ProtocolError("another server is at this address now", hint="The one that was dialled is gone")


def _greeting(parts: Sequence[memoryview]) -> bytes:
    if len(parts) != 2 or parts[0] != _MAGIC:
        hint = "Does one side have a certificate, and the other none?"
        raise ProtocolError("the peer is no part of this protocol", hint=hint)
    return bytes(parts[1])


MAX_MESSAGE = 1 << 30
"""Most bytes of a message, frames included, where nothing else is said."""
MAX_FRAMES = 65_536
MAX_TIMEOUT = 7 * 86_400.0
_HEADER_ROOM = 1024

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


MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What a decoder raises for bytes that are not what they should be: no UTF-8 or nested too deep, among others."""

encode = msgspec.msgpack.Encoder().encode
to_server = msgspec.msgpack.Decoder(Call | Cancel).decode
to_client = msgspec.msgpack.Decoder(Answer | Failure).decode
error_body = msgspec.msgpack.Decoder(dict[str, str]).decode

_building = threading.Lock()
os.register_at_fork(before=_building.acquire, after_in_parent=_building.release, after_in_child=_building.release)


def encode_request(method: str, request: Struct) -> bytes:
    """Return the body of a call. Raises Refused where a text in it is not Unicode."""
    try:
        return encode(request)
    except UnicodeEncodeError as wrong:
        raise Refused(f"a text is not Unicode: {wrong}", where=method, hint="Give texts without surrogates") from None


@functools.cache
def decoder_of(kind: Hashable) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder of ``kind``, in any thread: where two first need a struct at once, msgspec itself crashes.

    A fork waits until none is half built.
    """
    with _building:
        return msgspec.msgpack.Decoder(kind)


def fits(header: Call, parts: int) -> bool:
    """Return whether a request's header fits its ``parts`` (header, body and frames) and its timeout is one."""
    return parts == 2 + header.frames and 0 < header.timeout <= MAX_TIMEOUT


def check_size(what: str, method: str, body: bytes, frames: Sequence[Buffer], *, limit: int) -> int:
    """Return the bytes of a message; ProtocolError where it holds more than ``limit`` of them, or too many frames."""
    size = len(body) + (sum([memoryview(frame).nbytes for frame in frames]) if frames else 0)
    if size + _HEADER_ROOM > limit or len(frames) > MAX_FRAMES:
        hint = f"Split it: at most {limit} bytes and {MAX_FRAMES} frames go in one message"
        raise ProtocolError(f"{what} {method} has {size} bytes in {len(frames)} frames", hint=hint)
    return size


def read_answer(parts: Sequence[memoryview], *, where: str) -> tuple[int, AsyncFlowError | None]:
    """Return the call that a message answers, -1 where it answers none, and the error if the answer is one."""
    try:
        header = to_client(parts[0])
    except (IndexError, *MALFORMED):
        return -1, None
    if isinstance(header, Failure):
        try:
            return header.call, from_wire(error_body(parts[1]))
        except (IndexError, *MALFORMED):
            return header.call, ProtocolError("an error came that cannot be read", where=where)
    if len(parts) == 2 + header.frames:
        return header.call, None
    return header.call, ProtocolError(f"an answer of {header.frames} frames came in {len(parts)} parts", where=where)
