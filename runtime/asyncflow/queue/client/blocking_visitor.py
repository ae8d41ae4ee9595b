"""A client of a queue that stands alone, for threads: ``visit`` for who has no event loop.

Heartbeats go on in a thread of their own, however long the others block, as long as something lets go of the GIL.

Invariant: as for any visitor, its leases end when it leaves, and when its process dies.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from asyncflow.net.keys import Keys
from asyncflow.net.membership import Membership
from asyncflow.net.roster import Member
from asyncflow.queue.client.blocking import BlockingQueue
from asyncflow.queue.client.visitor import ROLE

T = TypeVar("T")
_JOIN_S = 30.0
_PLACES = 1 << 62


@contextmanager
def visiting(address: str, *, keys: Keys | None = None, timeout: float = _JOIN_S) -> Iterator[BlockingQueue]:
    """Be a client of the queue at ``address``; see ``visit``. Raises DeadlineExceeded when it is not reached."""
    worker = uuid.uuid4()
    with _Background() as background:
        member = Member(role=ROLE, index=worker.int % _PLACES, incarnation=worker.hex)
        membership = Membership(driver=address, member=member, keys=keys)
        queue = BlockingQueue.of(membership, keys=keys)
        try:
            background.run(membership.join(timeout))
            yield queue
        finally:
            queue.close()
            background.run(membership.close())


class _Background:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="queue visitor", daemon=True)

    def __enter__(self) -> _Background:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, job: Coroutine[Any, Any, T]) -> T:
        """Give what ``job`` gives."""
        return asyncio.run_coroutine_threadsafe(job, self._loop).result()
