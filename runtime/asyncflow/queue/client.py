"""What all roles use to talk to the queue. Control goes to the controller, columns go straight to the units.

Every method has a deadline and survives the restart of whomever it talks to: calls that got no answer are made again,
which is safe (see ``calls``). What cannot survive, rows on a unit that died, says so: writes are fenced, reads raise
StaleHandle.

Invariant: all rows of one prompt go to one unit; columns come back in the order of the rows asked for.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from msgspec import Struct

from asyncflow.errors import DeadlineExceeded, PeerLost, Refused
from asyncflow.net.frames import BatchHeader, Jagged, decode_batch, encode_batch
from asyncflow.net.keys import Keys
from asyncflow.net.membership import Membership
from asyncflow.net.rpc import RpcClient, persist
from asyncflow.queue import calls
from asyncflow.queue.messages import (
    AuditReport,
    LeasedRow,
    PartitionSnapshot,
    QueueStats,
    RowMeta,
    Slot,
    StagedRow,
    Tag,
    TaskSpec,
    Wanted,
)

R = TypeVar("R", bound=Struct)
T = TypeVar("T")
_MOST = 1 << 40
_PARK_S = 10.0
_GRACE_S = 5.0
_EMPTY = BatchHeader(rows=0, columns=[])


class QueueClient:
    """One process's client.

    controller: the controller's address, or a function that gives it; unit: gives the address of the unit with an
    index; units: the indices of the units that are there; worker: who holds the leases (its incarnation); keys: the
    job's key.
    """

    def __init__(
        self,
        *,
        controller: str | Callable[[], str | None],
        unit: Callable[[int], str | None],
        units: Callable[[], Sequence[int]],
        worker: str,
        keys: Keys | None = None,
    ) -> None:
        self.worker = worker
        self._controller = RpcClient(name="queue client", resolve=controller, keys=keys)
        self._unit_address = unit
        self._unit_indices = units
        self._units: dict[int, RpcClient] = {}
        self._keys = keys
        self._tickets = itertools.count()
        self._ticket_base = uuid.uuid4().hex[:8]
        self._goodbyes: set[asyncio.Task[None]] = set()

    @classmethod
    def of(cls, membership: Membership, *, keys: Keys | None = None) -> QueueClient:
        """Make the client of a member of the job, which finds controller and units by its directory."""
        return cls(
            controller=lambda: membership.address("controller"),
            unit=lambda index: membership.address("storage", index),
            units=lambda: [member.index for member in membership.peers("storage")],
            worker=membership.member.incarnation,
            keys=keys,
        )

    async def close(self) -> None:
        """Close all connections."""
        if self._goodbyes:
            await asyncio.wait(self._goodbyes)
        for client in (self._controller, *self._units.values()):
            await client.close()
