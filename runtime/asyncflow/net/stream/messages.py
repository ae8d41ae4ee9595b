"""Messages over a byte stream, without any I/O: what to send next, where the next bytes go, what came.

A message of parts is one *block* (how many parts, the size of each, the bytes of the small ones), behind its length,
then each large part, in chunks where they are sealed. Large parts are neither joined nor copied: they are sent from
where they lie and received where they stay.

Invariants: parts come out as they went in, whole messages only and in order, or the stream ends with a ProtocolError;
no size is believed beyond ``most``, and memory is touched only by bytes that came.
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections import deque
from collections.abc import Generator, Hashable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from asyncflow.errors import ProtocolError
from asyncflow.net.frames import LARGE, Buffer
from asyncflow.net.stream.sealed import TAG, Seal

MAX_PARTS = 1 << 17
_CHUNK = 1 << 20
_DIRECT = 1 << 14
"""Missing bytes from which on they are received where they stay."""
_AHEAD = 4
_TO_COME = memoryview(b"")
_LENGTH = struct.Struct("<Q")
_COUNT = struct.Struct("<I")

_CutUp: TypeAlias = tuple[list[memoryview], list[tuple[int, int]]]


@functools.lru_cache(64)
def _table(count: int) -> struct.Struct:
    """Give the beginning of the block of ``count`` parts: their number, and the size of each."""
    return struct.Struct(f"<I{count}Q")


class Inbox:
    """What comes: ``room`` says where the next bytes go, ``took`` how many came. The parts' memory is their own.

    most: bytes of one message; staging: memory for bytes that do not stay there, which inboxes of one thread may share.
    """

    def __init__(self, *, most: int, seal: Seal | None, staging: memoryview) -> None:
        self._most = most
        self._seal = seal
        self._over = TAG if seal else 0
        self._staging = staging
        self._whole: list[list[memoryview]] = []
        self._between = True
        self._direct = False
        self._filled = 0
        self._reader = self._read()
        self._target = next(self._reader)

    def room(self) -> memoryview:
        """Give the memory for the next bytes."""
        self._direct = len(self._target) - self._filled >= _DIRECT
        return self._target[self._filled :] if self._direct else self._staging

    def took(self, count: int) -> list[list[memoryview]]:
        """Take in ``count`` bytes that were put into ``room``; give the messages that are whole now."""
        if self._direct:
            self._fill(count)
        else:
            begin = 0
            while begin < count:
                if self._between and not self._filled and (end := self._take_blocks(begin, count)) > begin:
                    begin = end
                    continue
                step = min(count - begin, len(self._target) - self._filled)
                self._target[self._filled : self._filled + step] = self._staging[begin : begin + step]
                begin += step
                self._fill(step)
        whole, self._whole = self._whole, []
        return whole

    def close(self) -> None:
        """Let go of what has not come whole; nothing more comes."""
        self._reader.close()
        self._target = _TO_COME

    def _take_blocks(self, begin: int, count: int) -> int:
        """Take the blocks that lie whole in the staging memory from ``begin`` on; give where the rest begins."""
        staging, seal = self._staging, self._seal
        while count - begin >= _LENGTH.size:
            start = begin + _LENGTH.size
            end: int = start + _LENGTH.unpack_from(staging, begin)[0]
            if end > count or end - start < _COUNT.size + self._over:
                break
            block = memoryview(bytearray(staging[start : end - self._over]))
            if seal is not None:
                seal.open(staging[start:end], block)
            parts, large = self._cut_up(block)
            if large:
                self._target = self._reader.send((parts, large))
                return end
            self._whole.append(parts)
            begin = end
        return begin

    def _fill(self, count: int) -> None:
        self._filled += count
        while self._filled == len(self._target):
            self._target, self._filled = next(self._reader), 0

    def _read(self) -> Generator[memoryview, _CutUp | None, None]:
        """Yield the memory that must be filled next, message after message; takes a block that came otherwise."""
        length = memoryview(bytearray(_LENGTH.size))
        while True:
            self._between = True
            opened = yield length
            self._between = False
            if opened is None:
                size = _LENGTH.unpack(length)[0] - self._over
                if not _COUNT.size <= size <= self._most + _COUNT.size + 8 * MAX_PARTS:
                    raise ProtocolError(f"a message begins with {size} bytes where {self._most} are allowed")
                block = _memory(size + self._over)
                yield block
                if self._seal is not None:
                    sealed_block, block = block, _memory(size)
                    self._seal.open(sealed_block, block)
                opened = self._cut_up(block)
            parts, large = opened
            for index, size in large:
                parts[index] = _memory(size)
                yield from self._large(parts[index])
            self._whole.append(parts)
            del opened, parts

    def _found(self, word: int, more: Iterator[int]) -> memoryview | None:
        """Give the large part of which a block says this, and ``more``, where that is not its size and it comes."""
        del word, more
        return None

    def _large(self, part: memoryview) -> Generator[memoryview, None, None]:
        """Fill a large part."""
        if self._seal is None:
            yield part
            return
        sealed = _memory(min(len(part), _CHUNK) + TAG)
        for start in range(0, len(part), _CHUNK):
            piece = part[start : start + _CHUNK]
            chunk = sealed[: len(piece) + TAG]
            yield chunk
            self._seal.open(chunk, piece)

    def _cut_up(self, block: memoryview) -> _CutUp:
        """Give the parts of which ``block`` tells: the small ones, and for each large one its place and size."""
        (count,) = _COUNT.unpack_from(block)
        at = _COUNT.size + 8 * count
        if count > MAX_PARTS or at > len(block):
            raise ProtocolError(f"a block of {len(block)} bytes cannot name {count} parts")
        _, *sizes = _table(count).unpack_from(block)
        total = len(block) - at
        parts: list[memoryview] = []
        large: list[tuple[int, int]] = []
        words = iter(sizes)
        for size in words:
            if size >= LARGE:
                found = self._found(size, words)
                if found is None:
                    large.append((len(parts), size))
                parts.append(_TO_COME if found is None else found)
                total += size if found is None else len(found)
                continue
            parts.append(block[at : at + size])
            at += size
        if at != len(block):
            raise ProtocolError(f"the small parts of a message do not fill its block of {len(block)} bytes")
        if total > self._most:
            raise ProtocolError(f"a message of {total} bytes came where {self._most} are allowed")
        return parts, large


class Outbox:
    """What goes: messages by key, in order. ``views`` gives what to send next, ``sent`` takes what went."""

    def __init__(self, *, seal: Seal | None) -> None:
        self._seal = seal
        self._messages: dict[Hashable, tuple[Sequence[Buffer], list[int]]] = {}
        self._waiting = 0
        self._under_way = 0
        self._pieces: Iterator[Buffer] | None = None
        self._views: deque[Buffer] = deque()

    def __len__(self) -> int:
        return len(self._messages)

    def in_one(self, parts: Sequence[Buffer]) -> Buffer | None:
        """Give the bytes of a message of small parts that nothing waits before; None where it must be ``push``ed.

        They go now, and what does not go of them is to be ``keep``t.
        """
        if self._views or self._messages or self._pieces is not None:
            return None
        sizes = _sizes(parts)
        length = sum(sizes)
        if length >= LARGE and max(sizes) >= LARGE:
            return None
        return self._block(sizes, parts, length=length)

    def keep(self, rest: Buffer) -> None:
        """Have ``rest``, the end of what ``in_one`` gave, go next."""
        self._views.append(rest)

    def push(self, key: Hashable, parts: Sequence[Buffer]) -> None:
        """Put a message behind the others. Its large parts must not change until they went."""
        self.withdraw(key)
        sizes = _sizes(parts)
        self._messages[key] = parts, sizes
        self._waiting += sum(sizes)

    def withdraw(self, key: Hashable) -> bool:
        """Take back a message of which nothing went yet, and say whether that was so."""
        if (message := self._messages.pop(key, None)) is None:
            return False
        self._waiting -= sum(message[1])
        return True

    def views(self) -> list[Buffer]:
        """Give some of the next bytes; nothing when all went."""
        while len(self._views) < _AHEAD and (piece := self._piece()):
            self._views.append(piece)
        return list(self._views)

    def sent(self, count: int) -> None:
        """Take note that the first ``count`` bytes of ``views`` went."""
        while count:
            first = self._views[0]
            if count < len(first):
                self._views[0] = memoryview(first)[count:]
                return
            count -= len(first)
            self._views.popleft()

    def close(self) -> None:
        """Let go of what did not go; nothing more goes."""
        self._messages.clear()
        self._views.clear()
        self._pieces = None
        self._waiting = self._under_way = 0

    @property
    def idle(self) -> bool:
        """Whether all went."""
        return not self._messages and not self._views and self._pieces is None

    @property
    def unsent(self) -> int:
        """The bytes that lie here, large parts included."""
        return self._waiting + self._under_way + sum(map(len, self._views))

    def _piece(self) -> Buffer | None:
        """Give what goes next; nothing where that is nothing now."""
        piece = None
        if self._pieces is not None and (piece := next(self._pieces, None)) is None:
            self._pieces = None
        if piece is None and self._messages:
            parts, sizes = self._messages.pop(next(iter(self._messages)))
            self._waiting -= sum(sizes)
            piece, self._pieces = self._cut(parts, sizes)
        return piece

    def _cut(self, parts: Sequence[Buffer], sizes: Sequence[int]) -> tuple[Buffer, Iterator[Buffer] | None]:
        """Give the first piece of a message, and those that come after it, if any do."""
        words: list[int] = []
        small: list[Buffer] = []
        large: list[memoryview] = []
        length = 0
        for part, size in zip(parts, sizes, strict=True):
            said: Sequence[int] = ()
            if size < LARGE:
                small.append(part)
                length += size
            elif not (said := self._elsewhere(view := memoryview(part).cast("B"))):
                large.append(view)
            words += said or (size,)
        self._under_way = sum(map(len, large))
        rest = itertools.chain.from_iterable(map(self._large, large)) if large else None
        return self._block(words, small, length=length), rest

    def _block(self, sizes: Sequence[int], small: Sequence[Buffer], *, length: int) -> Buffer:
        """Give a block, behind its length. length: bytes of the small parts."""
        table = _table(len(sizes)).pack(len(sizes), *sizes)
        if self._seal is None:
            return b"".join([_LENGTH.pack(len(table) + length), table, *small])
        sealed = self._seal.seal(b"".join([table, *small]), behind=_LENGTH.size)
        _LENGTH.pack_into(sealed, 0, len(sealed) - _LENGTH.size)
        return sealed

    def _elsewhere(self, part: memoryview) -> Sequence[int]:
        """Put a large part where the peer finds it, and give what the block says instead of its size; (): it goes."""
        del part
        return ()

    def _large(self, view: memoryview) -> Iterator[Buffer]:
        """Give the pieces in which a large part goes."""
        if self._seal is None:
            self._under_way -= len(view)
            yield view
            return
        for start in range(0, len(view), _CHUNK):
            piece = view[start : start + _CHUNK]
            self._under_way -= len(piece)
            yield self._seal.seal(piece)


def _sizes(parts: Sequence[Buffer]) -> list[int]:
    return [len(part) if type(part) is bytes else memoryview(part).nbytes for part in parts]


def _memory(size: int) -> memoryview:
    return np.empty(size, np.uint8).data
