"""Messages over a Unix socket whose large parts go through an arena: as in ``stream``, without any I/O.

The socket carries records of eight bytes, the kind in the two highest bits and a number of bytes below: a message
begins (its block follows), bytes of a large part lie in the arena, bytes of a large part follow here, room in the arena
is given back. What is in the arena is only ever the bytes of parts; they are copied out, once.

Invariants: as in ``stream``; what a reader gets is its own, nothing that its peer can still change; who waits for room
goes on as soon as it is there.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Generator, Iterator, Sequence

from asyncflow.errors import ProtocolError
from asyncflow.net.arena import Arena
from asyncflow.net.frames import Buffer
from asyncflow.net.ring import Emptying, Filling
from asyncflow.net.stream import Inbox, Outbox

_MESSAGE, _SHARED, _HERE, _GIVEN_BACK = range(4)
_RECORD = struct.Struct("<Q")
_KIND_SHIFT = 62
_MOST_SHARED = 1 << 19
"""Bytes that are put into the arena before the other side is told: less wakes it too often, more lets it wait."""
_MOST_HERE = 1 << 16
_AHEAD = 16
_STUCK = b""


def boxes(arena: Arena, *, most: int, staging: memoryview) -> tuple[Inbox, Outbox]:
    """Give what messages come through and go through. most, staging: see ``Inbox``."""
    filling, emptying = Filling(arena.half), Emptying(arena.half)
    inbox = _ArenaInbox(arena, filling=filling, emptying=emptying, most=most, staging=staging)
    return inbox, _ArenaOutbox(arena, filling=filling, emptying=emptying)


class _ArenaInbox(Inbox):
    def __init__(self, arena: Arena, *, filling: Filling, emptying: Emptying, most: int, staging: memoryview) -> None:
        self._arena = arena
        self._filling = filling
        self._emptying = emptying
        super().__init__(most=most, seal=None, staging=staging)

    def _begun(self) -> Generator[memoryview, None, int]:
        kind, count = yield from self._record()
        if kind != _MESSAGE:
            raise ProtocolError("bytes of a part came where a message should begin")
        return count

    def _large(self, part: memoryview) -> Generator[memoryview, None, None]:
        while part:
            kind, count = yield from self._record()
            if kind == _MESSAGE or not 0 < count <= len(part):
                raise ProtocolError(f"{count} bytes came where {len(part)} of a part are missing")
            if kind == _SHARED:
                self._arena.empty(self._emptying.place(count), part[:count])
            else:
                yield part[:count]
            part = part[count:]

    def _record(self) -> Generator[memoryview, None, tuple[int, int]]:
        """Take in what was given back; give the next record of another kind."""
        record = memoryview(bytearray(_RECORD.size))
        while True:
            yield record
            (both,) = _RECORD.unpack(record)
            kind, count = both >> _KIND_SHIFT, both & ((1 << _KIND_SHIFT) - 1)
            if kind != _GIVEN_BACK:
                return kind, count
            self._filling.given_back(count)


class _ArenaOutbox(Outbox):
    def __init__(self, arena: Arena, *, filling: Filling, emptying: Emptying) -> None:
        super().__init__(seal=None)
        self._arena = arena
        self._filling = filling
        self._emptying = emptying
        self._most_shared = min(_MOST_SHARED, arena.half // 2)
        self._wants = 0
        self._shared = 0

    @property
    def stuck(self) -> bool:  # type: ignore[override]
        return bool(self._wants)

    @property
    def due(self) -> bool:  # type: ignore[override]
        return self._emptying.owes_much or (self.stuck and self._filling.has_room(self._wants))

    @property
    def idle(self) -> bool:
        return super().idle and not self._emptying.owes_much

    def in_one(self, parts: Sequence[Buffer]) -> Buffer | None:
        return None if self._emptying.owed else super().in_one(parts)

    def views(self) -> list[Buffer]:
        if self._emptying.owes_much:
            self._views.append(self._given_back())
        self._shared = 0
        while len(self._views) < _AHEAD and self._shared < self._most_shared and (piece := self._piece()):
            self._views.append(piece)
        return list(self._views)

    def _cut(self, parts: Sequence[Buffer]) -> tuple[Buffer, Iterator[Buffer] | None]:
        first, rest = super()._cut(parts)
        if not self._emptying.owed:
            return first, rest
        return self._given_back(), itertools.chain((first,), rest or ())

    def _large(self, view: memoryview) -> Iterator[Buffer]:
        while view:
            if not self._arena.can_fill():
                count = min(len(view), _MOST_HERE)
                yield _record(_HERE, count) + view[:count]
            else:
                place = self._filling.place(wanted := min(len(view), self._most_shared))
                count = place.stop - place.start
                self._wants = 0 if count else wanted
                if not count:
                    yield _STUCK
                    continue
                self._arena.fill(place, view[:count])
                self._shared += count
                yield _record(_SHARED, count)
            view = view[count:]

    def _given_back(self) -> bytes:
        return _record(_GIVEN_BACK, self._emptying.give_back())


def _record(kind: int, count: int) -> bytes:
    return _RECORD.pack(kind << _KIND_SHIFT | count)
