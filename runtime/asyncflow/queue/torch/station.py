"""One process's end of a data set: a client of the queue in an event loop of its own, in a thread of its own.

So leases are renewed and batches fetched ahead while the caller computes.

Invariants: what is kept is renewed until it is settled or found to have ended; what a process holds itself is given
back when it closes; a loader worker ends with the process that it works for, and takes nothing more.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import threading
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AsyncExitStack, aclosing
from typing import Any, Generic, TypeVar

from torch.utils.data import get_worker_info

from asyncflow.errors import AsyncFlowError, Refused
from asyncflow.net.frames import Jagged
from asyncflow.queue.client.client import QueueClient
from asyncflow.queue.protocol.messages import LeasedRow
from asyncflow.queue.torch.place import Queue

log = logging.getLogger(__name__)

T = TypeVar("T")
CALL_S = 60.0
"""Time that the queue has for an answer that waits for no rows."""


class Station:
    """Runs coroutines beside ``client``. holder: who holds its leases, where that is not this process itself."""

    def __init__(self, queue: Queue, *, holder: str = "") -> None:
        self.pid = os.getpid()
        self._holder = holder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="queue data set", daemon=True)
        self._thread.start()
        if get_worker_info() is not None:
            self._loop.call_soon_threadsafe(self._end_with_parent)
        self._stack = AsyncExitStack()
        self._ahead: set[Ahead[Any]] = set()
        try:
            self.client = self.run(self._stack.enter_async_context(queue.client(holder)))
        except BaseException:
            self._stop()
            raise
        self.leases = Leases(self.client)

    def run(self, job: Coroutine[Any, Any, T]) -> T:
        """Return what ``job`` gives; a caller that is interrupted ends it. Refused once the station is closed."""
        if not self._thread.is_alive():
            job.close()
            hint = "An iteration ends with its data set: keep it open as long as you iterate"
            raise Refused("the data set was closed", where="queue data set", hint=hint)
        future = asyncio.run_coroutine_threadsafe(job, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def keep(self, rows: list[LeasedRow]) -> None:
        """Keep the lease of ``rows`` in force from now on; from any thread."""
        self._loop.call_soon_threadsafe(self.leases.keep, rows)

    def ahead(self, source: AsyncGenerator[T], depth: int) -> Ahead[T]:
        """Begin to make the items of ``source``, up to ``depth`` before they are asked for."""

        async def begin() -> Ahead[T]:
            made = Ahead(source, depth)
            self._ahead.add(made)
            return made

        return self.run(begin())

    def end(self, ahead: Ahead[T]) -> bool:
        """Make no more of its items; False where that, and all else, has ended already."""
        if not self._thread.is_alive():
            return False
        self._ahead.discard(ahead)
        self.run(ahead.close())
        return True

    def close(self) -> None:
        """Leave the queue; give back what is kept, unless another process holds it."""
        if self.pid != os.getpid() or threading.current_thread() is self._thread or not self._thread.is_alive():
            return
        try:
            for ahead in list(self._ahead):
                self.end(ahead)
            self.run(self.leases.close(give_back=not self._holder))
            self.run(self._stack.aclose())
        except AsyncFlowError as error:
            log.warning("the queue was left without a goodbye: %s", error)
        finally:
            self._stop()

    def _end_with_parent(self) -> None:
        """End this process when its parent does: what a worker of nobody claims or completes would be lost."""
        parent = multiprocessing.parent_process()
        assert parent is not None
        assert parent.pid is not None
        if os.getppid() != parent.pid:
            _leave(f"it was made by {parent.pid} and is now a child of {os.getppid()}")
        self._loop.add_reader(os.pidfd_open(parent.pid), _leave, f"process {parent.pid}, which made it, has ended")

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _leave(why: str) -> None:
    """End this process at once, and say why."""
    os.write(2, f"loader worker {os.getpid()} ends: {why}\n".encode())
    os._exit(1)


class Leases:
    """The leases that this process keeps in force, by name with their rows."""

    def __init__(self, client: QueueClient) -> None:
        self._client = client
        self._rows: dict[str, list[LeasedRow]] = {}
        self._renewing: asyncio.Task[None] | None = None

    def keep(self, rows: list[LeasedRow]) -> None:
        """Keep the lease of ``rows`` in force."""
        self._rows[rows[0].lease] = rows
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew(), name="renewing")

    async def complete(self, rows: list[LeasedRow], outputs: dict[str, Jagged]) -> list[bool]:
        """Complete ``rows`` of one lease; False where it had ended, so that somebody else has the row."""
        if outputs:
            verdicts = await self._client.complete(rows, outputs, timeout=CALL_S)
        else:
            verdicts = await self._client.acknowledge([rows[0].lease], timeout=CALL_S) * len(rows)
        self._rows.pop(rows[0].lease, None)
        return verdicts

    async def give_back(self, rows: list[LeasedRow], reason: str) -> None:
        """Return ``rows`` to the queue."""
        self._rows.pop(rows[0].lease, None)
        await self._client.give_back(rows, reason=reason, timeout=CALL_S)

    async def close(self, *, give_back: bool) -> None:
        """Renew no more."""
        for rows in list(self._rows.values()) if give_back else []:
            await self.give_back(rows, "the data set was closed")
        if self._renewing is not None:
            self._renewing.cancel()

    async def _renew(self) -> None:
        while self._rows:
            await asyncio.sleep(min(rows[0].until for rows in self._rows.values()) / 3)
            if not (asked := list(self._rows)):
                return
            try:
                in_force = set(await self._client.renew(asked, timeout=CALL_S))
            except AsyncFlowError as error:
                log.warning("%d leases could not be renewed: %s", len(asked), error)
                continue
            for lease in (lease for lease in asked if lease not in in_force):
                self._rows.pop(lease, None)


class Ahead(Generic[T]):
    """The items of ``source``, made up to ``depth`` before they are asked for; to be made in a running loop."""

    def __init__(self, source: AsyncGenerator[T], depth: int) -> None:
        self._room = asyncio.Semaphore(depth)
        self._made: asyncio.Queue[T | BaseException | None] = asyncio.Queue()
        self._making = asyncio.create_task(self._make(source), name="fetching ahead")

    async def next(self) -> T | None:
        """Return the next item, or None after the last; raises what ``source`` raised."""
        self._room.release()
        item = await self._made.get()
        if item is None or isinstance(item, BaseException):
            self._made.put_nowait(item)
        if isinstance(item, BaseException):
            raise item
        return item

    async def close(self) -> None:
        """Make no more."""
        self._making.cancel()
        await asyncio.wait([self._making])

    async def _make(self, source: AsyncGenerator[T]) -> None:
        try:
            async with aclosing(source) as items:
                await self._room.acquire()
                async for item in items:
                    self._made.put_nowait(item)
                    await self._room.acquire()
            self._made.put_nowait(None)
        except Exception as error:  # noqa: BLE001 # whoever asks gets it
            self._made.put_nowait(error)
