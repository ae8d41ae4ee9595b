"""The byte budget of a unit: a put that does not fit waits until earlier puts have their bytes.

A put may bring a *promise*: a number of bytes that will be written to its rows later. It is accepted only if they fit,
too. A promised write then uses only the bytes reserved for it, and overtakes all waiting puts.

Invariants: the reserved bytes never exceed the limit; reserved and promised bytes together exceed it only by promised
writes that are not yet decided. So every promised write gets its bytes, even on a full unit. Puts are accepted in the
order in which they came, so a large one is not starved. A cancelled put leaves no trace.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple

from asyncflow.errors import DeadlineExceeded, Refused


class _Place(NamedTuple):
    """A place in a waiting line. turn: done when its bytes are reserved."""

    size: int
    promise: int
    turn: asyncio.Future[None]


class ByteBudget:
    """``limit`` bytes, of which ``used`` are reserved and ``promised`` are kept for later writes.

    waits, waited_s: number of calls that had to wait since the start, and their total wait in seconds.
    """

    def __init__(self, limit: int, *, where: str) -> None:
        self.limit = limit
        self.used = 0
        self.promised = 0
        self.waits = 0
        self.waited_s = 0.0
        self._where = where
        self._drawing: deque[_Place] = deque()
        self._reserving: deque[_Place] = deque()

    def __len__(self) -> int:
        return len(self._drawing) + len(self._reserving)

    def fits(self, size: int) -> bool:
        """Return whether a quarter of the limit is free in addition to ``size`` bytes, and no call waits for bytes."""
        return not len(self) and self.used + self.promised + size <= 0.75 * self.limit

    async def reserve(self, size: int, *, promise: int = 0, timeout: float) -> None:
        """Reserve ``size`` bytes and promise further ones, waiting until all of them are free.

        Raises DeadlineExceeded if they do not become free in time, Refused if they exceed the limit.
        """
        await self._wait(self._reserving, size, promise, timeout)

    async def draw(self, size: int, *, timeout: float) -> None:
        """Reserve ``size`` promised bytes, which stay promised until ``release``, before all waiting ``reserve`` calls.

        Waits, and raises as ``reserve`` does, only while other writes to the same rows are not decided.
        """
        await self._wait(self._drawing, size, 0, timeout)

    def release(self, size: int, *, promise: int = 0) -> None:
        """Release bytes and fulfilled or void promises, which waiting calls get in their order."""
        self.used -= size
        self.promised -= promise
        self._advance()

    async def _wait(self, line: deque[_Place], size: int, promise: int, timeout: float) -> None:
        if size + promise > self.limit:
            hint = "Put fewer rows at a time, or set bytesPerUnit higher"
            raise Refused(f"{size + promise} bytes never fit into {self.limit}", where=self._where, hint=hint)
        loop = asyncio.get_running_loop()
        place, started = _Place(size, promise, loop.create_future()), loop.time()
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
            self.waited_s += loop.time() - started
            if not served:
                self._leave(line, place)
        if not served:
            held = f"{self.used} of {self.limit} are held, {self.promised} promised"
            what = f"no room for {size + promise} bytes within {timeout:g} s: {held}"
            hint = "Bytes become free when a checkpoint commits; check that the trainer progresses, or raise the limit"
            raise DeadlineExceeded(what, where=self._where, hint=hint)

    def _leave(self, line: deque[_Place], place: _Place) -> None:
        """Stop waiting, and release what was reserved meanwhile."""
        if place.turn.done():
            self.release(place.size, promise=place.promise)
        else:
            line.remove(place)
            self._advance()

    def _advance(self) -> None:
        while self._drawing and self.used + self._drawing[0].size <= self.limit:
            self._take(self._drawing.popleft())
        while self._reserving and not self._drawing:
            place = self._reserving[0]
            if self.used + self.promised + place.size + place.promise > self.limit:
                return
            self._take(self._reserving.popleft())

    def _take(self, place: _Place) -> None:
        self.used += place.size
        self.promised += place.promise
        place.turn.set_result(None)
