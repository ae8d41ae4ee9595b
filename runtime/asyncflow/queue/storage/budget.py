"""The byte budget of a unit: a put that does not fit waits in line, one line for each producer.

A put may bring a *promise*: bytes that will be written to its rows later. It is let in only where they fit too, so that
a write which was promised needs nothing but what is kept for it, and passes everything else.

The next put that is let in is the first in the line of the producer that got the fewest bytes while some waited; one
that comes late begins where the others are. So producers that all want more get the same, whatever sizes they ask for.

Invariants: what is reserved never exceeds the limit, and together with what is promised exceeds it only by promised
writes that are not yet decided about; so every promised write gets its bytes, however full the unit is; a line
keeps its order, and a turn is kept until there is room, so the largest put gets through too; one that is cancelled
leaves no trace.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple

from asyncflow.errors import DeadlineExceeded, Refused


class _Place(NamedTuple):
    """A place in a line. turn: done when its bytes are reserved."""

    size: int
    promise: int
    turn: asyncio.Future[None]


class ByteBudget:
    """``limit`` bytes, of which ``used`` are reserved and ``promised`` kept for later writes.

    waits, waited_s: how many had to wait since the start, and for how long together.
    """

    def __init__(self, limit: int, *, where: str) -> None:
        self.limit = limit
        self.used = 0
        self.promised = 0
        self.waits = 0
        self.waited_s = 0.0
        self._where = where
        self._drawing: deque[_Place] = deque()
        self._reserving: dict[str, deque[_Place]] = {}
        self._given: dict[str, int] = {}
        self._level = 0

    def __len__(self) -> int:
        return len(self._drawing) + sum(map(len, self._reserving.values()))

    async def reserve(self, size: int, *, promise: int = 0, timeout: float, producer: str = "") -> None:
        """Take ``size`` bytes and promise further ones, waiting for all of them if need be.

        Raises DeadlineExceeded when they did not come free in time, Refused where they never could.
        """
        line = self._reserving.setdefault(producer, deque())
        self._given[producer] = max(self._level, self._given.get(producer, 0))
        await self._wait(line, size, promise, timeout)

    async def draw(self, size: int, *, timeout: float) -> None:
        """Take ``size`` promised bytes, which stay promised until ``release``, ahead of all who reserve.

        Waits, and raises as ``reserve`` does, only while other writes to the same rows are not decided about.
        """
        await self._wait(self._drawing, size, 0, timeout)

    def release(self, size: int, *, promise: int = 0) -> None:
        """Release bytes, and promises that are kept or void; those who wait get them in turn."""
        self.used -= size
        self.promised -= promise
        self._advance()

    async def _wait(self, line: deque[_Place], size: int, promise: int, timeout: float) -> None:
        if size + promise > self.limit:
            hint = "Put fewer rows at once, or give the unit more"
            raise Refused(f"{size + promise} bytes never fit into {self.limit}", where=self._where, hint=hint)
        now = asyncio.get_running_loop().time
        place, began = _Place(size, promise, asyncio.get_running_loop().create_future()), now()
        line.append(place)
        self._advance()
        if place.turn.done():
            return
        self.waits += 1
        served = False
        try:
            await asyncio.wait([place.turn], timeout=timeout)
            served = place.turn.done()
        finally:
            self.waited_s += now() - began
            if not served:
                self._leave(line, place)
        if not served:
            held = f"{self.used} of {self.limit} are held, {self.promised} promised"
            what = f"no room for {size + promise} bytes within {timeout:g} s: {held}"
            hint = "Bytes come free when a checkpoint commits; see that the trainer goes on, or raise the limit"
            raise DeadlineExceeded(what, where=self._where, hint=hint)

    def _leave(self, line: deque[_Place], place: _Place) -> None:
        """Wait no longer, and give back what was got meanwhile."""
        if place.turn.done():
            self.release(place.size, promise=place.promise)
        else:
            line.remove(place)
            self._advance()

    def _advance(self) -> None:
        while self._drawing and self.used + self._drawing[0].size <= self.limit:
            self._take(self._drawing.popleft())
        while not self._drawing:
            self._reserving = {producer: line for producer, line in self._reserving.items() if line}
            if not self._reserving:
                self._given, self._level = {}, 0
                return
            producer = min(self._reserving, key=self._given.__getitem__)
            place = self._reserving[producer][0]
            if self.used + self.promised + place.size + place.promise > self.limit:
                return
            self._level = self._given[producer]
            self._given[producer] += place.size + place.promise
            self._take(self._reserving[producer].popleft())

    def _take(self, place: _Place) -> None:
        self.used += place.size
        self.promised += place.promise
        place.turn.set_result(None)
