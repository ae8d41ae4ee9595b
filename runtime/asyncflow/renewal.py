"""Renewal of the leases that a worker of the queue holds.

Invariant: a renewal of a lease is requested within two thirds of its duration, even if the previous renewal took its
whole timeout.
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
    """Renew leases at each third of their duration, until cancelled.

    held: returns the leases that the worker holds now; ended: called with the leases that were not renewed, whose rows
    other consumers may get; lease_s: duration of a lease in seconds.
    """
    outage, third = Outage("renewing leases"), lease_s / 3
    pause = third
    while True:
        await asyncio.sleep(pause)
        pause = third
        leases = held()
        if not leases:
            continue
        try:
            renewed = set(await queue.renew(sorted(leases), timeout=third))
        except AsyncFlowError as error:
            await outage.wait(error)
            pause = 0.0
            continue
        outage.end()
        ended(leases - renewed)
