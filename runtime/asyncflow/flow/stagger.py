"""Permits of a staggered update: which instances may change weights now, while the others keep the trainer supplied.

An instance that changes weights generates less, or nothing, for as long as it holds its permit. Training takes ``need``
samples a second; the instances that go on make up for a part of that, and samples that lie ready for the rest. So the
set S of instances may hold permits at once while

    sum of the rates of those outside S  +  ready / seconds of a permit  >=  need

Weights have to go forward all the same: as many instances as it takes for all to have had a permit before the next
version comes may always hold one, at least one of them (``Supply.least``).

A **fleet** serves others than a trainer. Of it a part holds permits at once, a quarter unless its WeightSync says
otherwise, and never all of it, however long a permit is held.

Source: AsyncFlow §4.2.2 leaves sub-step updates as future work, and names no condition.

Invariants: beyond ``least``, a permit is granted only while the trainer is supplied during those that are held;
those with the oldest version come first, and nobody overtakes them; whoever is gone, or holds its permit for far longer
than others did, keeps nobody waiting, unless only one of a fleet would go on serving.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

_OVERDUE = 3.0
"""Times the mean of the last permits after which one keeps nobody waiting any more."""
_PATIENCE_S = 60.0
"""The same in seconds, where no permit has ended yet, and the least there is."""
_SMOOTHING = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """Figures of generation and training.

    rates: samples a second that each instance makes when it generates, by its name; need: samples a second that
    training takes when it does not wait, None while unknown; ready: samples that are finished and not trained yet;
    version_s: seconds from one publication to the next, None while unknown.
    """

    rates: Mapping[str, float]
    need: float | None
    ready: int
    version_s: float | None
    most: ClassVar[float] = math.inf

    def suffices(self, out: set[str], *, permit_s: float) -> bool:
        """Return whether the trainer is supplied for ``permit_s`` seconds in which ``out`` make nothing."""
        if self.need is None:
            return False
        rest = sum(rate for name, rate in self.rates.items() if name not in out)
        return rest * permit_s + self.ready >= self.need * permit_s

    def least(self, permit_s: float) -> int:
        """Return how many hold a permit at once if all are to have had one when the next version comes."""
        if self.version_s is None or self.version_s <= 0:
            return 1
        return max(1, math.ceil(len(self.rates) * permit_s / self.version_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerFleet:
    """Instances that serve others than a trainer. size: how many are known; stagger: most that hold a permit at once,
    None for a quarter.
    """

    size: int
    stagger: int | None = None

    def suffices(self, out: set[str], *, permit_s: float) -> bool:
        """Return False: what others ask of the fleet is not known."""
        del out, permit_s
        return False

    def least(self, permit_s: float) -> int:
        """Return how many hold a permit at once."""
        del permit_s
        return max(1, min(self.stagger or math.ceil(self.size / 4), self.most))

    @property
    def most(self) -> int:
        """Most that may hold permits at once, however long they do: one goes on serving."""
        return max(1, self.size - 1)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A permit that is waited for, or held, by an instance with the weights of ``version``."""

    version: int
    since: float


class Permits:
    """Permits that are waited for and held. most: at once, None for no bound. Times in seconds."""

    def __init__(self, *, most: int | None = None) -> None:
        self._most = most
        self._waiting: dict[str, _Turn] = {}
        self._out: dict[str, _Turn] = {}
        self._permit_s: float | None = None

    @property
    def out(self) -> frozenset[str]:
        """Those that hold a permit."""
        return frozenset(self._out)

    def ask(self, name: str, *, version: int, now: float) -> None:
        """Take in that an instance with the weights of ``version`` (packed) waits for a permit.

        One that holds a permit did not hear of it, and is granted it again; where its weights are others than those
        that the permit was to leave, it has ended that permit, and the driver did not hear of that.
        """
        if name in self._out and self._out[name].version != version:
            del self._out[name]
        since = self._waiting[name].since if name in self._waiting else now
        self._waiting[name] = _Turn(version, since)

    def withdraw(self, name: str) -> None:
        """Take in that an instance waits no longer."""
        self._waiting.pop(name, None)

    def end(self, name: str, *, now: float) -> None:
        """Take in that a permit is over, and learn how long one takes; one that is not known changes nothing."""
        held = self._out.pop(name, None)
        if held is not None:
            took_s = now - held.since
            before = took_s if self._permit_s is None else self._permit_s
            self._permit_s = before + _SMOOTHING * (took_s - before)

    def leave(self, name: str) -> None:
        """Take in that an instance is gone."""
        self._waiting.pop(name, None)
        self._out.pop(name, None)

    def alone_s(self, rank: int, fleet: FollowerFleet) -> float:
        """Return after how many seconds the instance of that rank, from 0, may go on by itself if nobody grants permits
        any more: those that hold one now have had it by then, and no more change weights at once than with permits.
        """
        return self._overdue_s * (2 + rank // fleet.least(self._permit_s or 0.0))

    def grant(self, supply: Supply | FollowerFleet, *, now: float) -> list[str]:
        """Return those that hold a permit from now on, the oldest version first."""
        granted = [name for name in self._waiting if name in self._out]
        held = {name for name, turn in self._out.items() if now - turn.since < self._overdue_s}
        permit_s = self._permit_s or 0.0
        for name in sorted(self._waiting.keys() - granted, key=self._order):
            if len(self._out) >= supply.most or (self._most is not None and len(held) >= self._most):
                break
            if len(held) >= supply.least(permit_s) and not self._spared(name, supply):
                break
            granted.append(name)
            held.add(name)
            self._out[name] = _Turn(self._waiting[name].version, now)
        for name in granted:
            del self._waiting[name]
        return granted

    @property
    def _overdue_s(self) -> float:
        return max(_PATIENCE_S, _OVERDUE * (self._permit_s or 0.0))

    def _spared(self, name: str, supply: Supply | FollowerFleet) -> bool:
        """Return whether the trainer stays supplied if this one has a permit too; False while none has ended."""
        return self._permit_s is not None and supply.suffices({*self._out, name}, permit_s=self._permit_s)

    def _order(self, name: str) -> tuple[int, float, str]:
        waiting = self._waiting[name]
        return waiting.version, waiting.since, name
