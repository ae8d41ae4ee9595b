"""Permits of a staggered update: the policy alone, and in a small simulation of instances and a trainer."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.flow.stagger import FollowerFleet, Permits, Supply


def supply(*rates: float, need: float | None = 1.0, ready: int = 0, version_s: float | None = None) -> Supply:
    return Supply(rates={f"r{i}": rate for i, rate in enumerate(rates)}, need=need, ready=ready, version_s=version_s)


def asked(*versions: int, most: int | None = None, permit_s: float | None = 1.0) -> Permits:
    """Permits for which r0, r1, ... wait with these versions; one permit of ``permit_s`` seconds is over."""
    permits = Permits(most=most)
    if permit_s is not None:
        permits.ask("before", version=0, now=-permit_s)
        assert permits.grant(supply(1.0), now=-permit_s) == ["before"]
        permits.end("before", now=0.0)
    for index, version in enumerate(versions):
        permits.ask(f"r{index}", version=version, now=0.0)
    return permits


def test_as_many_as_the_others_can_stand_in_for_and_the_oldest_version_first() -> None:
    assert asked(3, 1, 2, 1).grant(supply(1, 1, 1, 1, need=2.0), now=1.0) == ["r1", "r3"]
    assert asked(1, 1, 1, 1).grant(supply(1, 1, 1, 1, need=3.5), now=1.0) == ["r0"], "one always may"
    assert asked(1, 1, 1, 1).grant(supply(1, 1, 1, 1, need=0.0), now=1.0) == ["r0", "r1", "r2", "r3"]


def test_samples_that_lie_ready_bridge_the_gap() -> None:
    assert asked(1, 1, 1, 1).grant(supply(1, 1, 1, 1, need=4.0, ready=3), now=1.0) == ["r0", "r1", "r2"]
    slow = asked(1, 1, 1, 1, permit_s=2.0)
    assert slow.grant(supply(1, 1, 1, 1, need=4.0, ready=4), now=1.0) == ["r0", "r1"]


def test_all_have_had_their_permit_when_the_next_version_comes() -> None:
    nobody_to_spare = supply(*[1.0] * 8, need=100.0, version_s=4.0)
    assert len(asked(*[1] * 8).grant(nobody_to_spare, now=1.0)) == 2
    assert len(asked(*[1] * 8, permit_s=2.0).grant(nobody_to_spare, now=1.0)) == 4
    assert supply(1.0, version_s=0.0).least(1.0) == 1, "two publications at once say nothing"


def test_one_at_a_time_while_it_is_unknown_how_long_a_permit_takes_or_what_training_needs() -> None:
    for version_s in (None, 4.0):
        unknown = asked(1, 1, permit_s=None)
        assert unknown.grant(supply(1, 1, need=0.0, version_s=version_s), now=1.0) == ["r0"]
    assert asked(1, 1).grant(supply(1, 1, need=None, ready=99), now=1.0) == ["r0"]


def test_never_more_than_the_manifest_allows() -> None:
    assert asked(1, 1, 1, most=2).grant(supply(1, 1, 1, need=0.0), now=1.0) == ["r0", "r1"]


def test_who_asks_again_is_told_the_same_and_who_is_gone_keeps_nobody_waiting() -> None:
    permits, little = asked(1, 1, 1), supply(1, 1, 1, need=3.0)
    assert permits.grant(little, now=1.0) == ["r0"]
    assert permits.grant(little, now=1.1) == []
    permits.ask("r0", version=1, now=1.2)
    assert permits.grant(little, now=1.2) == ["r0"]
    permits.leave("r0")
    assert permits.grant(little, now=1.3) == ["r1"]
    permits.withdraw("r2")
    permits.end("r1", now=1.4)
    assert permits.grant(little, now=1.5) == []
    assert permits.granted == frozenset()


def test_a_permit_whose_end_was_not_heard_is_over_when_its_holder_asks_with_other_weights() -> None:
    nobody_to_spare = supply(*[1.0] * 8, need=100.0, version_s=4.0)
    permits = asked(1, *[2] * 7)
    assert permits.grant(nobody_to_spare, now=1.0) == ["r0", "r1"]
    permits.ask("r0", version=3, now=1000.0)
    assert permits.granted == {"r1"}
    permits.end("r1", now=2.0)
    assert permits.grant(nobody_to_spare, now=1000.0) == ["r2", "r3"], "it waits as the others do"
    for name in ("r2", "r3", "r4", "r5", "r6", "r7"):
        permits.end(name, now=1001.0)
        permits.grant(nobody_to_spare, now=1000.0)
    assert permits.granted == {"r0"}
    permits.end("r0", now=1001.0)
    for index in range(8):
        permits.ask(f"r{index}", version=4, now=1002.0)
    assert len(permits.grant(nobody_to_spare, now=1002.0)) == 2, "nobody's permit took 999 seconds"


def test_a_permit_that_does_not_end_is_not_waited_for() -> None:
    permits, little = asked(1, 1), supply(1, 1, need=2.0)
    assert permits.grant(little, now=1.0) == ["r0"]
    assert permits.grant(little, now=50.0) == []
    assert permits.grant(little, now=62.0) == ["r1"]


def test_it_may_take_three_times_as_long_as_the_last_ones_did() -> None:
    permits, little = asked(1, 1, permit_s=100.0), supply(1, 1, need=2.0)
    assert permits.grant(little, now=0.0) == ["r0"]
    permits.end("r0", now=200.0)
    permits.ask("r0", version=2, now=200.0)
    assert permits.grant(little, now=200.0) == ["r1"]
    mean_s = 100.0 + 0.3 * (200.0 - 100.0)
    assert permits.grant(little, now=200.0 + 3 * mean_s - 1) == []
    assert permits.grant(little, now=200.0 + 3 * mean_s + 1) == ["r0"]


@given(
    rates=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=12),
    need=st.none() | st.floats(0.0, 100.0),
    ready=st.integers(0, 100),
    version_s=st.none() | st.floats(0.1, 100.0),
    permit_s=st.floats(0.1, 10.0),
    most=st.none() | st.integers(1, 12),
)
def test_what_is_granted_is_supplied_or_is_the_least(
    rates: list[float],
    need: float | None,
    ready: int,
    version_s: float | None,
    permit_s: float,
    most: int | None,
) -> None:
    known = supply(*rates, need=need, ready=ready, version_s=version_s)
    permits = asked(*range(len(rates)), most=most, permit_s=permit_s)
    granted = permits.grant(known, now=0.0)
    assert 1 <= len(granted) <= min(len(rates), most or len(rates))
    assert granted == [f"r{i}" for i in range(len(granted))]
    assert len(granted) <= known.least(permit_s) or known.suffices(set(granted), permit_s=permit_s)
    again = permits.grant(known, now=0.0)
    assert again == [], "all that may is granted at once"


class Rollouts:
    """Instances that make samples, and a trainer that takes them in their order, in ticks of 10 ms.

    An instance whose permit it is makes nothing for ``permit_s`` seconds. A version is published after each ``batch``
    samples that are trained, and staged everywhere ``transfer_s`` later. As in a job, so many samples are begun as one
    step has and ``threshold`` of it more, beyond those of the newest version, and D_k by θ_{k-2} or a newer one.
    """

    TICK_S = 0.01

    def __init__(
        self,
        permits: Permits,
        *,
        instances: int,
        rate: float,
        need: float,
        batch: int,
        permit_s: float,
        transfer_s: float,
        threshold: float,
    ) -> None:
        spread = random.Random(instances)
        self.rates = {f"r{i}": rate / instances * spread.uniform(0.8, 1.2) for i in range(instances)}
        self.need, self.batch, self.permit_s = need, batch, permit_s
        self.transfer_s, self.threshold = transfer_s, threshold
        self.permits = permits
        self.version = dict.fromkeys(self.rates, 0)
        self.credit = dict.fromkeys(self.rates, 0.0)
        self.back_at: dict[str, float] = {}
        self.staged_at = [0.0]
        self.made: list[int] = []
        self.lags: list[int] = []
        self.starved_s = self.now = self.demand = 0.0
        self.version_s: float | None = None

    def tick(self) -> None:
        self.now += self.TICK_S
        staged = max(version for version, at in enumerate(self.staged_at) if at <= self.now)
        for name in [name for name, at in self.back_at.items() if at <= self.now]:
            del self.back_at[name]
            self.version[name] = staged
            self.permits.end(name, now=self.now)
        for name, version in self.version.items():
            if version < staged and name not in self.back_at:
                self.permits.ask(name, version=version, now=self.now)
        ready = len(self.made) - len(self.lags)
        known = Supply(rates=self.rates, need=self.need, ready=ready, version_s=self.version_s)
        self.back_at |= dict.fromkeys(self.permits.grant(known, now=self.now), self.now + self.permit_s)
        self.generate()
        self.train()

    def generate(self) -> None:
        for name in self.rates.keys() - self.back_at.keys():
            self.credit[name] = min(1.0, self.credit[name] + self.rates[name] * self.TICK_S)
            step = len(self.made) // self.batch + 1
            admitted = len(self.made) < (len(self.staged_at) + self.threshold) * self.batch
            if self.credit[name] >= 1.0 and admitted and self.version[name] >= step - 2:
                self.made.append(self.version[name])
                self.credit[name] = 0.0

    def train(self) -> None:
        self.demand = min(1.0, self.demand + self.need * self.TICK_S)
        if self.demand < 1.0:
            return
        if len(self.lags) == len(self.made):
            self.starved_s += self.TICK_S
            return
        self.demand = 0.0
        done = len(self.lags) // self.batch
        self.lags.append(done - self.made[len(self.lags)])
        if len(self.lags) % self.batch == 0:
            staged_at = self.now + self.transfer_s
            self.version_s = staged_at - self.staged_at[-1] if done else None
            self.staged_at.append(staged_at)


class AllAtOnce(Permits):
    """The control: whoever asks has its permit."""

    def grant(self, supply: Supply, *, now: float) -> list[str]:
        return super().grant(replace(supply, need=0.0), now=now)


def starved(permits: Permits, *, instances: int) -> tuple[float, float]:
    """Return the share of its time for which the trainer starved, and the mean lag after the first two steps."""
    rollouts = Rollouts(
        permits, instances=instances, rate=20.0, need=10.0, batch=100, permit_s=3.0, transfer_s=1.0, threshold=0.1
    )
    while len(rollouts.staged_at) <= 12:
        rollouts.tick()
    steady = rollouts.lags[200:]
    assert set(steady) <= {0, 1}
    return rollouts.starved_s / rollouts.now, sum(steady) / len(steady)


@pytest.mark.parametrize("instances", [3, 8])
def test_the_trainer_does_not_starve_as_it_does_when_all_change_at_once(instances: int) -> None:
    share, lag = starved(Permits(), instances=instances)
    assert share < 0.002
    assert lag < 0.6
    assert starved(AllAtOnce(), instances=instances)[0] > 5 * share


FLEET_EVENTS = st.tuples(st.sampled_from(["ask", "withdraw", "end", "leave"]), st.integers(0, 7), st.floats(0, 90))


@given(st.lists(FLEET_EVENTS, max_size=60), st.none() | st.integers(1, 9))
def test_a_fleet_is_never_out_as_a_whole_however_long_permits_are_held(events, stagger) -> None:
    permits, known, now = Permits(), set(), 0.0
    for event, index, later in events:
        name, now = f"f{index}", now + later
        if event == "ask":
            known.add(name)
            permits.ask(name, version=0, now=now)
        elif event == "withdraw":
            permits.withdraw(name)
        elif event == "end":
            permits.end(name, now=now)
        else:
            permits.leave(name)
            known.discard(name)
        out = permits.granted
        granted = permits.grant(FollowerFleet(size=len(known), stagger=stagger), now=now)
        assert permits.granted == out or len(permits.granted) <= max(1, len(known) - 1)
        assert set(granted) <= permits.granted <= known


def test_of_a_fleet_a_quarter_changes_at_once_unless_it_is_said_otherwise() -> None:
    for size, out in ((2, 1), (4, 1), (5, 2), (8, 2)):
        assert asked(*[1] * size).grant(FollowerFleet(size=size), now=1.0) == [f"r{index}" for index in range(out)]
    assert asked(*[1] * 8).grant(FollowerFleet(size=8, stagger=5), now=1.0) == [f"r{index}" for index in range(5)]
    assert asked(1, 1, 1).grant(FollowerFleet(size=3, stagger=9), now=1.0) == ["r0", "r1"]
    assert asked(1).grant(FollowerFleet(size=1, stagger=9), now=1.0) == ["r0"]


def test_those_that_nobody_answers_take_turns_of_as_many_as_with_permits() -> None:
    permits, fleet = asked(*[1] * 8), FollowerFleet(size=8)
    turns = [permits.alone_s(rank, fleet) for rank in range(8)]
    assert turns == [120.0, 120.0, 180.0, 180.0, 240.0, 240.0, 300.0, 300.0]
