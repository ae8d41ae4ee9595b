"""A task of the queue as a data set for torch: ``for batch in DataLoader(StreamingDataset(...), batch_size=None)``.

Each loader worker claims for itself; a loader that has several should yield what comes (``in_order=False``), not wait
for the worker whose turn it is. A batch is acknowledged when the next one is asked for, and given back when the
iteration is left before that; a loader worker acknowledges what it passes to the loader. Where ``acknowledge`` is
"explicit", ``complete`` does it, with what was made of the batch.

Each process has one client, in an event loop in a thread of its own, which renews leases and prefetches batches while
the caller computes.

Invariants: every row is either acknowledged or becomes ready again; at most ``prefetch`` batches wait beside the one
that is computed, in a loader worker none beside those that the loader asked for; nothing sleeps or polls; a lease is
renewed until its rows are settled or it is found to have ended; a loader worker ends with the process that it works
for, and claims nothing more.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import threading
import uuid
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, Self, TypeVar

from torch.utils.data import IterableDataset, get_worker_info

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, Refused, StaleHandle
from asyncflow.queue.blocking import LoopThread
from asyncflow.queue.client import QueueClient, aconnect
from asyncflow.queue.protocol.messages import LeasedRow
from asyncflow.queue.torch.batch import LEASE_OWNERS, Batch, BatchLease, Column, columns_of
from asyncflow.queue.values import encode
from asyncflow.rpc.columns import Jagged
from asyncflow.rpc.tls import Credentials

log = logging.getLogger(__name__)

T = TypeVar("T")
CALL_S = 60.0
"""Seconds that the queue has for an answer that waits for no rows."""
_STARTING = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class QueueAddress:
    """A queue by its one ``address``.

    Plain data, which goes to loader workers: every process that opens it gets a client of its own.

    tls: folder with the certificate of a client of it (``ca.crt``, ``tls.crt``, ``tls.key``).
    """

    address: str
    tls: Path | None = None

    @classmethod
    def of(cls, queue: QueueAddress | str) -> QueueAddress:
        """Return ``queue``, or the queue at this address."""
        return cls(address=queue) if isinstance(queue, str) else queue

    def client(self, worker: str = "") -> AbstractAsyncContextManager[QueueClient]:
        """Return a client to be entered. worker: the name of its leases' holder, where they are to outlive it."""
        credentials = Credentials(self.tls) if self.tls else Credentials.of_environment()
        return aconnect(self.address, credentials=credentials, worker=worker)


class Executor:
    """One process's client of the queue, in an event loop in a thread of its own.

    holder: the name that its leases are held under, where they are to outlive this process.
    """

    def __init__(self, queue: QueueAddress, *, holder: str = "") -> None:
        self.pid = os.getpid()
        self._holder = holder
        self._thread = LoopThread("queue data set")
        if get_worker_info() is not None:
            self._thread.loop.call_soon_threadsafe(self._end_with_parent)
        self._stack = AsyncExitStack()
        self._prefetchers: set[Prefetcher[Any]] = set()
        try:
            self.client = self.run(self._stack.enter_async_context(queue.client(holder)))
        except BaseException:
            self._thread.end()
            raise
        self.leases = LeaseRenewal(self.client)

    def run(self, job: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``job``; a caller that is interrupted cancels it. Raises Refused once this is closed."""
        if not self._thread.thread.is_alive():
            job.close()
            hint = "An iteration ends with its data set: keep it open as long as you iterate"
            raise Refused("the data set was closed", where="queue data set", hint=hint)
        return self._thread.run(job)

    def keep(self, rows: list[LeasedRow]) -> None:
        """Keep the lease of ``rows`` in force from now on; from any thread."""
        self._thread.loop.call_soon_threadsafe(self.leases.keep, rows)

    def prefetch(self, source: AsyncGenerator[T], depth: int) -> Prefetcher[T]:
        """Begin to make the items of ``source``, up to ``depth`` before they are asked for."""

        async def begin() -> Prefetcher[T]:
            prefetcher = Prefetcher(source, depth)
            self._prefetchers.add(prefetcher)
            return prefetcher

        return self.run(begin())

    def end(self, prefetcher: Prefetcher[T]) -> bool:
        """Make no more items; return False where the executor was closed before."""
        if not self._thread.thread.is_alive():
            return False
        self._prefetchers.discard(prefetcher)
        self.run(prefetcher.close())
        return True

    def close(self) -> None:
        """Leave the queue; give back what is kept, unless another process holds it."""
        thread = self._thread.thread
        if self.pid != os.getpid() or threading.current_thread() is thread or not thread.is_alive():
            return
        try:
            for prefetcher in list(self._prefetchers):
                self.end(prefetcher)
            self.run(self.leases.close(give_back=not self._holder))
            self.run(self._stack.aclose())
        except AsyncFlowError as error:
            log.warning("the data set was closed, but its rows were not given back: %s", error)
        finally:
            self._thread.end()

    def _end_with_parent(self) -> None:
        """End this process when its parent ends: what an orphaned worker claims would be lost."""
        parent = multiprocessing.parent_process()
        assert parent is not None
        assert parent.pid is not None
        if os.getppid() != parent.pid:
            _exit(f"it was made by {parent.pid} and is now a child of {os.getppid()}")
        why = f"process {parent.pid}, which made it, has ended"
        self._thread.loop.add_reader(os.pidfd_open(parent.pid), _exit, why)


def _exit(why: str) -> None:
    """End this process at once, and say why."""
    os.write(2, f"loader worker {os.getpid()} ends: {why}\n".encode())
    os._exit(1)


class LeaseRenewal:
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
            results = await self._client.complete(rows, outputs, timeout=CALL_S)
        else:
            results = await self._client.acknowledge([rows[0].lease], timeout=CALL_S) * len(rows)
        self._rows.pop(rows[0].lease, None)
        return results

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


class Prefetcher(Generic[T]):
    """The items of ``source``, made up to ``depth`` before they are asked for; to be made in a running loop."""

    def __init__(self, source: AsyncGenerator[T], depth: int) -> None:
        self._room = asyncio.Semaphore(depth)
        self._made: asyncio.Queue[T | BaseException | None] = asyncio.Queue()
        self._making = asyncio.create_task(self._make(source), name="prefetching")

    async def next(self) -> T | None:
        """Return the next item, or None after the last; raises what ``source`` raised."""
        self._room.release()
        item = await self._made.get()
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


class QueueDataset(IterableDataset[Batch]):  # type: ignore[misc] # torch is not type-checked here
    """Base of both data sets: a queue, one executor in each process, and batches that are prefetched.

    queue: an address, or a ``QueueAddress``; columns: to fetch; prefetch: batches fetched before they are asked for;
    patience_s: seconds without a row after which the iteration fails with DeadlineExceeded.
    """

    def __init__(
        self, *, queue: QueueAddress | str, partition: str, columns: Sequence[str], prefetch: int, patience_s: float
    ) -> None:
        where = f"{type(self).__name__} of {partition}"
        if not columns or prefetch < 0 or not patience_s > 0:
            what = f"columns {list(columns)}, prefetch {prefetch}, patience_s {patience_s} cannot be used"
            raise Refused(what, where=where)
        self.queue = QueueAddress.of(queue)
        self.partition = partition
        self.columns = list(columns)
        self._prefetch = prefetch
        self._patience_s = patience_s
        self._current: Executor | None = None

    def close(self) -> None:
        """Return to the queue what is kept here, and leave the queue; whatever is asked later joins it again."""
        if (executor := self._current) is not None:
            self._current = None
            executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if "_current" in self.__dict__:
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_current": None}

    def _executor(self, holder: str = "") -> Executor:
        with _STARTING:
            if self._current is None or self._current.pid != os.getpid():
                self._current = Executor(self.queue, holder=holder)
            return self._current


class StreamingDataset(QueueDataset):
    """The rows of one task, in batches of up to ``rows``, until no more are put and all were leased.

    No more are put once the partition is closed, or has as many as it was told to expect (``Partition``).

    A task of groups yields whole groups, at least one. acknowledge: "next" or "explicit", as described in the module.
    """

    def __init__(
        self,
        *,
        queue: QueueAddress | str,
        partition: str,
        task: str,
        columns: Sequence[str],
        rows: int,
        acknowledge: Literal["next", "explicit"] = "next",
        prefetch: int = 1,
        patience_s: float = 3600.0,
    ) -> None:
        super().__init__(queue=queue, partition=partition, columns=columns, prefetch=prefetch, patience_s=patience_s)
        if rows < 1 or acknowledge not in ("next", "explicit"):
            raise Refused(f"rows {rows}, acknowledge {acknowledge!r} cannot be", where=f"{partition}/{task}")
        self.task = task
        self._rows = rows
        self._explicit = acknowledge == "explicit"
        self._name = uuid.uuid4().hex
        LEASE_OWNERS[self._name] = self

    def __iter__(self) -> Iterator[Batch]:
        """Claim, fetch and yield batches."""
        loader = get_worker_info() is not None
        executor = self._executor(self._name if loader and self._explicit else "")
        leased: dict[str, list[LeasedRow]] = {}
        batches = executor.prefetch(self._claimed(executor, leased), 0 if loader else self._prefetch)
        unacknowledged: BatchLease | None = None
        try:
            while True:
                if unacknowledged is not None:
                    self._acknowledge(executor, unacknowledged)
                    unacknowledged = None
                if (batch := executor.run(batches.next())) is None:
                    return
                assert batch.lease is not None
                if not self._explicit and not loader:
                    unacknowledged = batch.lease
                elif not self._explicit and not self._acknowledge(executor, batch.lease):
                    continue
                del leased[batch.lease.rows[0].lease]
                yield batch if self._explicit else replace(batch, lease=None)
        finally:
            if executor.end(batches):
                for rows in [*leased.values(), *([unacknowledged.rows] if unacknowledged else [])]:
                    executor.run(executor.leases.give_back(rows, "the iteration was left"))

    def complete(self, batch: Batch, outputs: Mapping[str, Any] | None = None) -> list[bool]:
        """Acknowledge ``batch`` with what was made of it: columns, each a ``Column`` or one value for each row (tensors
        that differ in their first dimension only, or numbers, texts, plain objects).

        False where the lease had ended and the row is somebody else's. A batch that was received from another rank
        (``share_batches``) is completed there, so here this does nothing.
        """
        if batch.lease is None:
            return []
        made = {
            name: values.jagged() if isinstance(values, Column) else encode(values, where=f"output {name}")
            for name, values in (outputs or {}).items()
        }
        executor = self._executor()
        return executor.run(executor.leases.complete(batch.lease.rows, made))

    def give_back(self, batch: Batch, *, reason: str) -> None:
        """Let the rows of ``batch`` be ready again."""
        if batch.lease is not None:
            executor = self._executor()
            executor.run(executor.leases.give_back(batch.lease.rows, reason))

    def keep(self, rows: list[LeasedRow]) -> None:
        """Keep the lease of a batch that has come from a loader worker in force."""
        self._executor().keep(rows)

    def state_dict(self) -> dict[str, Any]:
        """Return what ``load_state_dict`` checks: the queue itself remembers what was acknowledged."""
        return {"partition": self.partition, "task": self.task}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Refuse the state of another task."""
        if dict(state) != self.state_dict():
            raise Refused(f"the state is that of {dict(state)}", where=f"{self.partition}/{self.task}")

    def _acknowledge(self, executor: Executor, lease: BatchLease) -> bool:
        """Complete the rows of a batch, and return whether its lease was still in force."""
        done = all(executor.run(executor.leases.complete(lease.rows, {})))
        if not done:
            log.warning("the lease of a batch of %s/%s had ended: others get it too", self.partition, self.task)
        return done

    async def _claimed(self, executor: Executor, leased: dict[str, list[LeasedRow]]) -> AsyncGenerator[Batch]:
        client = executor.client
        while rows := await self._claim(client):
            leased[rows[0].lease] = rows
            executor.leases.keep(rows)
            try:
                fetched = await client.fetch(rows, self.columns, timeout=CALL_S)
            except StaleHandle:
                await executor.leases.give_back(leased.pop(rows[0].lease), "bytes were lost")
                continue
            lease = BatchLease(self._name, rows)
            yield Batch(metas=[row.meta for row in rows], columns=columns_of(fetched, self.columns), lease=lease)

    async def _claim(self, client: QueueClient) -> list[LeasedRow]:
        claimed = await client.claim(
            partition=self.partition,
            task=self.task,
            max_rows=self._rows,
            until_done=not self._explicit,
            timeout=self._patience_s,
        )
        if (rows := claimed.rows) or claimed.ended:
            return rows
        hint = "See whether the tasks before this one go on; after the last put, close() the partition"
        raise DeadlineExceeded(
            f"no row became ready within {self._patience_s:g} s", where=f"{self.partition}/{self.task}", hint=hint
        )
