"""A model of verl's fully asynchronous runs in virtual time: the admission of ``flow``, engines that share, a trainer.

Invariant: prompts are admitted by the rules that the driver uses, the same objects; a run is a function of its
arguments. Lengths are of the same distribution as those of ``rollout/engines/simulated``, not the same numbers.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncflow.flow.admission import Admission, InFlight, admit


@dataclass(frozen=True, kw_only=True)
class Engines:
    """The rollouts: ``replicas`` of ``slots``; for the rest see ``SimulatedOptions``. most: tokens of a response."""

    replicas: int
    slots: int
    tokens: float
    sigma: float
    rho: float
    token_s: float
    share_s: float
    recompute_s: float
    most: int


@dataclass(frozen=True, kw_only=True)
class Training:
    """The trainer: ``steps`` of ``prompts`` groups of ``size``, ``step_s`` each, published each ``sync_every`` steps.

    completion: a step is made of the groups that are complete first, else of those that were put out for it.
    """

    steps: int
    prompts: int
    size: int
    step_s: float
    sync_every: int
    completion: bool


class Cycle(NamedTuple):
    """Mean seconds from publication to publication, and those in which the trainer waited."""

    seconds: float
    waited: float


@dataclass
class _Replica:
    """One engine: its clock in tokens, up to ``at``; running: (end, begin, group), by end. stamp: of its next end."""

    engines: Engines
    clock: float = 0.0
    at: float = 0.0
    running: list[tuple[float, float, int]] = field(default_factory=list)
    stamp: int = 0

    @property
    def token_s(self) -> float:
        return self.engines.token_s + self.engines.share_s * max(0, len(self.running) - 1)

    @property
    def next_end(self) -> float:
        return self.at + max(0.0, self.running[0][0] - self.clock) * self.token_s

    def advance(self, now: float) -> None:
        if now > self.at:
            self.clock += (now - self.at) / self.token_s
            self.at = now

    def begin(self, tokens: int, group: int) -> None:
        heapq.heappush(self.running, (self.clock + tokens, self.clock, group))

    def ended(self) -> Iterator[int]:
        while self.running and self.running[0][0] <= self.clock + 1e-6:
            yield heapq.heappop(self.running)[2]

    def recompute(self) -> None:
        """Stand still while the caches of all that runs are computed under new weights."""
        self.at += self.engines.recompute_s * sum(self.clock - begin for _, begin, _ in self.running)


class _Run:
    def __init__(self, engines: Engines, training: Training, policies: list[Admission], *, seed: int) -> None:
        self.engines, self.training, self.policies, self.seed = engines, training, policies, seed
        self.now, self.published, self.dispatched = 0.0, 0, 0
        self.replicas = [_Replica(engines) for _ in range(engines.replicas)]
        self.left: dict[int, int] = {}
        self.waiting: list[tuple[int, int]] = []
        self.complete = [0] * training.steps
        self.finished = 0
        self.events: list[tuple[float, int, int]] = []
        self.step, self.idle_since, self.waited = 0, 0.0, 0.0
        self.ends: float | None = None
        self.cycles: list[tuple[float, float]] = []

    def lengths(self, group: int) -> Iterator[int]:
        engines, draw = self.engines, random.Random(f"{self.seed}.{group}")
        common = math.sqrt(engines.rho) * draw.gauss(0, 1)
        for _ in range(self.training.size):
            normal = common + math.sqrt(1 - engines.rho) * draw.gauss(0, 1)
            yield max(1, min(engines.most, round(engines.tokens * math.exp(engines.sigma * normal))))

    def dispatch(self) -> None:
        flow = InFlight(published=self.published, dispatched=self.dispatched, running=len(self.left))
        left = self.training.steps * self.training.prompts - self.dispatched
        for _ in range(min(left, admit(self.policies, flow))):
            self.left[self.dispatched] = self.training.size
            self.waiting += [(tokens, self.dispatched) for tokens in self.lengths(self.dispatched)]
            self.dispatched += 1

    def begin_rows(self) -> None:
        """Begin what waits, in order, on the engines that have least to do."""
        free = [(len(each.running), index) for index, each in enumerate(self.replicas)]
        heapq.heapify(free)
        count, begun = 0, set()
        while count < len(self.waiting) and free[0][0] < self.engines.slots:
            running, index = free[0]
            replica = self.replicas[index]
            replica.advance(self.now)
            replica.begin(*self.waiting[count])
            heapq.heapreplace(free, (running + 1, index))
            count += 1
            begun.add(index)
        del self.waiting[:count]
        for index in begun:
            self.look_at(index)

    def look_at(self, index: int) -> None:
        replica = self.replicas[index]
        replica.stamp += 1
        if replica.running:
            heapq.heappush(self.events, (replica.next_end, index, replica.stamp))

    def train(self) -> None:
        """Begin the next step where its groups are there."""
        made, prompts = self.training, self.training.prompts
        if self.ends is not None or self.step == made.steps:
            return
        ready = self.finished >= (self.step + 1) * prompts if made.completion else self.complete[self.step] == prompts
        if ready:
            self.waited += self.now - self.idle_since
            self.ends = self.now + made.step_s

    def trained(self) -> None:
        self.step += 1
        self.ends, self.idle_since = None, self.now
        if self.step % self.training.sync_every == 0:
            self.published = self.step
            self.cycles.append((self.now, self.waited))
            for index, replica in enumerate(self.replicas):
                replica.advance(self.now)
                replica.recompute()
                self.look_at(index)

    def ended(self, index: int) -> None:
        replica = self.replicas[index]
        replica.advance(self.now)
        for group in replica.ended():
            self.left[group] -= 1
            if not self.left[group]:
                del self.left[group]
                self.finished += 1
                self.complete[group // self.training.prompts] += 1
        self.look_at(index)

    def run(self) -> None:
        while self.step < self.training.steps:
            self.dispatch()
            if self.waiting:
                self.begin_rows()
            self.train()
            while self.events and self.events[0][2] != self.replicas[self.events[0][1]].stamp:
                heapq.heappop(self.events)
            if self.ends is not None and (not self.events or self.ends <= self.events[0][0]):
                self.now = self.ends
                self.trained()
            else:
                self.now, index, _ = heapq.heappop(self.events)
                self.ended(index)


def simulate(
    engines: Engines, training: Training, policies: list[Admission], *, seed: int = 0, without: int = 2
) -> Cycle:
    """Run to the end; the first ``without`` cycles do not count, nor does the last, which no other overlaps."""
    run = _Run(engines, training, policies, seed=seed)
    run.run()
    (began, before), (ended, waited) = run.cycles[without - 1], run.cycles[-2]
    count = len(run.cycles) - 1 - without
    return Cycle((ended - began) / count, (waited - before) / count)
