"""The elastic policy, driven by what a simulated run tells the driver: it converges, shrinks and rests.

The objects are those of the driver (``DesiredRollouts``, which drives ``flow.scaling.Elasticity``); simulated are the
trainer, the rollouts and the samples on their way, whose lengths are lognormal, keyed by a seed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncflow.api.job import RLJob
from asyncflow.api.status import RolloutState
from asyncflow.driver.elastic import DesiredRollouts
from asyncflow.driver.lives import LAPS, Lives

TICK_S = 1.0
SAMPLES = 128
"""Of one step."""
PROMPT, RESPONSE = 100, 400
"""Tokens of a prompt; median of those of a response."""
SIGMA = 0.5
"""Of their logarithm."""
SLOTS = 16
PACE = 40.0
"""Tokens a second of one sequence."""
START_S = 30.0


def job(ahead: int) -> RLJob:
    """A job that streams, with ``ahead`` steps of samples on their way beside the one that is trained."""
    return RLJob.model_validate(
        {
            "metadata": {"name": "simulated"},
            "spec": {
                "model": {"source": "tiny://reverse-digits"},
                "data": {"train": {"source": "tiny://reverse-digits"}},
                "reward": {"function": "task"},
                "algorithm": {"steps": 10, "promptsPerStep": SAMPLES // 8, "groupSize": 8},
                "sampling": {"maxTokens": 4096},
                "schedule": {"mode": "async", "swapAt": "token", "maxStaleness": ahead, "stalenessThreshold": ahead},
                "rollout": {"engine": {"slots": SLOTS}, "minReplicas": 0, "maxReplicas": 64},
                "elasticity": {"enabled": True, "stabilizationSeconds": 0},
            },
        }
    )


@dataclass
class Member:
    """A rollout. ready: when it generates; left: tokens of each of its sequences still to be made."""

    name: str
    started: float
    ready: float
    left: list[float] = field(default_factory=list)
    held_s: float = 0.0
    tokens: float = 0.0


class Run:
    """A run whose trainer takes ``train_s`` seconds a step once its samples are there.

    most: tokens a second of a whole rollout, however many sequences run. Samples are dispatched while
    fewer than ``ahead`` + 1 steps of them are out and not yet trained. What a rollout that leaves has begun goes on
    elsewhere, behind a prefix that takes a second to compute.
    """

    def __init__(self, *, train_s: float, most: float = 1e9, ahead: int = 1, rollouts: int, seed: int) -> None:
        self.train_s, self.most, self.ahead = train_s, most, ahead
        self.lives = Lives(opened=0.0)
        self.elastic = DesiredRollouts(job(ahead).spec, lives=self.lives)
        self.lengths = np.random.default_rng(seed)
        self.now = 0.0
        self.steps = 0
        self.names = itertools.count()
        self.members = [self.member(ready=0.0) for _ in range(rollouts)]
        self.handed_on: list[float] = []
        self.out = self.finished = 0
        self.training_until: float | None = None
        self.last_step_at = 0.0
        self.waited_s = 0.0
        self.had: list[tuple[int, int]] = [(0, rollouts)]

    def member(self, *, ready: float) -> Member:
        return Member(f"rollout-{next(self.names)}", self.now, ready)

    def go(self, steps: int) -> None:
        """Make so many steps."""
        until = self.steps + steps
        while self.steps < until:
            self.tick()

    def tick(self) -> None:
        for member in self.members:
            if member.ready <= self.now:
                self.fill(member)
                self.generate(member)
        self.train()
        self.now += TICK_S
        self.look()

    def fill(self, member: Member) -> None:
        while len(member.left) < SLOTS and (self.handed_on or self.out < SAMPLES * (self.ahead + 1)):
            if self.handed_on:
                member.left.append(self.handed_on.pop() + PACE)
            else:
                self.out += 1
                member.left.append(float(RESPONSE * self.lengths.lognormal(0.0, SIGMA)))

    def generate(self, member: Member) -> None:
        if not member.left:
            return
        made = TICK_S * min(PACE, self.most / len(member.left))
        member.held_s += TICK_S
        member.tokens += made * len(member.left)
        member.left = [left - made for left in member.left]
        self.finished += sum(left <= 0 for left in member.left)
        member.left = [left for left in member.left if left > 0]

    def train(self) -> None:
        if self.training_until is None:
            if self.finished < SAMPLES:
                self.waited_s += TICK_S
                return
            self.finished -= SAMPLES
            self.training_until = self.now + self.train_s
        elif self.training_until <= self.now:
            self.training_until = None
            self.out -= SAMPLES
            self.stepped()

    def stepped(self) -> None:
        self.steps += 1
        for member in self.members:
            self.lives.observe(
                member.name,
                role="rollout",
                started=member.started,
                now=self.now,
                busy_s=member.held_s,
                held_s=member.held_s if member.ready <= self.now else None,
                tokens=int(member.tokens),
            )
        self.elastic.step(
            {
                "step": self.steps,
                "attempt": 0,
                "wall_s": self.now - self.last_step_at,
                "wait_s": self.waited_s,
                "samples": SAMPLES,
                "tokens": SAMPLES * (PROMPT + RESPONSE),
            }
        )
        self.last_step_at, self.waited_s = self.now, 0.0

    def look(self) -> None:
        ready = [member for member in self.members if member.ready <= self.now]
        states = [
            RolloutState(id=each.name, state="ready" if each.ready <= self.now else "starting") for each in self.members
        ]
        self.elastic.update(
            states,
            running=sum(len(each.left) for each in ready),
            slots=SLOTS * len(ready),
            queued=self.finished,
            step=self.steps,
            lag=1.0,
            now=self.now,
        )
        wanted = self.elastic.desired
        if wanted is None or wanted == len(self.members):
            return
        self.had.append((self.steps, wanted))
        while len(self.members) > wanted:
            self.handed_on += self.members.pop().left
        while len(self.members) < wanted:
            self.members.append(self.member(ready=self.now + START_S))


def enough(train_s: float, *, most: float = 1e9) -> float:
    """The rollouts that make a step's samples while the trainer trains a step."""
    mean = RESPONSE * float(np.exp(SIGMA**2 / 2))
    return SAMPLES * mean / (train_s * min(most, SLOTS * PACE))


def turns(had: list[int]) -> int:
    """Return how often the number went the other way."""
    grows = [after > before for before, after in itertools.pairwise(had)]
    return sum(this != following for this, following in itertools.pairwise(grows))


@pytest.mark.parametrize(
    ("ahead", "most", "seed"),
    [(2, 1e9, 0), (3, 1e9, 1), (2, 160.0, 0), (3, 160.0, 2)],
    ids=["slots", "slots, far ahead", "engine", "engine, far ahead"],
)
def test_six_are_found_and_two_when_the_need_falls(ahead: int, most: float, seed: int) -> None:
    """The bar: never more than 8; then 2 within 5 windows; no oscillation. What limits a rollout are its slots, or what
    its engine computes however many sequences run.
    """
    train_s = 15.5 * min(most, SLOTS * PACE) ** -1 * SLOTS * PACE
    assert 5.5 < enough(train_s, most=most) < 6
    run = Run(train_s=train_s, most=most, ahead=ahead, rollouts=1, seed=seed)
    run.go(50)
    grown = [number for _, number in run.had]
    assert grown == sorted(grown), grown
    assert grown[-1] == 6
    run.train_s *= 3.25
    assert 1.5 < enough(run.train_s, most=most) < 2
    fallen_at = run.steps
    run.go(5 * LAPS)
    shrunk = [number for at, number in run.had if at >= fallen_at]
    assert shrunk == sorted(shrunk, reverse=True), shrunk
    assert shrunk[-1] == 2, run.had
    run.go(30)
    assert run.had[-1][1] == 2, run.had


def test_the_last_rollout_stays_where_none_might_be_left() -> None:
    """Samples pile up, and without a rollout no step would follow from which more could be decided."""
    run = Run(train_s=15.5 * enough(15.5) / 0.2, ahead=4, rollouts=1, seed=0)
    run.go(12)
    assert run.had == [(0, 1)]


@pytest.mark.parametrize(("replicas", "ever", "wanted"), [(0, False, 1), (0, True, None), (1, False, None)])
def test_a_job_that_begins_without_rollouts_asks_for_one(replicas: int, ever: bool, wanted: int | None) -> None:
    """A driver that restarts knows that there were some, and leaves their number as it is."""
    spec, lives = job(1).spec, Lives(opened=0.0)
    spec = spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"replicas": replicas})})
    if ever:
        for now in (1.0, 2.0):
            lives.observe("rollout-0", role="rollout", started=0.0, now=now, busy_s=0.0, held_s=0.0, tokens=0)
    elastic = DesiredRollouts(spec, lives=lives)
    elastic.update([], running=0, slots=0, queued=0, step=0, lag=0.0, now=3.0)
    assert elastic.desired == wanted


def test_rollouts_that_make_no_more_tokens_are_given_back() -> None:
    """So few samples may be on their way that the trainer waits however many rollouts there are."""
    run = Run(train_s=15.5, ahead=1, rollouts=4, seed=1)
    run.go(100)
    had = [number for _, number in run.had]
    assert max(had) <= 12, had
    assert run.elastic.recent is not None
    assert run.elastic.recent.wait_share > 0.1
    assert turns(had[1:]) <= 1, had


@settings(max_examples=8, deadline=None, derandomize=True)
@given(need=st.floats(0.7, 12.0), begins=st.integers(1, 12), seed=st.integers(0, 99))
@example(need=3.95, begins=12, seed=0)
def test_it_rests_near_what_is_needed(need: float, begins: int, seed: int) -> None:
    run = Run(train_s=15.5 * enough(15.5) / need, ahead=3, rollouts=begins, seed=seed)
    run.go(45)
    late = [number for at, number in run.had if at > 30] or [run.had[-1][1]]
    assert turns([number for _, number in run.had]) <= 2, run.had
    assert all(0.78 * need <= number <= 1.3 * need + 1 for number in late), (need, run.had)
