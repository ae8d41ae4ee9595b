"""The compared implementations: their common interface, and AsyncFlow's queue behind it, called as users call it.

Every implementation guarantees: a row becomes visible as a whole, at the latest when ``put`` returns. A claim returns
exactly the requested number of rows, or returns None and takes no row. A task receives no row twice.
"""

from __future__ import annotations

import contextlib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from samples import Sample
from servers import Handle, servers

from asyncflow.queue.protocol.messages import LeasedRow, TaskSpec
from asyncflow.rpc.columns import Jagged

LEASE_S = 30.0
CALL_S = 60.0

KINDS = {
    "plain": "implementations:AsyncFlow",
    "secured": "implementations:Secured",
    "shared memory": "implementations:SharedMemory",
    "shared memory, secured": "implementations:SecuredSharedMemory",
    "mooncake": "implementations:OnMooncake",
    "raw sockets": "raw_sockets:RawSockets",
    "TransferQueue": "transferqueue:TransferQueue",
}
"""Module and class of each implementation, by the heading of its column."""
RAW, PEER = "raw sockets", "TransferQueue"


class Implementation(ABC):
    """A queue. The process that calls ``start`` owns the servers; a process that calls ``attach`` is only a client."""

    @abstractmethod
    def start(self, *, units: int, tasks: Mapping[str, Sequence[str]]) -> Any:
        """Start servers, and return the handle for ``attach``. tasks: the columns that each task needs."""

    @abstractmethod
    def attach(self, handle: Any) -> None:
        """Become a client of servers that another process has started."""

    @abstractmethod
    def close(self) -> None:
        """End the servers and clients that this object started."""

    @property
    @abstractmethod
    def pids(self) -> dict[str, int]:
        """The server processes by name."""

    @abstractmethod
    def pack(self, samples: Sequence[Sample]) -> Any:
        """Return samples in the form that ``put`` takes."""

    @abstractmethod
    def unpack(self, packed: Any) -> list[Sample]:
        """Return samples from the form that ``fetch`` returns."""

    @abstractmethod
    def put(self, partition: str, packed: Any) -> Any:
        """Put rows; return their names for ``write``."""

    @abstractmethod
    def write(self, rows: Any, packed: Any) -> None:
        """Add columns to rows that this client put or claimed."""

    @abstractmethod
    def claim(self, partition: str, task: str, count: int, *, timeout: float) -> Any | None:
        """Take rows with all columns of the task; None if there are too few within ``timeout`` seconds."""

    @abstractmethod
    def fetch(self, rows: Any, columns: Sequence[str]) -> Any:
        """Read columns of rows."""

    def acknowledge(self, rows: Any) -> None:  # noqa: B027 - optional: without leases, a claim needs no acknowledgement
        """Acknowledge claimed rows without writing to them."""

    @abstractmethod
    def clear(self, partition: str) -> None:
        """Remove all rows of a partition."""

    @abstractmethod
    def names(self, rows: Any) -> list[Hashable]:
        """Return a name of each row; they sort in the order of the puts."""


def implementation(kind: str) -> Implementation:
    """Return the implementation with this heading."""
    module, name = KINDS[kind].split(":")
    made: Implementation = getattr(importlib.import_module(module), name)()
    return made


@dataclass(frozen=True)
class Put:
    """The ids of rows that this client put."""

    rows: list[int]


@dataclass(frozen=True, kw_only=True)
class _Attached:
    handle: Handle
    tasks: Mapping[str, Sequence[str]]


class AsyncFlow(Implementation):
    """AsyncFlow in memory, over TCP, in separate processes, with leases of 30 s and the ledger in ``interval``."""

    backend: ClassVar[str] = "memory"
    secured: ClassVar[bool] = False
    shared_memory: ClassVar[bool] = False

    def __init__(self) -> None:
        self._made = contextlib.ExitStack()
        self._declared: set[str] = set()
        self._pids: dict[str, int] = {}

    def start(self, *, units: int, tasks: Mapping[str, Sequence[str]]) -> _Attached:
        options = {"backend": self.backend, "secured": self.secured, "shared_memory": self.shared_memory}
        made = self._made.enter_context(servers(units=units, **options))
        self._pids = made.pids
        handle = _Attached(handle=made.handle, tasks=dict(tasks))
        self.attach(handle)
        return handle

    def attach(self, handle: _Attached) -> None:
        self._attached = handle
        self.queue = self._made.enter_context(handle.handle.connect())

    def close(self) -> None:
        self._made.close()

    @property
    def pids(self) -> dict[str, int]:
        return self._pids

    def pack(self, samples: Sequence[Sample]) -> dict[str, Jagged]:
        return {
            name: Jagged.from_rows([sample[name] for sample in samples], samples[0][name].dtype) for name in samples[0]
        }

    def unpack(self, packed: Mapping[str, Jagged]) -> list[Sample]:
        rows = zip(*(column.rows() for column in packed.values()), strict=True)
        return [dict(zip(packed, values, strict=True)) for values in rows]

    def put(self, partition: str, packed: Mapping[str, Jagged]) -> Put:
        self._declare(partition)
        return Put(self.queue.put(partition, packed, timeout=CALL_S).rows)

    def write(self, rows: Put | list[LeasedRow], packed: Mapping[str, Jagged]) -> None:
        if isinstance(rows, Put):
            self.queue.write(rows.rows, packed, timeout=CALL_S)
            return
        if not all(self.queue.complete(rows, packed, timeout=CALL_S)):
            raise RuntimeError("a lease had ended before its rows were written")

    def claim(self, partition: str, task: str, count: int, *, timeout: float) -> list[LeasedRow] | None:
        self._declare(partition)
        claimed = self.queue.claim(partition=partition, task=task, max_rows=count, min_rows=count, timeout=timeout)
        return claimed.rows or None

    def fetch(self, rows: list[LeasedRow], columns: Sequence[str]) -> dict[str, Jagged]:
        fetched: dict[str, Jagged] = self.queue.fetch(rows, columns, timeout=CALL_S)
        return fetched

    def acknowledge(self, rows: list[LeasedRow]) -> None:
        if not all(self.queue.complete(rows, {}, timeout=CALL_S)):
            raise RuntimeError("a lease had ended before its rows were acknowledged")

    def clear(self, partition: str) -> None:
        self.queue.clear_partition(partition=partition, timeout=CALL_S)

    def names(self, rows: list[LeasedRow]) -> list[Hashable]:
        return [row.meta.serial for row in rows]

    def _declare(self, partition: str) -> None:
        if partition in self._declared:
            return
        tasks = [
            TaskSpec(partition=partition, name=name, needs=list(needs), lease_s=LEASE_S)
            for name, needs in self._attached.tasks.items()
        ]
        self.queue.declare(tasks, timeout=CALL_S)
        self._declared.add(partition)


class Secured(AsyncFlow):
    """AsyncFlow with certificates: every connection is authenticated and encrypted."""

    secured = True


class SharedMemory(AsyncFlow):
    """AsyncFlow with shared memory between processes of one host, as by default."""

    shared_memory = True


class SecuredSharedMemory(SharedMemory):
    """AsyncFlow with shared memory and certificates, which encrypt nothing within a host."""

    secured = True


class OnMooncake(AsyncFlow):
    """AsyncFlow on Mooncake Store over TCP: one master, and one holder per unit."""

    backend = "mooncake"
