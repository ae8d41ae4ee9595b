"""Renewal of the leases that a worker of the queue holds, for as long as it works.

Invariant: a lease is asked for again within two thirds of its time, also after a renewal that took all the time it had.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Never

from asyncflow.errors import AsyncFlowError
from asyncflow.queue.client import QueueClient
from asyncflow.rpc.retry import Outage


async def keep_renewing(
    queue: QueueClient, *, held: Callable[[], set[str]], ended: Callable[[set[str]], None], lease_s: float
) -> Never:
    """Renew leases at each third of their time, for ever.

    held: the leases that are here now; ended: called with those that were not renewed, so that others have their rows;
    lease_s: seconds that a lease lasts.
    """
    outage, third = Outage("renewing leases"), lease_s / 3
    pause = third
    while True:
        await asyncio.sleep(pause)
        pause = third
        asked = held()
        if not asked:
            continue
        try:
            renewed = set(await queue.renew(sorted(asked), timeout=third))
        except AsyncFlowError as error:
            await outage.wait(error)
            pause = 0.0
            continue
        outage.end()
        ended(asked - renewed)
