"""Messages that go over a byte stream (see ``blocks``), without any I/O: what to send next.

Invariants: messages go whole and in order; what lies unsent is known to the byte.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence

from asyncflow.net.frames import LARGE, Buffer
from asyncflow.net.stream.blocks import LENGTH, table_of

_AHEAD = 4


class Outbox:
    """What goes: messages by key, in order. ``views`` gives what to send next, ``sent`` takes what went."""

    def __init__(self) -> None:
        self._messages: dict[Hashable, tuple[Sequence[Buffer], list[int]]] = {}
        self._waiting = 0
        self._under_way = 0
        self._pieces: Iterator[Buffer] | None = None
        self._views: deque[Buffer] = deque()

    def __len__(self) -> int:
        return len(self._messages)

    def in_one(self, parts: Sequence[Buffer]) -> Buffer | None:
        """Return the bytes of a message of small parts that nothing waits before; None where it must be ``push``ed.

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
        """Return some of the next bytes; nothing when all went."""
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
        """Return what goes next; nothing where that is nothing now."""
        piece = None
        if self._pieces is not None and (piece := next(self._pieces, None)) is None:
            self._pieces = None
        if piece is None and self._messages:
            parts, sizes = self._messages.pop(next(iter(self._messages)))
            self._waiting -= sum(sizes)
            piece, self._pieces = self._cut(parts, sizes)
        return piece

    def _cut(self, parts: Sequence[Buffer], sizes: Sequence[int]) -> tuple[Buffer, Iterator[Buffer] | None]:
        """Return the first piece of a message, and those that come after it, if any do."""
        words: list[int] = []
        small: list[Buffer] = []
        large: list[memoryview] = []
        length = 0
        for part, size in zip(parts, sizes, strict=True):
            if size < LARGE:
                small.append(part)
                length += size
                words.append(size)
                continue
            view = memoryview(part).cast("B")
            place = self._elsewhere(view)
            words.append(size if place is None else place)
            if place is None:
                large.append(view)
        self._under_way = sum(map(len, large))
        return self._block(words, small, length=length), self._rest(large) if large else None

    def _block(self, sizes: Sequence[int], small: Sequence[Buffer], *, length: int) -> Buffer:
        """Return a block, behind its length. length: bytes of the small parts."""
        table = table_of(len(sizes)).pack(len(sizes), *sizes)
        return b"".join([LENGTH.pack(len(table) + length), table, *small])

    def _elsewhere(self, part: memoryview) -> int | None:
        """Put a large part where the peer finds it, and return what the block says instead of its size.

        None where the part is to be sent.
        """
        del part
        return None

    def _rest(self, large: Sequence[memoryview]) -> Iterator[Buffer]:
        """Yield the large parts, one after another."""
        for view in large:
            self._under_way -= len(view)
            yield view


def _sizes(parts: Sequence[Buffer]) -> list[int]:
    return [len(part) if type(part) is bytes else memoryview(part).nbytes for part in parts]
