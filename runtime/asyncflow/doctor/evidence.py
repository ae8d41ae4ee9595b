"""Evidence: what is known of a run, and the figures that several findings need of it. Pure.

Invariants: a figure is taken over steps of the history that survives, without the first ``WARM_UP`` steps of each
attempt of the trainer, in which processes start; a figure for which there is nothing is None, or an empty list, and no
finding rests on it.
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
"""First steps of an attempt that say nothing about the pace: processes start, and the queue is empty."""
TIMED = 100
"""Most steps over which seconds are summed up: a run that was repaired long ago is not blamed."""
_OF_TOKENS = frozenset({"entropy", "surprise", "kl", "approx_kl", "clip_low", "clip_high", "grad_norm"})
_PLACE = re.compile(r"(.+)-(\d+)-[^-]+")
_LEAST_S = 1e-6
_FEWEST_STEPS = 9
"""Steps from which on thirds of them are compared."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Lines, lives and outcomes of a run, as far as they are known.

    steps: lines of ``metrics.jsonl`` of the history that survives, in order; events: lines of ``events.jsonl``; lives:
    of all incarnations of its processes, by name; scored, failed: samples with a reward, and those without one, by why;
    status: the driver's answer, None where the run is over or nobody answers; causes: by role, seconds of its idle time
    by cause, as far as spans tell, summed over its processes; lived: seconds of these processes.
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
        """True where a model is trained on responses of a model: else rewards, losses and lengths say nothing."""
        return self.spec.rollout.engine.name != "simulated" and any("loss" in step for step in self.steps)

    @property
    def samples_of_step(self) -> int:
        """Samples that one step takes."""
        return self.spec.algorithm.prompts_per_step * self.spec.algorithm.group_size

    def silent(self, last: int) -> list[float]:
        """Return the samples without an advantage of each of the ``last`` steps, which count them once an epoch."""
        return [count / self.spec.algorithm.epochs for count in self.values("silent_samples", last)]

    def values(self, name: str, last: int | None = None) -> list[float]:
        """Return a figure of the steps that have it, of the ``last`` ones. A step of whose tokens none counted in the
        loss has none that is a mean over tokens; its line has none, or a 0 as of ``grad_norm``.
        """
        of_tokens = name in _OF_TOKENS
        found = [
            float(step[name])
            for step in self.steps
            if step.get(name) is not None and not (of_tokens and step.get("computed_tokens") == 0)
        ]
        return found if last is None else found[-last:]

    def thirds(self, name: str) -> tuple[float, float] | None:
        """Return the medians of a figure over the first and the last third of the steps, None where there are few."""
        found = self.values(name)
        if len(found) < _FEWEST_STEPS:
            return None
        size = len(found) // 3
        return statistics.median(found[:size]), statistics.median(found[-size:])

    @cached_property
    def timed(self) -> list[Mapping[str, Any]]:
        """The newest steps whose seconds count."""
        seen: Counter[Any] = Counter()
        counted = []
        for step in self.steps:
            seen[step["attempt"]] += 1
            if seen[step["attempt"]] > WARM_UP:
                counted.append(step)
        return counted[-TIMED:]

    @property
    def timed_s(self) -> float:
        """Seconds of these steps."""
        return sum(float(step["wall_s"]) for step in self.timed)

    @property
    def step_s(self) -> float | None:
        """Median seconds of a step."""
        return statistics.median(float(step["wall_s"]) for step in self.timed) if self.timed else None

    def trainer_share(self, *names: str) -> float | None:
        """Return the share of the steps' time that has these names in ``metrics.jsonl``; None without steps."""
        whole = self.timed_s
        if whole <= _LEAST_S:
            return None
        return min(1.0, sum(float(step.get(name) or 0.0) for step in self.timed for name in names) / whole)

    @cached_property
    def idle_shares(self) -> dict[str, float]:
        """By role: share of their time from the first prompt to the last step in which its processes did nothing."""
        opened = next((float(event["at"]) for event in self.events if event.get("event") == FIRST_DISPATCH), None)
        lives = Lives(opened=opened)
        lives.restore(self.lives)
        return lives.idle_shares(max((life.seen for life in self.lives.values()), default=0.0))

    def figure(self, role: str, name: str) -> float:
        """Return the sum of a figure over all lives of a role."""
        return sum(life.figures.get(name, 0.0) for life in self.lives.values() if life.role == role)

    def mean(self, role: str, name: str) -> tuple[float, int] | None:
        """Return the mean and the number of observations of a histogram of a role, None where there are none."""
        count = self.figure(role, f"{name}_count")
        return (self.figure(role, f"{name}_sum") / count, int(count)) if count else None

    def lived_s(self, role: str) -> float:
        """Return the seconds that the processes of a role lived, together."""
        return sum(life.seen - life.started for life in self.lives.values() if life.role == role)

    def processes(self, role: str) -> int:
        """Return how many processes of a role there are, or were at the end."""
        newest = max((life.seen for life in self.lives.values()), default=0.0)
        return sum(life.role == role and newest - life.seen < _THERE_S for life in self.lives.values())

    @cached_property
    def lost(self) -> Counter[str]:
        """By role: processes that went untold while the job was up, and were started again."""
        places: dict[str, list[Life]] = {}
        for name, life in self.lives.items():
            place = _PLACE.fullmatch(name)
            places.setdefault(f"{place[1]}-{place[2]}" if place else life.role, []).append(life)
        gone: Counter[str] = Counter()
        for lives in places.values():
            for before, after in pairwise(sorted(lives, key=lambda life: life.started)):
                if before.left:
                    continue
                others = (life for life in self.lives.values() if life is not before and life is not after)
                gone[before.role] += any(_spans(life, before.seen, after.started) for life in others)
        return +gone

    @property
    def rollouts(self) -> int:
        """Rollouts that there are, or were at the end; as many as the manifest asks for where nobody knows."""
        return self.processes("rollout") or self.spec.rollout.replicas


_THERE_S = 6.0
"""Seconds of silence, from the last sign of any process on, after which one counts as gone; the driver waits for 5."""


def _spans(life: Life, begin: float, end: float) -> bool:
    return life.started < begin and life.seen > end


def surviving(lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the steps of the history that survives: a step that was made again takes the place of all from it on."""
    kept: dict[int, Mapping[str, Any]] = {}
    for line in lines:
        for later in [step for step in kept if step >= line["step"]]:
            del kept[later]
        kept[line["step"]] = line
    return [kept[step] for step in sorted(kept)]
