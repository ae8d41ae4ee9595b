"""Messages that come over a byte stream (see ``blocks``), without any I/O: where the next bytes go, what came.

Invariants: parts come out as they went in, whole messages only and in order, or the stream ends with a ProtocolError;
no size is believed beyond ``most``, and memory is touched only by bytes that came.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias

import numpy as np

from asyncflow.errors import ProtocolError
from asyncflow.net.frames import LARGE
from asyncflow.net.stream.blocks import COUNT, LENGTH, MAX_PARTS, table_of

_DIRECT = 1 << 14
"""Missing bytes from which on they are received where they stay."""
_TO_COME = memoryview(b"")

_CutUp: TypeAlias = tuple[list[memoryview], list[tuple[int, int]]]


class Inbox:
    """What comes: ``room`` says where the next bytes go, ``took`` how many came. The parts' memory is their own.

    most: bytes of one message; staging: memory for bytes that do not stay there, which inboxes of one thread may share.
    """

    def __init__(self, *, most: int, staging: memoryview) -> None:
        self._most = most
        self._staging = staging
        self._whole: list[list[memoryview]] = []
        self._between = True
        self._direct = False
        self._filled = 0
        self._reader = self._read()
        self._target = next(self._reader)

    def room(self) -> memoryview:
        """Return the memory for the next bytes."""
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
        staging = self._staging
        while count - begin >= LENGTH.size:
            start = begin + LENGTH.size
            end: int = start + LENGTH.unpack_from(staging, begin)[0]
            if end > count or end - start < COUNT.size:
                break
            block = memoryview(bytearray(staging[start:end]))
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
        length = memoryview(bytearray(LENGTH.size))
        while True:
            self._between = True
            opened = yield length
            self._between = False
            if opened is None:
                size = LENGTH.unpack(length)[0]
                if not COUNT.size <= size <= self._most + COUNT.size + 8 * MAX_PARTS:
                    raise ProtocolError(f"a message begins with {size} bytes where {self._most} are allowed")
                block = _memory(size)
                yield block
                opened = self._cut_up(block)
            parts, large = opened
            for index, size in large:
                parts[index] = _memory(size)
                yield parts[index]
            self._whole.append(parts)
            del opened, parts

    def _found(self, word: int) -> memoryview | None:
        """Return the large part that ``word`` of a block places elsewhere; None where ``word`` is its size."""
        del word
        return None

    def _cut_up(self, block: memoryview) -> _CutUp:
        """Return the parts of which ``block`` tells: the small ones, and for each large one its place and size."""
        (count,) = COUNT.unpack_from(block)
        at = COUNT.size + 8 * count
        if count > MAX_PARTS or at > len(block):
            raise ProtocolError(f"a block of {len(block)} bytes cannot name {count} parts")
        _, *sizes = table_of(count).unpack_from(block)
        total = len(block) - at
        parts: list[memoryview] = []
        large: list[tuple[int, int]] = []
        for size in sizes:
            if size >= LARGE:
                found = self._found(size)
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


def _memory(size: int) -> memoryview:
    return np.empty(size, np.uint8).data
