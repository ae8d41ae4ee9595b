"""The byte budget of a unit: whoever does not fit waits in line.

Who reserves may bring a *promise*: bytes that will be written to its rows later. It is let in only where they fit too,
so that a write which was promised needs nothing but what is kept for it, and passes everything else.

Invariants: what is reserved never exceeds the limit, and together with what is promised exceeds it only by promised
writes that are not yet decided about; so every promised write gets its bytes, however full the unit is; nobody
overtakes the first in a line; one who waits no longer leaves no trace.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple

from asyncflow.errors import DeadlineExceeded, Refused


class _Place(NamedTuple):
    size: int
    promise: int
    turn: asyncio.Future[None]


class Budget:
    """``limit`` bytes, of which ``used`` are reserved and ``promised`` kept for later writes."""

    def __init__(self, limit: int, *, where: str) -> None:
        self.limit = limit
        self.used = 0
        self.promised = 0
        self._where = where
        self._drawing: deque[_Place] = deque()
        self._reserving: deque[_Place] = deque()

    def __len__(self) -> int:
        return len(self._drawing) + len(self._reserving)

    async def reserve(self, size: int, *, promise: int = 0, timeout: float) -> None:
        """Take ``size`` bytes and promise further ones, waiting for all of them if need be.

        Raises DeadlineExceeded when they did not come free in time, Refused where they never could.
        """
        await self._enter(self._reserving, size, promise, timeout)

    async def draw(self, size: int, *, timeout: float) -> None:
        """Take ``size`` promised bytes, which stay promised until ``release``, ahead of all who reserve.

        Waits, and raises as ``reserve`` does, only while other writes to the same rows are not decided about.
        """
        await self._enter(self._drawing, size, 0, timeout)

    def release(self, size: int, *, promise: int = 0) -> None:
        """Give back bytes, and promises that are kept or void; those who wait get them in turn."""
        self.used -= size
        self.promised -= promise
        self._advance()

    async def _enter(self, line: deque[_Place], size: int, promise: int, timeout: float) -> None:
        if size + promise > self.limit:
            hint = "Put fewer rows at once, or give the unit more"
            raise Refused(f"{size + promise} bytes never fit into {self.limit}", where=self._where, hint=hint)
        place = _Place(size, promise, asyncio.get_running_loop().create_future())
        line.append(place)
        self._advance()
        if place.turn.done():
            return
        try:
            async with asyncio.timeout(timeout):
                await place.turn
        except BaseException as error:
            if place in line:
                line.remove(place)
                self._advance()
            elif place.turn.done() and not place.turn.cancelled():
                self.release(size, promise=promise)
            if isinstance(error, TimeoutError):
                held = f"{self.used} of {self.limit} are held, {self.promised} promised"
                hint = "Bytes come free when a checkpoint commits; see that the trainer goes on, or raise the limit"
                what = f"no room for {size + promise} bytes within {timeout:g} s: {held}"
                raise DeadlineExceeded(what, where=self._where, hint=hint) from error
            raise

    def _advance(self) -> None:
        while self._drawing and self.used + self._drawing[0].size <= self.limit:
            self._take(self._drawing.popleft())
        while self._reserving and not self._drawing and self._fits(self._reserving[0]):
            self._take(self._reserving.popleft())

    def _fits(self, place: _Place) -> bool:
        return self.used + self.promised + place.size + place.promise <= self.limit

    def _take(self, place: _Place) -> None:
        if place.turn.done():
            return
        self.used += place.size
        self.promised += place.promise
        place.turn.set_result(None)
