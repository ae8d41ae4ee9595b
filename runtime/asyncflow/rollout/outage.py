"""Something that this process needs is away for a while: said once when it goes, once when it is back.

Invariant: an outage is one warning however long it lasts and however often it is tried.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


class Outage:
    """One thing that can be away. what: in words, for the log."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._since: float | None = None
        self._pause_s = _FIRST_PAUSE_S

    async def pause(self, error: Exception) -> None:
        """Note a failure and wait, longer each time, before the next try."""
        if self._since is None:
            self._since = time.monotonic()
            log.warning("%s failed and is tried again until it succeeds: %s", self._what, error)
        await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.0))
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def over(self) -> None:
        """Note a success."""
        if self._since is not None:
            log.info("%s succeeds again after %.1f s", self._what, time.monotonic() - self._since)
            self._since = None
            self._pause_s = _FIRST_PAUSE_S
