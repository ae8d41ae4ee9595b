"""Claims of an instance: when and for how many rows it asks, and which whole groups of those that are ready it gets.

Invariant: groups are given in their order, none is passed over for a later one that would fit, and where any are ready
at least one is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

R = TypeVar("R")

PARKED_S: Final = 0.05
"""Seconds after which a claim of evaluation rows has found none."""
ENDED_S: Final = 1.0
"""Seconds after which a partition that has ended is asked again: it answers at once, and may have been reset."""
_BACKLOG = 4
"""Samples generated and not delivered, in times the slots, beyond which nothing is claimed."""


def claims_more(*, backlog: int, slots: int) -> bool:
    """Return whether an instance claims at all. backlog: samples that it has generated and not delivered."""
    return backlog <= _BACKLOG * slots


def rows_at_once(wanted: int, *, slots: int) -> int:
    """Return how many rows of those wanted to ask for: instances that ask together so share what there is."""
    return min(wanted, max(1, slots // 4))


def whole_groups(ready: Iterable[Sequence[R]], *, most: int) -> list[Sequence[R]]:
    """Return the first groups that have at most ``most`` rows together, or the first alone if it has more.

    ready: the rows of each that can be had, in the order of the groups; read only as far as needed.
    """
    taken: list[Sequence[R]] = []
    count = 0
    for rows in ready:
        if taken and count + len(rows) > most:
            break
        taken.append(rows)
        count += len(rows)
        if count >= most:
            break
    return taken
