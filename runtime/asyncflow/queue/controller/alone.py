"""What part a controller has in its queue: here the only one's; ``Home`` and ``Shard`` are for where there are several.

Invariant: with one controller nothing is told to others, and nothing is waited for.
"""

from __future__ import annotations

from asyncflow.net.rpc import RpcServer
from asyncflow.queue.controller.handlers import Handlers
from asyncflow.queue.controller.serving import Serving


class Alone:
    """The part of a queue's only controller."""

    def __init__(self, controller: Serving) -> None:
        self._controller = controller
        self._table = controller.table

    def route(self, server: RpcServer) -> None:
        """Have ``server`` answer everybody."""
        Handlers(self._controller).route(server)

    def start(self) -> None:
        """Begin, when the ledger was read and calls are answered."""

    async def close(self) -> None:
        """Talk to other controllers no longer."""

    def ready(self) -> tuple[bool, str]:
        """Tell whether leases can be granted, and what is waited for."""
        return True, "ready"

    def silences(self) -> dict[int, float]:
        """Return the seconds for which each controller that follows this one has not asked what happened."""
        return {}

    def expire(self, worker: str) -> None:
        """End all leases and claims of a worker that is known to be dead."""
        self._table.claims.expire_worker(worker)
        self._controller.settle()
