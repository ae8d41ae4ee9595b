"""How to persist where a peer is away for a while.

Invariant: an operation that must survive the restart of a peer is repeated only while its own deadline lasts, and only
after errors that leave open whether it was done (``PeerLost``, ``DeadlineExceeded``): so it must be idempotent.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, PeerLost
from asyncflow.net.rpc.pauses import pauses

T = TypeVar("T")
_LONGEST_PAUSE_S = 2.0


async def persist(attempt: Callable[[], Awaitable[T]], *, what: str, timeout: float) -> T:
    """Await ``attempt()`` again and again until it succeeds, for ``timeout`` seconds in all.

    Only PeerLost and DeadlineExceeded are tried again, after a growing pause with jitter; other errors pass through.
    Raises DeadlineExceeded that says ``what`` was waited for, and the last error.
    """
    deadline = asyncio.get_running_loop().time() + timeout
    trying = pauses(longest=_LONGEST_PAUSE_S)
    last: AsyncFlowError | None = None
    try:
        async with asyncio.timeout_at(deadline) as limit:
            while True:
                try:
                    return await attempt()
                except (PeerLost, DeadlineExceeded) as error:
                    last = error
                await asyncio.sleep(next(trying) * random.uniform(0.5, 1.0))
    except TimeoutError:
        if not limit.expired():
            raise
        reason = f"; last: {last}" if last is not None else ""
        raise DeadlineExceeded(f"{what} did not succeed within {timeout:g} s{reason}") from last
