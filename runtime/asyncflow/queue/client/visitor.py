"""A client of a queue that stands alone, for a process that is no role: by the queue's one address.

It joins the directory, which tells it where controller and units are now, and leaves at the end. Heartbeats go on in
the running event loop, so the loop must be kept free.

Invariant: the leases that a visitor holds itself end when it leaves, and when it has been silent for as long as any
lost member.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from asyncflow.net.keys import Keys
from asyncflow.net.membership import Membership
from asyncflow.net.roster import Member
from asyncflow.queue.client.client import QueueClient
from asyncflow.queue.client.placement import Taking

ROLE = "client"
_JOIN_S = 30.0
_PLACES = 1 << 62


@asynccontextmanager
async def visit(
    address: str, *, keys: Keys | None = None, timeout: float = _JOIN_S, worker: str = ""
) -> AsyncIterator[QueueClient]:
    """Be a client of the queue at ``address`` (``status.address``, e.g. ``tcp://scores-controller.rl.svc:5571``).

    keys: of the queue; timeout: seconds to wait for it; worker: who holds the leases, where they are to outlive this
    visitor. Raises DeadlineExceeded when the queue is not reached.
    """
    visitor = uuid.uuid4()
    member = Member(role=ROLE, index=visitor.int % _PLACES, incarnation=visitor.hex)
    membership = Membership(driver=address, member=member, keys=keys)
    queue = QueueClient(
        controller=lambda: membership.address("controller"),
        unit=lambda index: membership.address("storage", index),
        units=Taking(membership),
        worker=worker or member.incarnation,
        keys=keys,
        shard=lambda index: membership.address("controller", index),
    )
    try:
        await membership.join(timeout)
        yield queue
    finally:
        await queue.close()
        await membership.close()
