"""The elastic policy: bounded, patient, and quiet where nothing is to be gained."""

import itertools
import random
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.flow.scaling import Elasticity, Recommendation, Shortage, Signals, SignalWindow

HASTY = Elasticity(least=1, most=64, wait_share=0.1, queued_steps=2.0, lag=1.0, stabilization_s=0.0)
POLICY = Elasticity(least=1, most=16, wait_share=0.1, queued_steps=2.0, lag=1.0, stabilization_s=60.0)


FOUR_WERE_TOO_FEW = Shortage(rollouts=4, tried=8, made=400.0, pace=100.0, wait_share=0.5, missing=320.0)


def signals(**changes: float) -> Signals:
    usual = {"rollouts": 4, "ready": 4, "step": 20, "since": 17, "wait_share": 0.04, "busy_share": 1.0}
    usual |= {"slot_share": 1.0, "tokens_per_second": 400.0, "handed_tokens": 0.0, "start_s": 0.0}
    return Signals(**(usual | {"queued_steps": 0.5, "lag": 1.0} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"wait_share": 0.0}, 4),
        ({"wait_share": 0.28}, 5),
        ({"wait_share": 0.5}, 8),
        ({"wait_share": 0.4}, 6),
        ({"wait_share": 1.0}, 8),
        ({"wait_share": 0.5, "queued_steps": 1.0}, 4),
        ({"wait_share": 0.5, "busy_share": 0.1}, 8),
        ({"busy_share": 0.76}, 4),
        ({"busy_share": 0.75}, 3),
        ({"busy_share": 0.2}, 2),
        ({"busy_share": 0.0}, 2),
        ({"busy_share": 0.0, "rollouts": 12, "ready": 12}, 6),
        ({"busy_share": 1.0, "ready": 2}, 2),
        ({"queued_steps": 2.5}, 3),
        ({"queued_steps": 1.5, "lag": 2.0}, 3),
        ({"queued_steps": 0.5, "lag": 2.0}, 4),
        ({"queued_steps": 2.5, "busy_share": 0.5}, 2),
        ({"rollouts": 1, "ready": 1, "queued_steps": 9.0, "busy_share": 0.0}, 1),
        ({"rollouts": 12, "ready": 12, "wait_share": 0.9}, 16),
        ({"rollouts": 40, "ready": 40}, 16),
        ({"slot_share": 0.76}, 4),
        ({"slot_share": 0.75}, 3),
        ({"slot_share": 0.1, "rollouts": 12, "ready": 12}, 7),
        ({"slot_share": 0.1, "rollouts": 2, "ready": 2}, 1),
        ({"slot_share": 0.1, "wait_share": 0.06}, 4),
    ],
)
def test_what_suits(changes: dict[str, float], wanted: int) -> None:
    assert POLICY.wanted(signals(**changes)) == wanted


def test_from_none_at_all_it_starts_with_one_or_two() -> None:
    from_zero = Elasticity(least=0, most=4, wait_share=0.1, queued_steps=2.0, lag=1.0, stabilization_s=0.0)
    nobody = signals(rollouts=0, ready=0, wait_share=1.0)
    assert from_zero.follow(nobody, window=SignalWindow(0, 17), now=0.0)[0] == 2


def test_a_recommendation_is_followed_when_it_has_lasted() -> None:
    starving = signals(wait_share=0.5)
    decided, window = POLICY.follow(starving, window=SignalWindow(4, 17), now=100.0)
    assert (decided, window) == (None, SignalWindow(4, 17, Recommendation("more", 100.0)))
    assert POLICY.follow(starving, window=window, now=159.0) == (None, window)
    assert POLICY.follow(starving, window=window, now=160.0) == (8, SignalWindow(8, 20, shortage=FOUR_WERE_TOO_FEW))


def test_a_recommendation_that_turns_or_ends_starts_again() -> None:
    window = SignalWindow(4, 17, Recommendation("more", 100.0))
    assert POLICY.follow(signals(), window=window, now=150.0) == (4, SignalWindow(4, 17))
    turned = SignalWindow(4, 17, Recommendation("fewer", 500.0))
    assert POLICY.follow(signals(queued_steps=5.0), window=window, now=500.0) == (None, turned)


@pytest.mark.parametrize("before", [None, SignalWindow(3, 17), SignalWindow(4, 21)])
def test_figures_of_another_number_of_rollouts_or_of_an_older_trainer_decide_nothing(
    before: SignalWindow | None,
) -> None:
    assert POLICY.follow(signals(wait_share=0.5), window=before, now=1000.0) == (None, SignalWindow(4, 20))


def test_a_window_begins_when_all_that_were_added_are_there() -> None:
    waits = signals(wait_share=0.5, ready=3)
    assert POLICY.follow(waits, window=SignalWindow(4, 17, Recommendation("more", 0.0)), now=1000.0) == (
        None,
        SignalWindow(4, 20),
    )
    rests = signals(ready=2, busy_share=0.5)
    assert POLICY.follow(rests, window=SignalWindow(4, 17, Recommendation("fewer", 0.0)), now=1000.0)[0] == 2


def test_a_window_of_which_some_steps_are_older_than_the_change_decides_nothing() -> None:
    window = SignalWindow(4, 18, Recommendation("more", 0.0))
    assert POLICY.follow(signals(wait_share=0.5), window=window, now=1000.0) == (None, SignalWindow(4, 18))


def test_what_was_too_few_is_not_tried_again_for_as_many_tokens() -> None:
    starving = signals(wait_share=0.2, rollouts=2, ready=2)
    _, window = HASTY.follow(starving, window=SignalWindow(2, 17), now=0.0)
    assert window.shortage is not None
    assert window.shortage.demand == pytest.approx(500.0)
    free = signals(slot_share=0.2, rollouts=3, ready=3, step=30, since=27, tokens_per_second=490.0)
    rests = HASTY.follow(free, window=SignalWindow(3, 20, shortage=window.shortage), now=0.0)
    assert rests == (3, SignalWindow(3, 20, shortage=window.shortage))
    less = replace(free, tokens_per_second=230.0)
    assert HASTY.follow(less, window=SignalWindow(3, 20, shortage=window.shortage), now=0.0)[0] == 2


@pytest.mark.parametrize(
    ("missing", "rollouts", "made", "wanted"),
    [
        (320.0, 8, 479.0, 4),
        (320.0, 8, 480.0, 15),
        (9000.0, 8, 499.0, 4),
        (9000.0, 8, 500.0, 15),
        (320.0, 6, 479.0, 11),
    ],
)
def test_those_that_make_less_than_a_quarter_of_what_was_hoped_for_are_given_back(
    missing: float, rollouts: int, made: float, wanted: int
) -> None:
    """Four made 400 tokens a second, so that eight could make 400 more; six are not those that were tried."""
    waits = signals(rollouts=rollouts, ready=rollouts, wait_share=0.5, tokens_per_second=made)
    assert HASTY.wanted(waits, shortage=replace(FOUR_WERE_TOO_FEW, missing=missing)) == wanted


def test_who_makes_nothing_is_drained_without_waiting_for_what_it_could_make() -> None:
    nothing = signals(busy_share=0.0, tokens_per_second=0.0, handed_tokens=1000.0, start_s=30.0)
    assert HASTY.follow(nothing, window=SignalWindow(4, 17), now=0.0)[0] == 2


def test_what_a_drain_costs_is_saved_before_it_is_paid() -> None:
    """A rollout makes 100 tokens a second: 30 s of start and 1,000 tokens to compute again are 40 s of it."""
    idle = signals(busy_share=0.5, tokens_per_second=200.0, handed_tokens=1000.0, start_s=30.0)
    decided, window = HASTY.follow(idle, window=SignalWindow(4, 17), now=100.0)
    assert (decided, window.recommended) == (None, Recommendation("fewer", 100.0))
    assert HASTY.follow(idle, window=window, now=139.9)[0] is None
    assert HASTY.follow(idle, window=window, now=140.0)[0] == 2
    starving = signals(wait_share=0.5, handed_tokens=1000.0, start_s=30.0)
    assert HASTY.follow(starving, window=SignalWindow(4, 17), now=0.0)[0] == 8, "to add one costs no drain"


class Run:
    """A run with the default schedule: D_k is generated while D_{k-1} is trained, so that a step takes as long as the
    slower of the two. Nothing piles up: no more is generated than the next step takes.

    train_s: seconds to train a step; need: rollouts that generate one in just that time; tail_s: seconds of generation
    that no further rollout shortens; noise: by how much both vary from step to step; start_s: until a new one is ready.
    """

    def __init__(
        self,
        policy: Elasticity,
        *,
        train_s: float,
        need: float,
        rollouts: int,
        tail_s: float = 0.0,
        noise: float = 0.0,
        start_s: float = 0.0,
    ) -> None:
        self.policy, self.train_s, self.need, self.rollouts = policy, train_s, need, rollouts
        self.tail_s, self.noise, self.start_s = tail_s, noise, start_s
        self.now = 0.0
        self.step = 0
        self.window: SignalWindow | None = None
        self.laps: deque[tuple[int, float, float, float]] = deque(maxlen=3)
        self.joins: list[float] = []
        self.had = [rollouts]
        self.rng = random.Random(1)

    def one_step(self) -> None:
        self.joins = [at for at in self.joins if at > self.now]
        generating = self.rollouts - len(self.joins)
        vary = 1 + self.noise * (2 * self.rng.random() - 1)
        train_s = self.train_s * vary
        generate_s = self.train_s * self.need / max(generating, 0.1) + self.tail_s
        wall_s = max(train_s, generate_s)
        self.laps.append((self.step, (wall_s - train_s) / wall_s, generate_s / wall_s, wall_s))
        self.step += 1
        self.now += wall_s

    def look(self) -> None:
        if len(self.laps) < 3:
            return
        seen = Signals(
            rollouts=self.rollouts,
            ready=self.rollouts - len([at for at in self.joins if at > self.now]),
            step=self.step,
            since=self.laps[0][0],
            wait_share=min(wait for _, wait, *_ in self.laps),
            busy_share=max(busy for _, _, busy, _ in self.laps),
            slot_share=1.0,
            tokens_per_second=3000.0 / sum(wall_s for *_, wall_s in self.laps),
            handed_tokens=0.0,
            start_s=0.0,
            queued_steps=0.0,
            lag=1.0,
        )
        decided, self.window = self.policy.follow(seen, window=self.window, now=self.now)
        if decided is not None and decided != self.rollouts:
            self.joins += [self.now + self.start_s] * (decided - self.rollouts)
            self.rollouts = decided
            self.had.append(decided)

    def go(self, steps: int, *, looks: int = 3) -> list[int]:
        """Make steps, looking several times a step; give the numbers of rollouts that there were."""
        for _ in range(steps):
            self.one_step()
            for _ in range(looks):
                self.look()
        return self.had


@pytest.mark.parametrize("train_s", [1.0, 20.0, 600.0])
@pytest.mark.parametrize("start_s", [0.0, 300.0])
def test_it_finds_what_is_needed_and_no_more_and_gives_back_what_is_not(train_s: float, start_s: float) -> None:
    for policy in (HASTY, replace(HASTY, stabilization_s=60.0)):
        run = Run(policy, train_s=train_s, need=6, rollouts=2, start_s=start_s)
        patient = 400 if train_s < 20 else 60
        grown = list(run.go(patient))
        assert grown[-1] == 6
        assert max(grown) <= 8
        run.need, run.had = 2, [6]
        began = run.step
        while run.rollouts > 2 and run.step < began + 5 * 3 + policy.stabilization_s * 3:
            run.go(1)
        assert run.rollouts == 2
        assert run.step - began <= 5 * 3 + 3 * policy.stabilization_s / train_s
        assert run.go(200)[-1] == min(run.had) == 2, "it stays there"


@pytest.mark.parametrize("start", [1, 2, 5, 16, 40])
@pytest.mark.parametrize("need", [1.0, 1.5, 2.3, 6.0, 7.9, 20.0])
@pytest.mark.parametrize("tail", [0.0, 0.3, 0.9])
def test_it_never_goes_to_and_fro(start: int, need: float, tail: float) -> None:
    """Nor where figures vary, and a part of the generation takes its time however many rollouts there are."""
    run = Run(HASTY, train_s=30.0, need=need, rollouts=start, tail_s=30.0 * tail, noise=0.03)
    early = list(run.go(120))
    had = run.go(200)
    grows = [after > before for before, after in itertools.pairwise(had)]
    assert sum(this != following for this, following in itertools.pairwise(grows)) <= 1, had
    if tail == 0.0:
        assert had == early, "it rests"
        assert need * 0.9 <= had[-1] <= need * 1.1 + 1


figures = st.builds(
    Signals,
    rollouts=st.integers(0, 40),
    ready=st.integers(0, 40),
    step=st.integers(0, 100),
    since=st.integers(0, 100),
    wait_share=st.floats(0, 1),
    busy_share=st.floats(0, 1),
    slot_share=st.floats(0, 1),
    tokens_per_second=st.floats(0, 1e6),
    handed_tokens=st.floats(0, 1e6),
    start_s=st.floats(0, 100),
    queued_steps=st.floats(0, 100),
    lag=st.floats(0, 10),
)


@given(
    least=st.integers(0, 8),
    more=st.integers(0, 20),
    stabilization_s=st.floats(0, 100),
    seen=st.lists(st.tuples(st.floats(0, 50), st.integers(0, 4), figures), max_size=40),
)
def test_bounds_patience_and_pace_hold_whatever_is_seen(
    least: int, more: int, stabilization_s: float, seen: list[tuple[float, int, Signals]]
) -> None:
    policy = Elasticity(
        least=least, most=least + more, wait_share=0.1, queued_steps=2.0, lag=1.0, stabilization_s=stabilization_s
    )
    now, step, rollouts, window, moved_at = 0.0, 0, least, None, 0
    for passed, steps, each in seen:
        now, step = now + passed, step + steps
        before = window
        decided, window = policy.follow(
            Signals(
                rollouts=rollouts,
                ready=each.ready,
                step=step,
                since=max(0, step - 3),
                wait_share=each.wait_share,
                busy_share=each.busy_share,
                slot_share=each.slot_share,
                tokens_per_second=each.tokens_per_second,
                handed_tokens=each.handed_tokens,
                start_s=each.start_s,
                queued_steps=each.queued_steps,
                lag=each.lag,
            ),
            window=window,
            now=now,
        )
        if decided is None or decided == rollouts:
            continue
        assert before is not None
        assert stabilization_s == 0 or (
            before.recommended is not None and now - before.recommended.since >= stabilization_s
        )
        assert step - 3 >= moved_at or step < 3, "figures of steps before the last change"
        assert -(-rollouts // 2) <= decided <= max(2 * rollouts, 2)
        assert policy.least <= decided <= policy.most
        rollouts, moved_at = decided, step
