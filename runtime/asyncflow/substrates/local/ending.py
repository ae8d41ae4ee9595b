"""In which order does a job end, and by when must each have ended? Pure.

Rollouts hand back what they hold, then trainers may write a checkpoint, then the driver, and last those on whom all
others rely. Invariant: every seat is in exactly one stage, and the last stage is over after ``within_s`` seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from asyncflow.substrates.local.crew import Seat

WITHIN_S = 8.0
"""Seconds that all roles together have, unless the job says otherwise: Ctrl-C is over within 10 s."""

_FIRST_BY = 0.25
_ORDER: tuple[tuple[frozenset[str], float], ...] = (
    (frozenset({"trainer"}), 0.65),
    (frozenset({"driver"}), 0.8),
    (frozenset({"controller", "storage"}), 0.9),
    (frozenset({"holder", "master"}), 1.0),
)
"""Roles in the order of their ends, and the share of the time after which those still alive are killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Seats that are told to end together; those alive ``by_s`` seconds after the beginning are killed."""

    seats: tuple[Seat, ...]
    by_s: float


def stages(seats: Iterable[Seat], *, within_s: float = WITHIN_S) -> list[Stage]:
    """Sort living seats into stages; roles that nobody depends on come first, empty stages are left out."""
    seats = list(seats)
    named = frozenset().union(*(roles for roles, _ in _ORDER))
    first = Stage(seats=tuple(seat for seat in seats if seat.role not in named), by_s=_FIRST_BY * within_s)
    rest = [
        Stage(seats=tuple(seat for seat in seats if seat.role in roles), by_s=share * within_s)
        for roles, share in _ORDER
    ]
    return [stage for stage in (first, *rest) if stage.seats]
