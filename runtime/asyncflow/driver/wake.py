"""Waking whoever waits for "something may have changed", and loops that go on when a peer comes back.

Invariant: a change that is told after ``changed()`` was entered wakes it; changes are never counted, only noticed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn

from asyncflow.errors import DeadlineExceeded, PeerLost

log = logging.getLogger(__name__)

RETRY_S = 0.5


class Wake:
    """A level-triggered bell: ``tell`` rings it, ``changed`` waits for the next ring, at most ``every_s`` seconds."""

    def __init__(self, *, every_s: float = 5.0) -> None:
        self._every_s = every_s
        self._bell = asyncio.Event()

    def tell(self) -> None:
        """Wake all who wait."""
        bell, self._bell = self._bell, asyncio.Event()
        bell.set()

    async def changed(self) -> None:
        """Wait for the next ``tell``."""
        bell = self._bell
        try:
            async with asyncio.timeout(self._every_s):
                await bell.wait()
        except TimeoutError:
            return


async def persevere(loop: Callable[[], Awaitable[None]], *, what: str) -> NoReturn:
    """Run an endless loop again whenever a peer was lost or late; one log line for each outage."""
    away = False
    while True:
        try:
            await loop()
            raise RuntimeError(f"the loop of {what} ended")
        except (PeerLost, DeadlineExceeded) as error:
            (log.debug if away else log.warning)("%s: %s; trying again", what, error)
            away = True
            await asyncio.sleep(RETRY_S)
