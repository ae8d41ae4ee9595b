"""The lease on the rows of a batch, which travels with it from a loader worker to the process that trains.

Invariant: wherever a lease is, that process keeps it in force: a loader worker lives until all that it sent has
arrived, and what arrives where its data set was made is kept from then on.
"""

from __future__ import annotations

from typing import Protocol
from weakref import WeakValueDictionary

from asyncflow.queue.protocol.messages import LeasedRow


class Keeper(Protocol):
    """Who keeps leases in force."""

    def keep(self, rows: list[LeasedRow]) -> None:
        """Keep the lease of ``rows`` in force from now on."""


KEEPERS: WeakValueDictionary[str, Keeper] = WeakValueDictionary()
"""Those of this process, by name."""


class Held:
    """Rows that are ours until they are completed or given back. keeper: the name of who keeps them."""

    def __init__(self, keeper: str, rows: list[LeasedRow]) -> None:
        self.keeper = keeper
        self.rows = rows

    def __reduce__(self) -> tuple[object, ...]:
        return _arrive, (self.keeper, self.rows)


def _arrive(keeper: str, rows: list[LeasedRow]) -> Held:
    if (here := KEEPERS.get(keeper)) is not None:
        here.keep(rows)
    return Held(keeper, rows)
