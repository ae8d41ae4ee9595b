"""Pace of each process between two looks at a run: tokens a second, and the share of the time in which it worked. Pure.

Invariant: a process has a pace once it was seen twice as the same one; a share is between 0 and 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from asyncflow.driver.presence import MemberState

Place: TypeAlias = tuple[str, int]
_LEAST_S = 0.2
"""Seconds between two heartbeats below which they say too little."""


@dataclass(frozen=True, slots=True)
class ProcessPace:
    """tokens_per_second: that it generates; busy: share of the time in which it worked, None where it does not say."""

    tokens_per_second: float
    busy: float | None


class Paces:
    """Paces by (role, index), over the time between the last two heartbeats that were seen."""

    def __init__(self) -> None:
        self._seen: dict[Place, MemberState] = {}
        self._paces: dict[Place, ProcessPace] = {}

    def look(self, members: Sequence[MemberState]) -> Mapping[Place, ProcessPace]:
        """Take in how the members do now, and return the paces that are known."""
        there = {(member.role, member.index): member for member in members}
        for place, member in there.items():
            before = self._seen.get(place)
            if before is None or not _same(before, member):
                self._seen[place] = member
                self._paces.pop(place, None)
            elif (passed := _beat(member) - _beat(before)) >= _LEAST_S:
                self._seen[place] = member
                self._paces[place] = _pace(before, member, passed)
        self._seen = {place: member for place, member in self._seen.items() if place in there}
        self._paces = {place: pace for place, pace in self._paces.items() if place in there}
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
