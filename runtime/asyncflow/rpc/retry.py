"""Attempts that are repeated until they succeed, with growing delays between them.

Invariants: a call is repeated only within its deadline, and only after errors that leave its outcome unknown
(``PeerLost``, ``DeadlineExceeded``), so the call must be idempotent. An outage causes one log warning, regardless of
its duration and of the number of failures.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, PeerLost

log = logging.getLogger(__name__)

T = TypeVar("T")


def delays(*, first: float = 0.05, longest: float = 1.0) -> Iterator[float]:
    """Yield the seconds to wait before each new attempt: ``first``, doubled each time, at most ``longest``.

    Each varies at random by up to a fifth, so that many callers do not call a restarted peer at the same time.
    """
    delay = first
    while True:
        yield delay * random.uniform(0.8, 1.2)
        delay = min(2 * delay, longest)


async def retry(attempt: Callable[[], Awaitable[T]], *, what: str, timeout: float) -> T:
    """Await ``attempt()`` repeatedly until it succeeds, for at most ``timeout`` seconds in total.

    Only PeerLost and DeadlineExceeded are retried; other errors propagate. Raises DeadlineExceeded that names ``what``,
    the last error, and the last error that the peer itself sent.
    """

    async def within(seconds: float) -> T:
        try:
            async with asyncio.timeout(seconds) as limit:
                return await attempt()
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceeded("it was still running") from None

    return await retry_within(within, what=what, timeout=timeout)


async def retry_within(attempt: Callable[[float], Awaitable[T]], *, what: str, timeout: float) -> T:
    """Do the same as ``retry`` with ``attempt(seconds)``, which must end by itself within the given seconds."""
    loop = asyncio.get_running_loop()
    deadline, seconds = loop.time() + timeout, timeout
    last: AsyncFlowError | None = None
    answered: AsyncFlowError | None = None
    waits = delays()
    while True:
        try:
            return await attempt(seconds)
        except (PeerLost, DeadlineExceeded) as error:
            last, answered = error, error if error.from_peer else answered
        delay = next(waits)
        seconds = deadline - loop.time() - delay
        if seconds <= 0:
            break
        await asyncio.sleep(delay)
    earlier = f"; before that it answered: {answered}" if answered not in (None, last) else ""
    raise DeadlineExceeded(f"{what} did not succeed within {timeout:g} s; last: {last}{earlier}") from last


class Outage:
    """A failure that lasts until an attempt succeeds. what: the failing attempt, as the log names it."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._since: float | None = None
        self._delays = delays()

    async def wait(self, error: Exception) -> None:
        """Wait before the next attempt, longer each time, and log a warning if this was the first failure."""
        if self._since is None:
            self._since = time.monotonic()
            log.warning("%s failed and is retried until it succeeds: %s", self._what, error)
        await asyncio.sleep(next(self._delays))

    def end(self) -> None:
        """Record that an attempt succeeded."""
        if self._since is not None:
            log.info("%s succeeds again after %.1f s", self._what, time.monotonic() - self._since)
            self._since = None
            self._delays = delays()
