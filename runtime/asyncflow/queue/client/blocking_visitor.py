"""A client of a queue that stands alone, for threads: ``visit`` for who has no event loop.

Heartbeats go on in a thread of their own, however long the others block, as long as something lets go of the GIL.

Invariants: as for any visitor, its leases end when it leaves, and when its process dies; a process that was forked is a
visitor of its own as soon as it uses the queue, and leaves its parent's place alone.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from asyncflow.errors import DeadlineExceeded
from asyncflow.net.keys import Keys
from asyncflow.net.membership import Membership
from asyncflow.net.roster import Member
from asyncflow.queue.client.blocking import BlockingQueue
from asyncflow.queue.client.placement import Taking
from asyncflow.queue.client.visitor import ROLE

log = logging.getLogger(__name__)

T = TypeVar("T")
_JOIN_S = 30.0
_PLACES = 1 << 62


@contextmanager
def visiting(address: str, *, keys: Keys | None = None, timeout: float = _JOIN_S) -> Iterator[BlockingQueue]:
    """Be a client of the queue at ``address``; see ``visit``. Raises DeadlineExceeded when it is not reached."""
    visit = _Visit(address, keys=keys)
    queue = BlockingQueue(
        controller=lambda: visit.address("controller", 0),
        unit=lambda index: visit.address("storage", index),
        units=visit.units,
        worker=visit.worker,
        keys=keys,
        shard=lambda index: visit.address("controller", index),
        renamed=visit.begin_anew,
    )
    try:
        visit.join(timeout)
        yield queue
    finally:
        queue.close()
        visit.leave()


class _Visit:
    """This process's place in the queue's directory. worker: its name there."""

    def __init__(self, address: str, *, keys: Keys | None) -> None:
        self._queue = address
        self._keys = keys
        self._inherited: list[object] = []
        self._take_place()

    def begin_anew(self) -> str:
        """Take another place, in a process that was forked, where the parent's thread does not run; return its name.

        What belongs to the parent stays untouched: both processes share its sockets.
        """
        self._inherited.append((self._membership, self._background))
        self._take_place()
        return self.worker

    def _take_place(self) -> None:
        visitor = uuid.uuid4()
        self.worker = visitor.hex
        member = Member(role=ROLE, index=visitor.int % _PLACES, incarnation=visitor.hex)
        self._membership = Membership(driver=self._queue, member=member, keys=self._keys)
        self._taking = Taking(self._membership)
        self._background: _Background | None = None
        self._joining: asyncio.Task[None] | None = None
        self._beginning = threading.Lock()

    def address(self, role: str, index: int) -> str | None:
        """Return where a member answers, None while that is not known."""
        if self._background is None:
            self._begin()
        return self._membership.address(role, index)

    def units(self) -> Sequence[int]:
        """Return the indices of the units that take new rows, as far as they are known."""
        if self._background is None:
            self._begin()
        return self._taking()

    def join(self, timeout: float) -> None:
        """Wait until the directory has taken this process in. Raises DeadlineExceeded."""
        self._background = _Background()
        self._background.run(self._membership.join(timeout))

    def leave(self) -> None:
        """Leave the directory, if this process has begun to join it."""
        if self._background is not None:
            self._background.run(self._left())
            self._background.end()

    def _begin(self) -> None:
        """Begin to join; whoever asks for an address meanwhile waits for it, as for one of a role that is away."""
        with self._beginning:
            if self._background is None:
                background = _Background()
                background.run(self._joining_begun())
                self._background = background

    async def _joining_begun(self) -> None:
        self._joining = asyncio.create_task(self._join_in_the_end(), name=f"joining {self.worker}")

    async def _join_in_the_end(self) -> None:
        while True:
            try:
                await self._membership.join(_JOIN_S)
            except DeadlineExceeded as error:
                log.warning("%s", error)
            else:
                return

    async def _left(self) -> None:
        if self._joining is not None:
            self._joining.cancel()
            await asyncio.wait([self._joining])
        await self._membership.close()


class _Background:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="queue visitor", daemon=True)
        self._thread.start()

    def run(self, job: Coroutine[Any, Any, T]) -> T:
        """Return what ``job`` returns."""
        return asyncio.run_coroutine_threadsafe(job, self._loop).result()

    def end(self) -> None:
        """End the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
