"""The byte budget of a unit: whoever does not fit waits in line.

Invariant: what is reserved never exceeds the limit; nobody overtakes the first in line; one who waits no longer leaves
no trace.
"""

from __future__ import annotations

import asyncio
from collections import deque

from asyncflow.errors import DeadlineExceeded, Refused


class Budget:
    """``limit`` bytes, of which ``used`` are reserved."""

    def __init__(self, limit: int, *, where: str) -> None:
        self.limit = limit
        self.used = 0
        self._where = where
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()

    def __len__(self) -> int:
        return len(self._line)

    async def reserve(self, size: int, *, timeout: float) -> None:
        """Take ``size`` bytes, waiting for them if need be.

        Raises DeadlineExceeded when they did not come free in time, Refused where they never could.
        """
        if size > self.limit:
            hint = "Put fewer rows at once, or give the unit more"
            raise Refused(f"{size} bytes never fit into {self.limit}", where=self._where, hint=hint)
        if not self._line and self.used + size <= self.limit:
            self.used += size
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (size, place)
        self._line.append(entry)
        try:
            async with asyncio.timeout(timeout):
                await place
        except BaseException as error:
            if entry in self._line:
                self._line.remove(entry)
                self._advance()
            elif place.done() and not place.cancelled():
                self.release(size)
            if isinstance(error, TimeoutError):
                what = f"no room for {size} bytes within {timeout:g} s: {self.used} of {self.limit} are held"
                hint = "Bytes come free when a checkpoint commits; see that the trainer goes on, or raise the limit"
                raise DeadlineExceeded(what, where=self._where, hint=hint) from error
            raise

    def release(self, size: int) -> None:
        """Give ``size`` bytes back; those who wait get them in turn."""
        self.used -= size
        self._advance()

    def _advance(self) -> None:
        while self._line and self.used + self._line[0][0] <= self.limit:
            size, place = self._line.popleft()
            if place.done():
                continue
            self.used += size
            place.set_result(None)
