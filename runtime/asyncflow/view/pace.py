"""Pace of each process between two observations of a run: tokens per second, and the share of busy time. Pure.

Invariants: a process has a pace once the same incarnation was observed twice. A share is between 0 and 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from asyncflow.driver.presence import MemberState

Place: TypeAlias = tuple[str, int]
_LEAST_S = 0.2
"""Least seconds between two heartbeats from which a pace is computed."""


@dataclass(frozen=True, slots=True)
class ProcessPace:
    """Pace of one process.

    tokens_per_second: rate of generated tokens; busy: share of busy time, None if the process does not report it.
    """

    tokens_per_second: float
    busy: float | None


class Paces:
    """Paces by (role, index), over the time between the last two observed heartbeats."""

    def __init__(self) -> None:
        self._seen: dict[Place, MemberState] = {}
        self._paces: dict[Place, ProcessPace] = {}

    def look(self, members: Sequence[MemberState]) -> Mapping[Place, ProcessPace]:
        """Record the current state of the members, and return the known paces."""
        current = {(member.role, member.index): member for member in members}
        for place, member in current.items():
            before = self._seen.get(place)
            if before is None or not _same(before, member):
                self._seen[place] = member
                self._paces.pop(place, None)
            elif (passed := _beat(member) - _beat(before)) >= _LEAST_S:
                self._seen[place] = member
                self._paces[place] = _pace(before, member, passed)
        self._seen = {place: member for place, member in self._seen.items() if place in current}
        self._paces = {place: pace for place, pace in self._paces.items() if place in current}
        return dict(self._paces)


def _same(before: MemberState, now: MemberState) -> bool:
    return before.attempt == now.attempt and _beat(before) <= _beat(now) and before.tokens <= now.tokens


def _beat(member: MemberState) -> float:
    """Return the age of a process at its last heartbeat."""
    return member.age_s - member.silent_s


def _pace(before: MemberState, now: MemberState, passed: float) -> ProcessPace:
    busy = None
    if before.busy_s is not None and now.busy_s is not None:
        busy = max(0.0, min(1.0, (now.busy_s - before.busy_s) / passed))
    return ProcessPace((now.tokens - before.tokens) / passed, busy)
