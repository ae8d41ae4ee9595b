"""A task of the queue as a data set for torch: ``for batch in DataLoader(StreamingDataset(...), batch_size=None)``.

Each loader worker makes its own claims. A loader with several workers should yield batches as they come
(``in_order=False``) instead of waiting for the next worker. A batch is acknowledged when the next one is requested, and
given back if the iteration ends before that; a loader worker acknowledges each batch that it passes to the loader. If
``acknowledge`` is "explicit", ``complete`` acknowledges a batch and writes its outputs.

Each process has one client, in an event loop in a separate thread, which renews leases and prefetches batches while
the caller computes.

Invariants: every row is either acknowledged or becomes ready again. At most ``prefetch`` batches wait in addition to
the current one; in a loader worker, only those that the loader requested. Nothing polls. A lease is renewed until its
rows are completed or returned, or it has ended. A loader worker ends with the process that it works for.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import threading
import time
import uuid
import weakref
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from torch.utils.data import IterableDataset, get_worker_info

from asyncflow.api.names import CLIENT
from asyncflow.errors import AsyncFlowError, DeadlineExceeded, Refused, StaleHandle
from asyncflow.queue.blocking import BlockingQueue, cancelled
from asyncflow.queue.client import QueueClient, aconnect
from asyncflow.queue.protocol.messages import LeasedRow
from asyncflow.queue.torch.batch import LEASE_OWNERS, Batch, BatchLease, Column, columns_of
from asyncflow.queue.values import encode
from asyncflow.rpc.access import worker_name
from asyncflow.rpc.columns import Jagged
from asyncflow.rpc.tls import Credentials

log = logging.getLogger(__name__)

T = TypeVar("T")
CALL_S = 60.0
"""Seconds for an answer of the queue that does not wait for rows."""
_STARTING = threading.Lock()
os.register_at_fork(before=_STARTING.acquire, after_in_parent=_STARTING.release, after_in_child=_STARTING.release)


@dataclass(frozen=True, kw_only=True)
class QueueAddress:
    """A queue by its ``address``.

    Plain data that is sent to loader workers: each process that opens it gets its own client.

    tls: folder with the certificate of a client of the queue (``ca.crt``, ``tls.crt``, ``tls.key``).
    """

    address: str
    tls: Path | None = None

    def client(self, worker: str = "") -> AbstractAsyncContextManager[QueueClient]:
        """Return a client context manager. worker: holder of its leases, if they are to outlive the client."""
        credentials = Credentials(self.tls) if self.tls else Credentials.of_environment()
        return aconnect(self.address, credentials=credentials, worker=worker)


class Consumer:
    """One process's client of the queue, with the leases that it keeps in force and the batches that it prefetches.

    name: holder of the leases that loader workers claim, if these are to outlive the workers.
    """

    def __init__(self, queue: QueueAddress, *, name: str = "") -> None:
        self.pid, self._name = os.getpid(), name
        self._passes_on = bool(name) and get_worker_info() is not None
        self.queue = BlockingQueue(lambda: queue.client(name if self._passes_on else ""))
        try:
            self.client = self.queue.awaited
        except BaseException:
            self.queue.close()
            raise
        self._kept: dict[str, list[LeasedRow]] = {}
        self._renewing: asyncio.Task[None] | None = None
        self._due = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        if get_worker_info() is not None:
            self.run(_end_with_parent())

    def run(self, job: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``job``; an interrupted caller cancels it. Raises Refused after ``close``."""
        if self.queue.closed:
            job.close()
            hint = "An iteration ends with its data set: keep it open as long as you iterate"
            raise Refused("the data set was closed", where="queue data set", hint=hint)
        return self.queue.run(job)

    def finish(self, job: Coroutine[Any, Any, None]) -> None:
        """Run a last job; only start it in the queue's own thread, in which the garbage collector may run."""
        if self.queue.closed:
            job.close()
        elif threading.current_thread() is self.queue.thread:
            self._spawn(job)
        else:
            self.run(job)

    async def keep(self, rows: list[LeasedRow]) -> None:
        """Keep the lease of ``rows`` in force from now on."""
        self._kept[rows[0].lease] = rows
        renewing, due = self._renewing, time.monotonic() + rows[0].until / 3
        if renewing is None or renewing.done() or due < self._due:
            if renewing is not None:
                renewing.cancel()  # it sleeps too long
            self._due, self._renewing = due, self._spawn(self._renew())

    async def complete(self, rows: list[LeasedRow], outputs: dict[str, Jagged], *, timeout: float) -> list[bool]:
        """Complete ``rows`` of one lease; False if it had ended, so that the row may have another holder."""
        results = await self.client.complete(rows, outputs, timeout=timeout)
        self._kept.pop(rows[0].lease, None)
        return results

    async def give_back(self, rows: list[LeasedRow], reason: str) -> None:
        """Return ``rows`` of one lease to the queue."""
        self._kept.pop(rows[0].lease, None)
        await self.client.give_back(rows, reason=reason, timeout=CALL_S)

    def prefetched(self, source: AsyncGenerator[T], depth: int) -> Generator[T]:
        """Yield the items of ``source``, up to ``depth`` of which are made before they are requested."""
        room = asyncio.Semaphore(depth)
        made: asyncio.Queue[T | BaseException | None] = asyncio.Queue()

        async def make() -> None:
            try:
                async with aclosing(source) as items:
                    await room.acquire()
                    async for item in items:
                        made.put_nowait(item)
                        await room.acquire()
                made.put_nowait(None)
            except Exception as error:  # noqa: BLE001 # the consumer gets it
                made.put_nowait(error)

        async def start() -> asyncio.Task[None]:
            return self._spawn(make())

        async def take() -> T | None:
            room.release()
            item = await made.get()
            if isinstance(item, BaseException):
                raise item
            return item

        making = self.run(start())
        try:
            while (item := self.run(take())) is not None:
                yield item
        finally:
            self.finish(cancelled([making]))

    def close(self) -> None:
        """Leave the queue, and return the kept rows, unless another process holds them."""
        if self.pid != os.getpid() or self.queue.closed:
            return
        if threading.current_thread() is self.queue.thread:  # the garbage collector may run there
            threading.Thread(target=self.close).start()
            return
        try:
            self.run(cancelled(self._tasks))
            for rows in [] if self._passes_on else list(self._kept.values()):
                self.run(self.give_back(rows, "the data set was closed"))
            if self._name and not self._passes_on:  # batches that loader workers claimed and nobody received
                self.run(self.client.expire(worker=self._name, timeout=CALL_S))
        except AsyncFlowError as error:
            log.warning("the data set was closed, but its rows were not given back: %s", error)
        finally:
            self.queue.close()

    def _spawn(self, job: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _renew(self) -> None:
        while self._kept:
            await asyncio.sleep(self._due - time.monotonic())
            leases = list(self._kept)
            third = min((rows[0].until / 3 for rows in self._kept.values()), default=CALL_S)
            self._due = time.monotonic() + third
            try:
                in_force = set(await self.client.renew(leases, timeout=third))
            except AsyncFlowError as error:
                log.warning("%d leases could not be renewed: %s", len(leases), error)
                continue
            for lease in (lease for lease in leases if lease not in in_force):
                self._kept.pop(lease, None)


async def _end_with_parent() -> None:
    """End this process when its parent ends: rows that an orphaned loader worker claims would be lost."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    assert parent.pid is not None
    with suppress(ProcessLookupError):
        ended = os.pidfd_open(parent.pid)
        if parent.is_alive():  # so no other process has its id
            asyncio.get_running_loop().add_reader(ended, os._exit, 1)
            return
    os.write(2, f"loader worker {os.getpid()} ends, because its parent process {parent.pid} has ended\n".encode())
    os._exit(1)


class QueueDataset(IterableDataset[Batch]):  # type: ignore[misc] # torch is not type-checked here
    """Base of both data sets: a queue, one client in each process, and prefetched batches.

    queue: an address, or a ``QueueAddress``; columns: columns to fetch; prefetch: batches fetched before they are
    requested; patience_s: seconds without a row after which the iteration fails with DeadlineExceeded.
    """

    _current: Consumer | None = None
    _name = ""  # holder of the leases, if the caller acknowledges them

    def __init__(
        self, *, queue: QueueAddress | str, partition: str, columns: Sequence[str], prefetch: int, patience_s: float
    ) -> None:
        if not columns or prefetch < 0 or not patience_s > 0:
            what = f"columns {list(columns)}, prefetch {prefetch}, patience_s {patience_s} cannot be used"
            raise Refused(what, where=f"{type(self).__name__} of {partition}")
        self.queue = QueueAddress(address=queue) if isinstance(queue, str) else queue
        self.partition = partition
        self.columns = list(columns)
        self._prefetch = prefetch
        self._patience_s = patience_s

    def close(self) -> None:
        """Return the kept rows to the queue, and leave it; later calls join it again."""
        if (consumer := self._current) is not None:
            self._current = None
            consumer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_current": None}

    def _consumer(self) -> Consumer:
        with _STARTING:
            if self._current is None or self._current.pid != os.getpid():
                self._current = Consumer(self.queue, name=self._name)
                weakref.finalize(self, self._current.close)
            return self._current


class StreamingDataset(QueueDataset):
    """The rows of one task, in batches of up to ``rows``, until no more are put and all were leased.

    No more rows are put after the partition was closed, or has the expected number of rows (``Partition``).

    A task of groups yields whole groups, at least one. acknowledge: "next" or "explicit", see the module.
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
            raise Refused(f"rows {rows}, acknowledge {acknowledge!r} cannot be used", where=f"{partition}/{task}")
        self.task = task
        self._rows = rows
        if acknowledge == "explicit":
            self._name = worker_name(CLIENT, 0, uuid.uuid4().hex)
            LEASE_OWNERS[self._name] = self

    def __iter__(self) -> Iterator[Batch]:
        """Claim, fetch and yield batches."""
        loader = get_worker_info() is not None
        consumer = self._consumer()
        leased: dict[str, list[LeasedRow]] = {}

        async def give_back() -> None:
            for rows in list(leased.values()):
                await consumer.give_back(rows, "the iteration was left")

        claimed = consumer.prefetched(self._claimed(consumer, leased), 0 if loader else self._prefetch)
        try:
            with closing(claimed) as batches:
                for batch in batches:
                    assert batch.lease is not None
                    rows = batch.lease.rows
                    if self._name:
                        del leased[rows[0].lease]
                        yield batch
                    elif not loader:
                        yield replace(batch, lease=None)
                        self._acknowledge(consumer, leased, rows)
                    elif self._acknowledge(consumer, leased, rows):
                        yield replace(batch, lease=None)
        finally:
            consumer.finish(give_back())

    def complete(
        self, batch: Batch, outputs: Mapping[str, Any] | None = None, *, timeout: float = CALL_S
    ) -> list[bool]:
        """Acknowledge ``batch`` with its outputs: columns, each a ``Column`` or one value for each row (tensors that
        differ in their first dimension only, or numbers, texts, plain objects).

        False if the lease had ended and the row may have another holder. A batch that was received from another rank
        (``share_batches``) is completed there, so here this has no effect.
        """
        if batch.lease is None:
            return []
        made = {
            name: values.jagged() if isinstance(values, Column) else encode(values, where=f"output {name}")
            for name, values in (outputs or {}).items()
        }
        consumer = self._consumer()
        return consumer.run(consumer.complete(batch.lease.rows, made, timeout=timeout))

    def give_back(self, batch: Batch, *, reason: str) -> None:
        """Make the rows of ``batch`` ready again."""
        if batch.lease is not None:
            consumer = self._consumer()
            consumer.run(consumer.give_back(batch.lease.rows, reason))

    def keep(self, rows: list[LeasedRow]) -> None:
        """Keep the lease of a batch from a loader worker in force."""
        consumer = self._consumer()
        consumer.run(consumer.keep(rows))

    def state_dict(self) -> dict[str, Any]:
        """Return the state that ``load_state_dict`` checks; the queue itself stores which rows were acknowledged."""
        return {"partition": self.partition, "task": self.task}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Refuse the state of another task."""
        if dict(state) != self.state_dict():
            raise Refused(f"the state is that of {dict(state)}", where=f"{self.partition}/{self.task}")

    def _acknowledge(self, consumer: Consumer, leased: dict[str, list[LeasedRow]], rows: list[LeasedRow]) -> bool:
        """Complete the rows of a batch, and return whether its lease was still in force."""
        done = all(consumer.run(consumer.complete(rows, {}, timeout=CALL_S)))
        del leased[rows[0].lease]
        if not done:
            log.warning("the lease of a %s/%s batch had ended; its rows may be leased again", self.partition, self.task)
        return done

    async def _claimed(self, consumer: Consumer, leased: dict[str, list[LeasedRow]]) -> AsyncGenerator[Batch]:
        while rows := await self._claim(consumer.client):
            leased[rows[0].lease] = rows
            await consumer.keep(rows)
            try:
                fetched = await consumer.client.fetch(rows, self.columns, timeout=CALL_S)
            except StaleHandle:
                await consumer.give_back(leased.pop(rows[0].lease), "bytes were lost")
                continue
            lease = BatchLease(self._name, rows)
            yield Batch(metas=[row.meta for row in rows], columns=columns_of(fetched, self.columns), lease=lease)

    async def _claim(self, client: QueueClient) -> list[LeasedRow]:
        claimed = await client.claim(
            partition=self.partition,
            task=self.task,
            max_rows=self._rows,
            until_done=not self._name,
            timeout=self._patience_s,
        )
        if (rows := claimed.rows) or claimed.ended:
            return rows
        what = f"no row became ready within {self._patience_s:g} s"
        hint = "Check that the tasks before this one make progress; after the last put, close() the partition"
        raise DeadlineExceeded(what, where=f"{self.partition}/{self.task}", hint=hint)
