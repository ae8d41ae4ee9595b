"""AsyncFlow's queue as a peer of the shared benchmarks: ``run_all.py --peers adapter:AsyncFlow``.

The shared folder with ``peer.py`` must be on PYTHONPATH, and this one too. Real processes, leases of 30 s, the ledger
in ``interval``; rows that a task takes are acknowledged by what it writes to them, else with its next claim. The tasks
of a partition are declared by who first claims from it.

Invariant: as in ``peer.Peer``: rows become visible when ``put`` has returned at the latest, never half a row; a claim
gives exactly the rows asked for, or none and consumes none.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from peer import Peer
from servers import Handle, servers

from asyncflow.net.frames import Jagged
from asyncflow.queue.protocol.lot import Lot
from asyncflow.queue.protocol.messages import TaskSpec

LEASE_S = 30.0
CALL_S = 60.0
Native = dict[str, Jagged]


@dataclass
class Put:
    """Rows that this client put."""

    rows: list[int]


@dataclass(frozen=True, kw_only=True)
class _Attached:
    handle: Handle
    partition: str
    tasks: Mapping[str, Sequence[str]]


@dataclass
class _Held:
    """Leases that a task of this client has and nobody has acknowledged."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    leases: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def add(self, place: tuple[str, str], lease: str) -> None:
        with self.lock:
            self.leases.setdefault(place, []).append(lease)

    def take(self, place: tuple[str, str]) -> list[str]:
        with self.lock:
            return self.leases.pop(place, [])

    def remove(self, lease: str) -> None:
        with self.lock:
            for held in self.leases.values():
                if lease in held:
                    held.remove(lease)


class AsyncFlow(Peer):
    """The queue with its ordinary back end, memory, over TCP and without keys."""

    name = "asyncflow"
    backend = "memory"
    keys = False
    shared_memory = False

    def __init__(self) -> None:
        self._made = contextlib.ExitStack()
        self._held = _Held()
        self._declared: set[str] = set()

    def start(
        self,
        storage_units: int = 1,
        tasks: dict[str, list[str]] | None = None,
        partition: str = "p0",
        **_options: Any,
    ) -> _Attached:
        options = {"backend": self.backend, "keys": self.keys, "shared_memory": self.shared_memory}
        self._servers = self._made.enter_context(servers(units=storage_units, **options))
        handle = _Attached(handle=self._servers.handle, partition=partition, tasks=dict(tasks or {}))
        self.attach(handle)
        self._declare(partition)
        return handle

    def attach(self, handle: _Attached) -> AsyncFlow:
        self._attached = handle
        self.partition = handle.partition
        self.queue = self._made.enter_context(handle.handle.visit())
        self._declared.add(handle.partition)
        return self

    def detach(self) -> None:
        for place in list(self._held.leases):
            if leases := self._held.take(place):
                self.queue.acknowledge(leases, timeout=CALL_S)
        self._made.close()

    def close(self) -> None:
        self.detach()

    def prepare(self, rows: list[dict[str, np.ndarray]]) -> Native:
        return {name: Jagged.from_rows([row[name] for row in rows], rows[0][name].dtype) for name in rows[0]}

    def unpack(self, native: Native, columns: list[str]) -> list[dict[str, np.ndarray]]:
        apart = [native[name].rows() for name in columns]
        return [dict(zip(columns, values, strict=True)) for values in zip(*apart, strict=True)]

    def put(self, native: Native, ids: Put | Lot | None = None, partition: str | None = None) -> Put | Lot:
        if isinstance(ids, Lot):
            self._held.remove(ids.lease)
            if not all(self.queue.complete(ids, native, timeout=CALL_S)):
                raise RuntimeError("a lease had ended before its rows were written")
            return ids
        if isinstance(ids, Put):
            self.queue.write(ids.rows, native, timeout=CALL_S)
            return ids
        return Put(self.queue.put(partition or self.partition, native, timeout=CALL_S).rows)

    def claim(
        self,
        task: str,
        columns: list[str],  # noqa: ARG002 - part of peer.Peer: some queues bind the columns when they claim
        n: int,
        timeout: float = 0.0,
        partition: str | None = None,
    ) -> Lot | None:
        place = (partition or self.partition, task)
        if place[0] not in self._declared:
            self._declare(place[0])
        claimed = self.queue.claim_lot(
            partition=place[0],
            task=task,
            max_rows=n,
            min_rows=n,
            done=self._held.take(place),
            timeout=timeout,
        )
        if claimed.late:
            raise RuntimeError(f"{len(claimed.late)} leases had ended before they were acknowledged")
        if claimed.lot is not None:
            self._held.add(place, claimed.lot.lease)
        return claimed.lot

    def fetch(self, ids: Lot, columns: list[str]) -> Native:
        fetched: Native = self.queue.fetch(ids, columns, timeout=CALL_S)
        return fetched

    def clear(self, partition: str | None = None) -> None:
        where = partition or self.partition
        for place in [place for place in self._held.leases if place[0] == where]:
            self._held.take(place)
        self.queue.clear_partition(partition=where, timeout=CALL_S)

    def row_keys(self, ids: Lot) -> list[Hashable]:
        return list(ids.serials)

    def server_pids(self) -> dict[str, int]:
        return self._servers.pids

    def _declare(self, partition: str) -> None:
        tasks = [
            TaskSpec(partition=partition, name=name, needs=list(needs), lease_s=LEASE_S)
            for name, needs in self._attached.tasks.items()
        ]
        self.queue.declare(tasks, timeout=CALL_S)
        self._declared.add(partition)


class AsyncFlowKeys(AsyncFlow):
    """With keys: nobody reads or writes who does not hold them."""

    name = "asyncflow with keys"
    keys = True


class AsyncFlowShared(AsyncFlow):
    """Between processes of one host through shared memory, as it is by default."""

    name = "asyncflow, shared memory"
    shared_memory = True


class AsyncFlowSharedKeys(AsyncFlowShared):
    """With keys, which seal nothing within a host."""

    name = "asyncflow, shared memory, with keys"
    keys = True


class AsyncFlowMooncake(AsyncFlow):
    """On Mooncake Store."""

    name = "asyncflow on mooncake"
    backend = "mooncake"


class AsyncFlowMooncakeKeys(AsyncFlowMooncake):
    """On Mooncake Store, with keys (which do not guard Mooncake's own ports)."""

    name = "asyncflow on mooncake with keys"
    keys = True
