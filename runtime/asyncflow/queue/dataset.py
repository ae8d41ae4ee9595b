"""A task of the queue as a dataset for torch: ``for batch in DataLoader(StreamingDataset(...), batch_size=None)``.

Each loader worker is a consumer of its own: it claims, fetches and hands over, and its leases are renewed as long as it
lives. A batch is acknowledged when the next one is asked for, and given back when the iteration is left before that.
A loader's own prefetching happens after the hand-over: those who must not lose what was prefetched when the training
process dies use ``QueueClient`` and acknowledge with their outputs.

Invariants: no sample comes twice, whatever the number of workers; nothing sleeps or polls; importing this is the only
import of torch in the queue.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch.utils.data import IterableDataset

from asyncflow.errors import AsyncFlowError, DeadlineExceeded
from asyncflow.net.frames import BFLOAT16, Jagged
from asyncflow.net.keys import Keys
from asyncflow.queue.client import QueueClient
from asyncflow.queue.messages import LeasedRow, RowMeta

log = logging.getLogger(__name__)

T = TypeVar("T")
_CALL_S = 30.0
_WAIT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Queue:
    """Where a queue is, in a form that goes to loader workers. units: addresses by index; key_file: the job's key."""

    controller: str
    units: dict[int, str]
    key_file: Path | None = None

    def client(self) -> QueueClient:
        """Make a client of its own for this process."""
        return QueueClient(
            controller=self.controller,
            unit=self.units.get,
            units=lambda: sorted(self.units),
            worker=uuid.uuid4().hex,
            keys=Keys.load(self.key_file) if self.key_file else None,
        )


@dataclass(frozen=True)
class Column:
    """Rows of different lengths. values: 1-D tensor of all of them; offsets: int64 [rows + 1]."""

    values: torch.Tensor
    offsets: torch.Tensor

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> torch.Tensor:
        """Give one row, 1-D, as a view."""
        return self.values[self.offsets[row] : self.offsets[row + 1]]


@dataclass(frozen=True)
class Batch:
    """Some samples: who they are, and their columns in the same order. Tensors are writable and the caller's own."""

    metas: list[RowMeta]
    columns: dict[str, Column]

    def __len__(self) -> int:
        return len(self.metas)


class StreamingDataset(IterableDataset[Batch]):  # type: ignore[misc] # torch is not type-checked here
    """The rows of one task, in batches of up to ``rows``, until the partition is closed and all were handed out.

    patience_s: seconds without a row after which the iteration fails with DeadlineExceeded.
    """

    def __init__(
        self,
        *,
        queue: Queue,
        partition: str,
        task: str,
        columns: list[str],
        rows: int,
        patience_s: float = 3600.0,
    ) -> None:
        self._queue = queue
        self._partition = partition
        self._task = task
        self._columns = columns
        self._rows = rows
        self._patience_s = patience_s

    def __iter__(self) -> Iterator[Batch]:
        """Claim and give batches."""
        with _Background() as background:
            consumer = background.run(_start(self._queue))
            try:
                while True:
                    background.run(consumer.acknowledge())
                    batch = background.run(self._next(consumer))
                    if batch is None:
                        return
                    yield batch
            finally:
                background.run(consumer.close())

    async def _next(self, consumer: _Consumer) -> Batch | None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience_s
        while (left := deadline - loop.time()) > 0:
            claimed = await consumer.client.claim_or_end(
                partition=self._partition, task=self._task, max_rows=self._rows, timeout=min(left, _WAIT_S)
            )
            if rows := claimed.rows:
                consumer.take(rows)
                columns = await consumer.client.fetch(rows, self._columns, timeout=_CALL_S)
                return Batch([row.meta for row in rows], {name: _tensors(columns[name]) for name in self._columns})
            if claimed.ended:
                return None
        where = f"{self._partition}/{self._task}"
        hint = "See whether the tasks before this one go on, and close the partition at the end"
        raise DeadlineExceeded(f"no row became ready within {self._patience_s:g} s", where=where, hint=hint)


@dataclass
class _Consumer:
    """A client, and the rows that were handed over and not acknowledged yet."""

    client: QueueClient
    rows: list[LeasedRow] = field(default_factory=list)
    renewing: asyncio.Task[None] | None = None

    def take(self, rows: list[LeasedRow]) -> None:
        """Hold ``rows`` and keep their lease in force."""
        self.rows = rows
        self.renewing = asyncio.create_task(self._renew(rows[0].lease, rows[0].until / 3))

    async def acknowledge(self) -> None:
        """Complete what is held."""
        if rows := self._release():
            await self.client.complete(rows, {}, timeout=_CALL_S)

    async def close(self) -> None:
        """Give back what is held."""
        if rows := self._release():
            await self.client.give_back(rows, reason="the iteration was left", timeout=_CALL_S)
        await self.client.close()

    def _release(self) -> list[LeasedRow]:
        rows, self.rows = self.rows, []
        if self.renewing is not None:
            self.renewing.cancel()
            self.renewing = None
        return rows

    async def _renew(self, lease: str, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.client.renew([lease], timeout=_CALL_S)
            except AsyncFlowError as error:
                log.warning("a lease could not be renewed: %s", error)


async def _start(queue: Queue) -> _Consumer:
    return _Consumer(queue.client())


class _Background:
    """An event loop in a thread of its own, so that leases are renewed while the consumer computes."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="queue dataset", daemon=True)

    def __enter__(self) -> _Background:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, job: Coroutine[None, None, T]) -> T:
        """Give what ``job`` gives."""
        return asyncio.run_coroutine_threadsafe(job, self._loop).result()


def _tensors(column: Jagged) -> Column:
    values = torch.from_numpy(column.values.copy())
    if column.dtype == BFLOAT16:
        values = values.view(torch.bfloat16)
    return Column(values, torch.from_numpy(column.offsets.copy()))
