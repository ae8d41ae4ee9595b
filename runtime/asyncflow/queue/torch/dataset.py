"""A task of the queue as a data set for torch: ``for batch in DataLoader(StreamingDataset(...), batch_size=None)``.

Each loader worker claims for itself, so no sample comes twice whatever their number; a loader that has several should
give what comes (``in_order=False``), not wait for the one whose turn it is. While one batch is computed, the
next is claimed and fetched. A batch is acknowledged when the next one is asked for, and given back when the iteration
is left before that; a loader worker acknowledges what it hands to the loader. Where ``acknowledge`` is "explicit",
``complete`` does it, with what was made of the batch.

Invariants: every row is either acknowledged or becomes ready again; at most ``ahead`` batches wait beside the one that
is computed, in a loader worker none beside those that the loader asked for; nothing sleeps or polls.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

from torch.utils.data import IterableDataset, get_worker_info

from asyncflow.errors import DeadlineExceeded, Refused, StaleHandle
from asyncflow.queue.client.client import QueueClient
from asyncflow.queue.client.open_values import encode
from asyncflow.queue.protocol.messages import LeasedRow
from asyncflow.queue.torch.batch import Batch, columns_of
from asyncflow.queue.torch.column import Column
from asyncflow.queue.torch.held import KEEPERS, Held
from asyncflow.queue.torch.place import Queue
from asyncflow.queue.torch.station import CALL_S, Ahead, Station

log = logging.getLogger(__name__)

_STARTING = threading.Lock()


class QueueDataset(IterableDataset[Batch]):  # type: ignore[misc] # torch is not type-checked here
    """What both data sets share: a queue, one station in each process, and batches fetched ahead.

    queue: an address, or a ``Queue``; columns: to fetch; ahead: batches fetched before they are asked for;
    patience_s: seconds without a row after which the iteration fails with DeadlineExceeded.
    """

    def __init__(
        self, *, queue: Queue | str, partition: str, columns: Sequence[str], ahead: int, patience_s: float
    ) -> None:
        where = f"{type(self).__name__} of {partition}"
        if not columns or ahead < 0 or not patience_s > 0:
            raise Refused(f"columns {list(columns)}, ahead {ahead}, patience {patience_s} s cannot be", where=where)
        self.queue = Queue.of(queue)
        self.partition = partition
        self.columns = list(columns)
        self._ahead = ahead
        self._patience_s = patience_s
        self._here: Station | None = None

    def close(self) -> None:
        """Return to the queue what is kept here, and leave the queue; whatever is asked later joins it again."""
        if (here := self._here) is not None:
            self._here = None
            here.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if "_here" in self.__dict__:
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_here": None}

    def _station(self, holder: str = "") -> Station:
        with _STARTING:
            if self._here is None or self._here.pid != os.getpid():
                self._here = Station(self.queue, holder=holder)
            return self._here


class StreamingDataset(QueueDataset):
    """The rows of one task, in batches of up to ``rows``, until no more are put and all were handed out.

    No more are put once the partition is closed, or has as many as it was told to expect (``OpenPartition``).

    A task of groups gives whole groups, at least one. acknowledge: "next" or "explicit", as said above.
    """

    def __init__(
        self,
        *,
        queue: Queue | str,
        partition: str,
        task: str,
        columns: Sequence[str],
        rows: int,
        acknowledge: Literal["next", "explicit"] = "next",
        ahead: int = 1,
        patience_s: float = 3600.0,
    ) -> None:
        super().__init__(queue=queue, partition=partition, columns=columns, ahead=ahead, patience_s=patience_s)
        if rows < 1 or acknowledge not in ("next", "explicit"):
            raise Refused(f"rows {rows}, acknowledge {acknowledge!r} cannot be", where=f"{partition}/{task}")
        self.task = task
        self._rows = rows
        self._explicit = acknowledge == "explicit"
        self._name = uuid.uuid4().hex
        KEEPERS[self._name] = self

    def __iter__(self) -> Iterator[Batch]:
        """Claim and give batches."""
        loader = get_worker_info() is not None
        station = self._station(self._name if loader and self._explicit else "")
        ours: dict[str, list[LeasedRow]] = {}
        batches = station.ahead(self._claimed(station, ours), 0 if loader else self._ahead)
        given: Held | None = None
        under_way: list[asyncio.Task[list[bool]]] = []
        try:
            while True:
                batch, given = station.run(self._exchange(station, batches, given, under_way)), None
                if batch is None:
                    return
                assert batch.held is not None
                if not self._explicit and not loader:
                    given = batch.held
                elif not self._explicit and not all(station.run(station.leases.complete(batch.held.rows, {}))):
                    continue
                del ours[batch.held.rows[0].lease]
                yield batch if self._explicit else replace(batch, held=None)
        finally:
            if station.end(batches):
                for rows in [*ours.values(), *([given.rows] if given else [])]:
                    station.run(station.leases.give_back(rows, "the iteration was left"))
                station.run(self._settle(under_way))

    def complete(self, batch: Batch, outputs: Mapping[str, Any] | None = None) -> list[bool]:
        """Acknowledge ``batch`` with what was made of it: columns, each a ``Column`` or one value for each row (tensors
        that differ in their first dimension only, or numbers, texts, plain objects).

        False where the lease had ended and the row is somebody else's. A batch that was received from another rank
        (``shared``) is completed there, so here this does nothing.
        """
        if batch.held is None:
            return []
        made = {
            name: values.jagged() if isinstance(values, Column) else encode(values, where=f"output {name}")
            for name, values in (outputs or {}).items()
        }
        station = self._station()
        return station.run(station.leases.complete(batch.held.rows, made))

    def give_back(self, batch: Batch, *, reason: str) -> None:
        """Let the rows of ``batch`` be ready again."""
        if batch.held is not None:
            station = self._station()
            station.run(station.leases.give_back(batch.held.rows, reason))

    def keep(self, rows: list[LeasedRow]) -> None:
        """Keep the lease of a batch that has come from a loader worker."""
        self._station().keep(rows)

    def state_dict(self) -> dict[str, Any]:
        """Return what ``load_state_dict`` checks: the queue itself remembers what was acknowledged."""
        return {"partition": self.partition, "task": self.task}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Refuse the state of another task."""
        if dict(state) != self.state_dict():
            raise Refused(f"the state is that of {dict(state)}", where=f"{self.partition}/{self.task}")

    async def _exchange(
        self, station: Station, batches: Ahead[Batch], given: Held | None, under_way: list[asyncio.Task[list[bool]]]
    ) -> Batch | None:
        """Begin to acknowledge what was given, and give the next batch without waiting for that."""
        await self._settle(under_way)
        if given is not None:
            under_way.append(asyncio.create_task(station.leases.complete(given.rows, {})))
        batch = await batches.next()
        if batch is None:
            await self._settle(under_way)
        return batch

    async def _settle(self, under_way: list[asyncio.Task[list[bool]]]) -> None:
        while under_way:
            if not all(await under_way.pop()):
                log.warning("the lease of a batch of %s/%s had ended: others get it too", self.partition, self.task)

    async def _claimed(self, station: Station, ours: dict[str, list[LeasedRow]]) -> AsyncGenerator[Batch]:
        client = station.client
        while rows := await self._claim(client):
            ours[rows[0].lease] = rows
            station.leases.keep(rows)
            try:
                fetched = await client.fetch(rows, self.columns, timeout=CALL_S)
            except StaleHandle:
                await station.leases.give_back(ours.pop(rows[0].lease), "bytes were lost")
                continue
            held = Held(self._name, rows)
            yield Batch(metas=[row.meta for row in rows], columns=columns_of(fetched, self.columns), held=held)

    async def _claim(self, client: QueueClient) -> list[LeasedRow]:
        claimed = await client.claim_or_end(
            partition=self.partition,
            task=self.task,
            max_rows=self._rows,
            until_done=not self._explicit,
            timeout=self._patience_s,
        )
        if claimed.rows or claimed.ended:
            return claimed.rows
        hint = "See whether the tasks before this one go on; after the last put, close() the partition"
        raise DeadlineExceeded(
            f"no row became ready within {self._patience_s:g} s", where=f"{self.partition}/{self.task}", hint=hint
        )
