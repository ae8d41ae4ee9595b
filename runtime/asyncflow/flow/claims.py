"""Size of the claims of an instance, and the choice of whole ready groups for a claim.

Invariant: groups are taken in their order; no group is skipped because a following one would fit; if any group is
ready, at least one is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

R = TypeVar("R")

EMPTY_CLAIM_S: Final = 0.05
"""Seconds after which a claim of evaluation rows returns without rows."""
ENDED_PARTITION_S: Final = 1.0
"""Seconds between claims from a partition that has ended: it answers immediately, and may have been reset since."""
_BACKLOG = 4
"""Most generated and undelivered samples per slot; an instance that has more claims nothing."""


def claims_more(*, backlog: int, slots: int) -> bool:
    """Return whether an instance may claim rows. backlog: samples that it has generated and not delivered."""
    return backlog <= _BACKLOG * slots


def rows_at_once(wanted: int, *, slots: int) -> int:
    """Return the number of rows of one claim: a part of the wanted ones, so that instances share the ready rows."""
    return min(wanted, max(1, slots // 4))


def whole_groups(ready: Iterable[Sequence[R]], *, most: int) -> list[Sequence[R]]:
    """Return the first groups that have at most ``most`` rows in total, or the first group alone if it has more.

    ready: the rows of each ready group, in the order of the groups; read only as far as needed.
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
