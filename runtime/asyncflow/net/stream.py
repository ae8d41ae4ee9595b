"""Messages over a byte stream, without any I/O: what to send next, where the next bytes go, what came.

A message of parts is one *block* (how many parts, the size of each, the bytes of the small ones), behind its length,
then each large part, in chunks where they are sealed. Large parts are neither joined nor copied: they are sent from
where they lie and received where they stay.

Invariants: parts come out as they went in, whole messages only and in order, or the stream ends with a ProtocolError;
no size is believed beyond ``most``, and memory is touched only by bytes that came.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections import deque
from collections.abc import Generator, Hashable, Iterator, Sequence

import numpy as np

from asyncflow.errors import ProtocolError
from asyncflow.net.frames import LARGE, Buffer
from asyncflow.net.sealed import TAG, Seal

MAX_PARTS = 1 << 17
_CHUNK = 1 << 20
_DIRECT = 1 << 14
"""Missing bytes from which on they are received where they stay."""
_AHEAD = 4
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT, _LARGEST_KEPT = 256 << 20, 32 << 20
_LENGTH = struct.Struct("<Q")
_COUNT = struct.Struct("<I")


def staging() -> memoryview:
    """Make memory for inboxes of this process, which from now on uses freed memory again for what comes."""
    _keep_freed()
    return memoryview(bytearray(1 << 16))


@functools.cache
def _keep_freed() -> None:
    """Let the allocator keep what was freed: to get each page anew from the kernel takes as long as to receive it."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)


class Inbox:
    """What comes: ``room`` says where the next bytes go, ``took`` how many came. The parts' memory is their own.

    most: bytes of one message; staging: memory for bytes that do not stay there, which inboxes of one thread may share.
    """

    def __init__(self, *, most: int, seal: Seal | None, staging: memoryview) -> None:
        self._most = most
        self._seal = seal
        self._staging = staging
        self._whole: list[list[memoryview]] = []
        self._reader = self._read()
        self._target = next(self._reader)
        self._filled = 0

    def room(self) -> memoryview:
        """Give the memory for the next bytes."""
        return self._target[self._filled :] if self._direct else self._staging

    def took(self, count: int) -> list[list[memoryview]]:
        """Take in ``count`` bytes that were put into ``room``; give the messages that are whole now."""
        if self._direct:
            self._fill(count)
        else:
            begin = 0
            while begin < count:
                step = min(count - begin, len(self._target) - self._filled)
                self._target[self._filled : self._filled + step] = self._staging[begin : begin + step]
                begin += step
                self._fill(step)
        whole, self._whole = self._whole, []
        return whole

    @property
    def _direct(self) -> bool:
        return len(self._target) - self._filled >= _DIRECT

    def _fill(self, count: int) -> None:
        self._filled += count
        while self._filled == len(self._target):
            self._target, self._filled = next(self._reader), 0

    def _read(self) -> Generator[memoryview, None, None]:
        """Yield the memory that must be filled next, message after message."""
        length = memoryview(bytearray(_LENGTH.size))
        over = TAG if self._seal else 0
        while True:
            yield length
            size = _LENGTH.unpack(length)[0] - over
            if not _COUNT.size <= size <= self._most + _COUNT.size + 8 * MAX_PARTS:
                raise ProtocolError(f"a message begins with {size} bytes where {self._most} are allowed")
            block = _memory(size + over)
            yield block
            if self._seal is not None:
                sealed_block, block = block, _memory(size)
                self._seal.open(sealed_block, block)
            parts = []
            at, sizes = self._sizes(block)
            for size in sizes:
                if size < LARGE:
                    parts.append(block[at : at + size])
                    at += size
                    continue
                part = _memory(size)
                parts.append(part)
                if self._seal is None:
                    yield part
                    continue
                sealed = _memory(min(size, _CHUNK) + TAG)
                for start in range(0, size, _CHUNK):
                    piece = part[start : start + _CHUNK]
                    chunk = sealed[: len(piece) + TAG]
                    yield chunk
                    self._seal.open(chunk, piece)
            self._whole.append(parts)

    def _sizes(self, block: memoryview) -> tuple[int, tuple[int, ...]]:
        """Give where the small parts begin, and the sizes of all parts."""
        (count,) = _COUNT.unpack_from(block)
        at = _COUNT.size + 8 * count
        if count > MAX_PARTS or at > len(block):
            raise ProtocolError(f"a block of {len(block)} bytes cannot name {count} parts")
        sizes = struct.unpack_from(f"<{count}Q", block, _COUNT.size)
        if sum(sizes) > self._most:
            raise ProtocolError(f"a message of {sum(sizes)} bytes came where {self._most} are allowed")
        if at + sum(size for size in sizes if size < LARGE) != len(block):
            raise ProtocolError(f"the small parts of a message do not fill its block of {len(block)} bytes")
        return at, sizes


class Outbox:
    """What goes: messages by key, in order. ``views`` gives what to send next, ``sent`` takes what went."""

    def __init__(self, *, seal: Seal | None) -> None:
        self._seal = seal
        self._messages: dict[Hashable, Sequence[Buffer]] = {}
        self._pieces: Iterator[memoryview] = iter(())
        self._views: deque[memoryview] = deque()

    def __len__(self) -> int:
        return len(self._messages)

    def push(self, key: Hashable, parts: Sequence[Buffer]) -> None:
        """Put a message behind the others. Its large parts must not change until they went."""
        self._messages[key] = parts

    def withdraw(self, key: Hashable) -> bool:
        """Take back a message of which nothing went yet, and say whether that was so."""
        return self._messages.pop(key, None) is not None

    def views(self) -> list[memoryview]:
        """Give some of the next bytes; nothing when all went."""
        while len(self._views) < _AHEAD:
            piece = next(self._pieces, None)
            if piece is not None:
                self._views.append(piece)
            elif self._messages:
                self._pieces = self._cut(self._messages.pop(next(iter(self._messages))))
            else:
                break
        return list(self._views)

    def sent(self, count: int) -> None:
        """Take note that the first ``count`` bytes of ``views`` went."""
        while count:
            first = self._views[0]
            if count < len(first):
                self._views[0] = first[count:]
                return
            count -= len(first)
            self._views.popleft()

    def _cut(self, parts: Sequence[Buffer]) -> Iterator[memoryview]:
        views = [_bytes_of(part) for part in parts]
        small = [view for view in views if len(view) < LARGE]
        block = b"".join([_COUNT.pack(len(views)), struct.pack(f"<{len(views)}Q", *map(len, views)), *small])
        sealed = block if self._seal is None else self._seal.seal(block)
        yield memoryview(_LENGTH.pack(len(sealed)) + sealed)
        for view in views:
            if len(view) < LARGE:
                continue
            if self._seal is None:
                yield view
                continue
            for start in range(0, len(view), _CHUNK):
                yield memoryview(self._seal.seal(view[start : start + _CHUNK]))


def _bytes_of(part: Buffer) -> memoryview:
    view = memoryview(part)
    if view.format == "B" and view.ndim == 1:
        return view
    return view.cast("B") if view.nbytes else memoryview(b"")


def _memory(size: int) -> memoryview:
    return np.empty(size, np.uint8).data
