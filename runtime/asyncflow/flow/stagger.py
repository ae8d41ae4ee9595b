"""Permits of a staggered update: which instances may change weights now, while the others keep the trainer supplied.

An instance that changes weights generates less, or nothing, while it holds its permit. Training consumes ``need``
samples per second; the other instances and the samples that are ready must supply them. So a set S of instances may
hold permits at the same time if

    sum of the rates of the instances outside S  +  ready / seconds of a permit  >=  need

Weights must advance in any case: a number of instances may always hold permits, so that each has had one before the
next version is published (``Supply.least``, at least 1).

A **fleet** serves clients other than a trainer. A part of it holds permits at the same time: a quarter, unless its
WeightSync says otherwise, and never all of it, however long a permit is held.

Source: AsyncFlow §4.2.2 leaves sub-step updates as future work, and names no condition.

Invariants:
Beyond ``least``, a permit is granted only if the trainer stays supplied while all permits are held.
The instances with the oldest version come first, and no other instance overtakes them.
An instance that has left, or has held its permit far longer than usual, blocks no other instance, except that one
instance of a fleet always keeps serving.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

_OVERDUE = 3.0
"""Multiple of the mean duration of the last permits after which a permit no longer blocks other instances."""
_LEAST_OVERDUE_S = 60.0
"""Lower bound of that time in seconds, also used before any permit has ended."""
_SMOOTHING = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """Measurements of generation and training.

    rates: samples per second of each instance while it generates, by name; need: samples per second that training
    takes while it does not wait, None while unknown; ready: number of finished samples that are not trained yet;
    version_s: seconds from one publication to the next, None while unknown.
    """

    rates: Mapping[str, float]
    need: float | None
    ready: int
    version_s: float | None
    most: ClassVar[float] = math.inf

    def suffices(self, out: set[str], *, permit_s: float) -> bool:
        """Return whether the trainer is supplied for ``permit_s`` seconds in which ``out`` generate nothing."""
        if self.need is None:
            return False
        rest = sum(rate for name, rate in self.rates.items() if name not in out)
        return rest * permit_s + self.ready >= self.need * permit_s

    def least(self, permit_s: float) -> int:
        """Return how many must hold permits at the same time for all to have had one before the next version."""
        if self.version_s is None or self.version_s <= 0:
            return 1
        return max(1, math.ceil(len(self.rates) * permit_s / self.version_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerFleet:
    """Instances that serve clients other than a trainer. size: number of known instances; stagger: most that hold a
    permit at the same time, None for a quarter.
    """

    size: int
    stagger: int | None = None

    def suffices(self, out: set[str], *, permit_s: float) -> bool:
        """Return False: the load of the fleet is not known."""
        del out, permit_s
        return False

    def least(self, permit_s: float) -> int:
        """Return how many may hold permits at the same time."""
        del permit_s
        return max(1, min(self.stagger or math.ceil(self.size / 4), self.most))

    @property
    def most(self) -> int:
        """Most that may hold permits at the same time, overdue ones included: one instance keeps serving."""
        return max(1, self.size - 1)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A permit that an instance with the weights of ``version`` waits for or holds, since ``since`` (seconds)."""

    version: int
    since: float


class Permits:
    """The held permits and the requests for permits. most: most held at the same time, None for no limit. Times are in
    seconds.
    """

    def __init__(self, *, most: int | None = None) -> None:
        self._most = most
        self._waiting: dict[str, _Turn] = {}
        self._out: dict[str, _Turn] = {}
        self._permit_s: float | None = None

    @property
    def granted(self) -> frozenset[str]:
        """The names of the instances that hold a permit."""
        return frozenset(self._out)

    def ask(self, name: str, *, version: int, now: float) -> None:
        """Record that an instance with the weights of ``version`` (packed) waits for a permit.

        If it holds a permit, the reply was lost, and ``grant`` grants the permit again. If its version has changed
        since that permit, the message that ended the permit was lost, and the permit ends now.
        """
        if name in self._out and self._out[name].version != version:
            del self._out[name]
        since = self._waiting[name].since if name in self._waiting else now
        self._waiting[name] = _Turn(version, since)

    def withdraw(self, name: str) -> None:
        """Record that an instance no longer waits."""
        self._waiting.pop(name, None)

    def end(self, name: str, *, now: float) -> None:
        """End a permit and update the mean duration of permits. Do nothing if the instance holds none."""
        held = self._out.pop(name, None)
        if held is not None:
            took_s = now - held.since
            before = took_s if self._permit_s is None else self._permit_s
            self._permit_s = before + _SMOOTHING * (took_s - before)

    def leave(self, name: str) -> None:
        """Remove an instance that has left."""
        self._waiting.pop(name, None)
        self._out.pop(name, None)

    def alone_s(self, rank: int, fleet: FollowerFleet) -> float:
        """Return after how many seconds the instance of that rank, from 0, may change weights without a permit if the
        granting process does not answer. By then all current permits have ended, and no more instances change weights
        at the same time than with permits.
        """
        return self._overdue_s * (2 + rank // fleet.least(self._permit_s or 0.0))

    def grant(self, supply: Supply | FollowerFleet, *, now: float) -> list[str]:
        """Return the waiting instances that are granted a permit now, the oldest version first."""
        granted = [name for name in self._waiting if name in self._out]
        held = {name for name, turn in self._out.items() if now - turn.since < self._overdue_s}
        permit_s = self._permit_s or 0.0
        for name in sorted(self._waiting.keys() - granted, key=self._order):
            if len(self._out) >= supply.most or (self._most is not None and len(held) >= self._most):
                break
            if len(held) >= supply.least(permit_s) and not self._can_spare(name, supply):
                break
            granted.append(name)
            held.add(name)
            self._out[name] = _Turn(self._waiting[name].version, now)
        for name in granted:
            del self._waiting[name]
        return granted

    @property
    def _overdue_s(self) -> float:
        return max(_LEAST_OVERDUE_S, _OVERDUE * (self._permit_s or 0.0))

    def _can_spare(self, name: str, supply: Supply | FollowerFleet) -> bool:
        """Return whether the trainer stays supplied if this instance has a permit too; False before any has ended."""
        return self._permit_s is not None and supply.suffices({*self._out, name}, permit_s=self._permit_s)

    def _order(self, name: str) -> tuple[int, float, str]:
        waiting = self._waiting[name]
        return waiting.version, waiting.since, name
