"""Which units are asked to lend whole parcels: those of which the last answers came lent, through shared memory.

Invariant: a unit that gave a whole parcel as a copy is asked for no other before many of its answers came lent.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncflow.net.arena.borrowing import mark_of
from asyncflow.net.frames import LARGE, Jagged

_PAUSE = 16


class Lenders:
    """What one client knows of the units that it fetches from."""

    def __init__(self) -> None:
        self._before: dict[int, int] = {}
        """By unit: how many of its answers must still come lent before it is asked."""

    def __contains__(self, unit: int) -> bool:
        return self._before.get(unit, 1) == 0

    def heard(self, unit: int, columns: Mapping[str, Jagged], *, whole: bool) -> bool:
        """Take note of what a unit gave, which may be a whole parcel; tell whether it was lent."""
        large = [column.values for column in columns.values() if column.values.nbytes >= LARGE]
        lent = any(mark_of(values) is not None for values in large)
        before = self._before.get(unit, 1)
        if lent:
            self._before[unit] = max(0, before - 1)
        elif large:
            self._before[unit] = max(before, _PAUSE if whole else 1)
        return lent
