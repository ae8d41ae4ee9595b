"""Where a queue is, in a form that goes to loader workers.

Invariant: plain data; every process that opens it gets a client of its own.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from asyncflow.errors import Refused
from asyncflow.net.keys import Keys
from asyncflow.queue.client.client import QueueClient
from asyncflow.queue.client.visitor import visit


@dataclass(frozen=True, kw_only=True)
class Queue:
    """A queue by its one ``address``, or by the addresses of its ``controller`` and ``units`` (by index).

    key_file: the queue's key.
    """

    address: str = ""
    controller: str = ""
    units: Mapping[int, str] = field(default_factory=dict)
    key_file: Path | None = None

    def __post_init__(self) -> None:
        if bool(self.address) == bool(self.controller and self.units):
            hint = "Give `address`, or `controller` and `units`"
            raise Refused("a queue is named by one address, or by those of controller and units", hint=hint)

    @classmethod
    def of(cls, queue: Queue | str) -> Queue:
        """Take an address for the queue that is there."""
        return cls(address=queue) if isinstance(queue, str) else queue

    @asynccontextmanager
    async def client(self, worker: str = "") -> AsyncIterator[QueueClient]:
        """Be a client. worker: who holds its leases, where they are to outlive it."""
        keys = Keys.load(self.key_file) if self.key_file else None
        if self.address:
            async with visit(self.address, keys=keys, worker=worker) as client:
                yield client
            return
        client = QueueClient(
            controller=self.controller,
            unit=self.units.get,
            units=lambda: sorted(self.units),
            worker=worker or uuid.uuid4().hex,
            keys=keys,
        )
        try:
            yield client
        finally:
            await client.close()
