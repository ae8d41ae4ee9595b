"""Evidence: the known facts about a run, and figures derived from them for the findings. Pure.

Invariants: a figure is computed over the steps of the surviving history, without the first ``WARM_UP`` steps of each
attempt of the trainer, in which processes start. A figure without data is None or an empty list, and is not used.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from asyncflow.api.job import RLJobSpec
from asyncflow.api.status import DriverStatus
from asyncflow.driver.journal import FIRST_DISPATCH
from asyncflow.driver.lives import Life, Lives

WARM_UP = 2
"""First steps of an attempt that are excluded from durations: processes start, and the queue is empty."""
TIMED = 100
"""Maximum number of steps over which durations are summed, so that problems fixed long ago are not reported."""
_OF_TOKENS = frozenset({"entropy", "surprise", "kl", "approx_kl", "clip_low", "clip_high", "grad_norm"})
_PLACE = re.compile(r"(.+)-(\d+)-[^-]+")
_LEAST_S = 1e-6
_FEWEST_STEPS = 9
"""Minimum number of steps for a comparison of thirds."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Known steps, events, process lives and reward outcomes of a run.

    steps: lines of ``metrics.jsonl`` of the surviving history, in order; events: lines of ``events.jsonl``; lives: of
    all incarnations of its processes, by name; scored: number of samples with a reward; failed: number of samples
    without one, by reason; status: the driver's status, None if the run has ended or the driver does not answer;
    causes: by role, seconds of idle time by cause, as far as spans are recorded, summed over the role's processes;
    lived: by role, total seconds of these processes.
    """

    name: str
    spec: RLJobSpec
    steps: Sequence[Mapping[str, Any]] = ()
    events: Sequence[Mapping[str, Any]] = ()
    lives: Mapping[str, Life] = field(default_factory=dict)
    scored: int = 0
    failed: Mapping[str, int] = field(default_factory=dict)
    first_failure: str = ""
    status: DriverStatus | None = None
    causes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    lived: Mapping[str, float] = field(default_factory=dict)

    @property
    def learns(self) -> bool:
        """True if a model is trained on its own responses; otherwise rewards, losses and lengths have no meaning."""
        return self.spec.rollout.engine.name != "simulated" and any("loss" in step for step in self.steps)

    def values(self, name: str, last: int | None = None) -> list[float]:
        """Return a figure of the steps that have it, or of the ``last`` ones of them.

        Means over tokens are skipped for steps without a token in the loss: their lines lack them, or have 0, as for
        ``grad_norm``.
        """
        of_tokens = name in _OF_TOKENS
        found = [
            float(step[name])
            for step in self.steps
            if step.get(name) is not None and not (of_tokens and step.get("computed_tokens") == 0)
        ]
        return found if last is None else found[-last:]

    def thirds(self, name: str) -> tuple[float, float] | None:
        """Return the medians of a figure over the first and the last third of the steps; None for too few steps."""
        found = self.values(name)
        if len(found) < _FEWEST_STEPS:
            return None
        size = len(found) // 3
        return statistics.median(found[:size]), statistics.median(found[-size:])

    @cached_property
    def timed(self) -> list[Mapping[str, Any]]:
        """The newest steps, without those of the warm-up."""
        seen: Counter[Any] = Counter()
        counted = []
        for step in self.steps:
            seen[step["attempt"]] += 1
            if seen[step["attempt"]] > WARM_UP:
                counted.append(step)
        return counted[-TIMED:]

    @property
    def timed_s(self) -> float:
        """Total seconds of the ``timed`` steps."""
        return sum(float(step["wall_s"]) for step in self.timed)

    @property
    def step_s(self) -> float | None:
        """Median seconds of a step."""
        return statistics.median(float(step["wall_s"]) for step in self.timed) if self.timed else None

    def trainer_share(self, *names: str) -> float | None:
        """Return the share of the steps' time in these fields of ``metrics.jsonl``; None without steps."""
        whole = self.timed_s
        if whole <= _LEAST_S:
            return None
        return min(1.0, sum(float(step.get(name) or 0.0) for step in self.timed for name in names) / whole)

    @cached_property
    def idle_shares(self) -> dict[str, float]:
        """Idle share of each role's processes from the first prompt to the last step."""
        opened = next((float(event["at"]) for event in self.events if event.get("event") == FIRST_DISPATCH), None)
        lives = Lives(opened=opened)
        lives.restore(self.lives)
        return lives.idle_shares(max((life.seen for life in self.lives.values()), default=0.0))

    def figure(self, role: str, name: str) -> float:
        """Return the sum of a figure over all lives of a role."""
        return sum(life.figures.get(name, 0.0) for life in self.lives.values() if life.role == role)

    def mean(self, role: str, name: str) -> tuple[float, int] | None:
        """Return the mean and the number of observations of a histogram of a role; None if there are none."""
        count = self.figure(role, f"{name}_count")
        return (self.figure(role, f"{name}_sum") / count, int(count)) if count else None

    def lived_s(self, role: str) -> float:
        """Return the total seconds of life of a role's processes."""
        return sum(life.seen - life.started for life in self.lives.values() if life.role == role)

    def processes(self, role: str) -> int:
        """Return the number of processes of a role, now or at the end of the run."""
        newest = max((life.seen for life in self.lives.values()), default=0.0)
        return sum(life.role == role and newest - life.seen < _ALIVE_S for life in self.lives.values())

    @cached_property
    def lost(self) -> Counter[str]:
        """By role: number of processes that ended unexpectedly while the job was up, and were started again."""
        places: dict[str, list[Life]] = {}
        for name, life in self.lives.items():
            place = _PLACE.fullmatch(name)
            places.setdefault(f"{place[1]}-{place[2]}" if place else life.role, []).append(life)
        lost: Counter[str] = Counter()
        for lives in places.values():
            for before, after in pairwise(sorted(lives, key=lambda life: life.started)):
                if before.left:
                    continue
                others = (life for life in self.lives.values() if life is not before and life is not after)
                lost[before.role] += any(_covers(life, before.seen, after.started) for life in others)
        return +lost

    @property
    def rollouts(self) -> int:
        """Number of rollouts, now or at the end of the run; the manifest's number if it is unknown."""
        return self.processes("rollout") or self.spec.rollout.replicas


_ALIVE_S = 6.0
"""Seconds since the newest report of any process after which a silent process counts as ended; the driver waits 5 s."""


def _covers(life: Life, begin: float, end: float) -> bool:
    return life.started < begin and life.seen > end


def surviving(lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the steps of the surviving history: a repeated step replaces its earlier line and all later steps."""
    kept: dict[int, Mapping[str, Any]] = {}
    for line in lines:
        while kept and next(reversed(kept)) >= line["step"]:
            kept.popitem()
        kept[line["step"]] = line
    return list(kept.values())
