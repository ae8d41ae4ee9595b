"""What the handlers of calls need of the process that serves them.

Invariant: an answer that it gives leaves only when the ledger has everything that it tells of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar

from asyncflow.net.later import Later
from asyncflow.queue.controller.sessions import Sessions
from asyncflow.queue.protocol.calls import Claimed
from asyncflow.queue.protocol.messages import QueueStats
from asyncflow.queue.table.claims import Claim
from asyncflow.queue.table.table import Table

T = TypeVar("T")
Soon: TypeAlias = "T | Later[T] | asyncio.Future[T]"
"""An answer, or what will have it."""


Address: TypeAlias = Callable[[int], str | None]
"""Returns the address of the controller with this number, None while it has none."""


class Serving(Protocol):
    """The controller, to those that answer calls in its name."""

    table: Table
    sessions: Sessions
    ledger_dir: Path

    def now(self) -> float:
        """The clock of leases and sessions."""

    def stats(self) -> QueueStats:
        """Return the counts of now."""

    def settle(self) -> asyncio.Future[None] | None:
        """Take what the last commands left; give what is done when the ledger has it, None where it does."""

    async def synced(self) -> None:
        """Wait until the ledger has everything up to now on disk, whatever its class."""

    def safe(self, reply: T) -> Soon[T]:
        """Settle, and give ``reply`` when the ledger has everything up to now."""

    def freed(self, reply: T) -> Soon[T]:
        """Settle, and give ``reply`` when the units have freed what they were told to, as far as they do so soon."""

    def until(
        self, partition: str, attempt: Callable[[], T | None], wait_s: float, otherwise: Callable[[], T]
    ) -> Soon[T]:
        """Return what ``attempt`` gives, tried again whenever the partition changes; ``otherwise`` after ``wait_s``."""

    def claim(self, claim: Claim, wait_s: float, late: list[str]) -> Soon[Claimed]:
        """Return what ``claim`` is granted; nothing after ``wait_s``. late: leases that had ended."""

    def withdraw(self, worker: str, ticket: str) -> None:
        """Answer a parked claim without rows; one that was met has its answer."""


class Following(Serving, Protocol):
    """A controller that follows another, to what does this in its name."""

    async def rewrite(self) -> None:
        """Write the ledger anew, because the books were replaced."""

    def fail(self, error: BaseException) -> None:
        """Stop serving: this controller cannot go on."""
