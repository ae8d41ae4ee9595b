"""Numbers that must not depend on how a step was cut: meter, tally, learning rate, micro-batches."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from count_work import bytecodes
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.errors import ProtocolError
from asyncflow.identity import SampleKey, Version
from asyncflow.rpc.columns import Jagged
from asyncflow.training.batch import MicroBatch
from asyncflow.training.counting import CountingOptions
from asyncflow.training.report import Histogram, StepMeter, StepTally, describe
from asyncflow.training.settings import OptimizerSettings


def batch(versions: list[list[int]], first: int = 0) -> MicroBatch:
    rows = [np.array([Version(1, step).packed for step in row], dtype=np.int64) for row in versions]
    lengths = [len(row) for row in rows]
    return MicroBatch(
        keys=[SampleKey(first + i // 2, i % 2) for i in range(len(rows))],
        prompts=Jagged.from_rows([np.ones(3)] * len(rows), "int32"),
        responses=Jagged.from_rows([np.ones(n) for n in lengths], "int32"),
        logprobs=Jagged.from_rows([np.zeros(n) for n in lengths], "float32"),
        versions=Jagged.from_rows(rows, "int64"),
        advantages=np.zeros(len(rows), np.float32),
    )


def test_lags_are_counted_from_the_gradient() -> None:
    tally = StepTally()
    tally.add(batch([[4, 4, 5], [3], []]), step=6)
    assert (tally.samples, tally.nonempty, tally.prompt_tokens, tally.response_tokens) == (3, 2, 9, 4)
    assert (tally.staleness_start_max, tally.staleness_start_sum) == (2, 3)
    assert (tally.staleness_end_max, tally.staleness_token_sum) == (2, 1 + 1 + 0 + 2)


def test_a_report_says_means_over_what_they_are_of_and_only_finite_numbers() -> None:
    tally = StepTally()
    mask = Jagged.from_rows([[True, False, True], [True], []], "bool")
    rewards = np.array([1, 0, 0.5], np.float32)
    tally.add(replace(batch([[4, 4, 5], [3], []]), loss_mask=mask, rewards=rewards), step=6)
    report = describe(
        tally,
        {"loss": 0.5, "entropy": math.nan, "logprob_gap_p99": math.inf},
        attempt=1,
        ranks=2,
        step=6,
        published=True,
        spent={"wait": 2.5},
        publication_s=None,
        busy_s=1.0,
        started=10.0,
        ended=11.0,
    )
    assert (report.samples, report.reward) == (3, 0.5)
    assert (report.tokens, report.response_tokens, report.observation_tokens) == (9 + 4, 3, 1)
    assert (report.staleness_start_mean, report.staleness_start_max) == ((1 + 2) / 2, 2)
    assert (report.staleness_token_mean, report.staleness_end_max) == ((1 + 0 + 2) / 3, 2)
    assert (report.metrics, report.logprob_gap_p99) == ({"loss": 0.5}, None)
    assert (report.seconds.wait, report.seconds.wall, report.seconds.checkpoint) == (2.5, 0, 0)
    assert report.keys == f"{tally.digest % (1 << 64):016x}"


@given(st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=8), st.integers(0, 8), st.integers(1, 3))
def test_a_tally_does_not_depend_on_the_cut(versions: list[list[int]], cut: int, ranks: int) -> None:
    cut -= cut % 2
    whole, first, second = StepTally(), StepTally(), StepTally()
    whole.add(batch(versions), step=6)
    second.add(batch(versions[cut:], first=cut // 2), step=6)
    first.add(batch(versions[:cut]), step=6)
    idle = [StepTally().array()] * (ranks - 1)
    assert StepTally.merged(np.stack([second.array(), *idle, first.array()])) == whole


@given(
    st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from([1e13, 1e30, -1e30, 1e-7]),
        min_size=1,
        max_size=8,
    ),
    st.integers(0, 8),
)
def test_the_mean_reward_is_exact_whatever_the_rewards_and_the_cut(rewards: list[float], cut: int) -> None:
    cut -= cut % 2
    given = np.array(rewards, np.float32)
    whole, first, second = StepTally(), StepTally(), StepTally()
    for tally, part in ((whole, slice(None)), (first, slice(cut)), (second, slice(cut, None))):
        rows = batch([[0]] * len(given[part]))
        tally.add(replace(rows, rewards=given[part]), step=1)
    mean = Fraction(0) + sum(map(Fraction, given.tolist())) / len(rewards)
    assert whole.reward_mean == float(mean)
    assert StepTally.merged(np.stack([second.array(), first.array()])).reward_mean == float(mean)


def test_the_mean_reward_of_nothing_is_zero() -> None:
    assert StepTally().reward_mean == 0


def test_a_long_response_is_no_more_work_for_the_event_loop_than_a_short_one() -> None:
    def work(length: int) -> int:
        rows = batch([[4] * length] * 8)
        return bytecodes(lambda: StepTally().add(rows, step=6))

    assert work(500) == work(5)


def test_the_digest_tells_sets_apart() -> None:
    digests = set()
    for first in range(50):
        tally = StepTally()
        tally.add(batch([[0]] * 4, first=first), step=1)
        digests.add(tally.digest)
    assert len(digests) == 50


@given(st.lists(st.floats(1e-8, 500), min_size=1, max_size=60), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_quantiles_are_never_below_and_hardly_above(values: list[float], q: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(np.array([value]))
    exact = float(np.quantile(values, q, method="inverted_cdf"))
    assert exact * (1 - 1e-9) <= histogram.quantile(q) <= exact * 1.012


def test_quantiles_at_the_edges() -> None:
    histogram = Histogram()
    assert np.isnan(histogram.quantile(0.5))
    histogram.add(np.array([0.0, 0.0]))
    assert histogram.quantile(0.99) == 1e-9
    histogram.add(np.array([np.nan]))
    assert histogram.quantile(1.0) == 1e-9, "what is no number is not counted"
    histogram.add(np.full(100, 1e9))
    assert histogram.quantile(0.99) == float("inf")


def test_meters_add_up_over_ranks() -> None:
    meters = [StepMeter(sums=("a", "b"), maxima=("m",)) for _ in range(2)]
    meters[0].add([("a", 1.0), ("m", 3.0)])
    meters[1].add([("a", 2.0), ("b", 5.0), ("m", 2.0)])
    for meter in meters:
        meter.histogram.add(np.array([0.1]))
    merged = meters[0].merged(np.stack([meter.array() for meter in meters]))
    assert merged.sums == {"a": 3.0, "b": 5.0}
    assert merged.maxima == {"m": 3.0}
    assert merged.histogram.counts.sum() == 2


def test_learning_rate_curves() -> None:
    def rates(**more: object) -> list[float]:
        settings = OptimizerSettings(learning_rate=1.0, steps=6, warmup_steps=2, **more)  # type: ignore[arg-type]
        return [round(settings.rate(step), 6) for step in range(1, 8)]

    assert rates() == [0.5, 1, 1, 1, 1, 1, 1]
    assert rates(curve="linear") == [0.5, 1, 0.75, 0.5, 0.25, 0, 0]
    assert rates(curve="cosine", final_fraction=0.1)[-3:] == [0.231802, 0.1, 0.1]
    assert rates(curve="cosine")[3] == 0.5


def columns(**other: Jagged) -> dict[str, Jagged]:
    return {
        "prompt_ids": Jagged.from_rows([[1], [1]], "int32"),
        "response_ids": Jagged.from_rows([[1, 2], [3]], "int32"),
        "logprobs": Jagged.from_rows([[0, 0], [0]], "float32"),
        "versions": Jagged.from_rows([[7, 7], [8]], "int64"),
        "advantage": Jagged.from_rows([[0.5], [-0.5]], "float32"),
    } | other


def test_a_micro_batch_is_made_of_columns() -> None:
    keys = [SampleKey(0, 0), SampleKey(0, 1)]
    made = MicroBatch.of(keys, columns(loss_mask=Jagged.from_rows([[True, False], [False]], "bool")))
    assert made.advantages.tolist() == [0.5, -0.5]
    assert made.loss_lengths().tolist() == [1, 0]
    assert made.sole_versions().tolist() == [7, 8]
    mixed = MicroBatch.of(keys, columns(versions=Jagged.from_rows([[7, 8], [8]], "int64")))
    assert mixed.sole_versions().tolist() == [-1, 8]


@pytest.mark.parametrize("name", ["logprobs", "versions", "advantage"])
def test_columns_that_disagree_are_refused(name: str) -> None:
    bad = Jagged.from_rows([[1, 2], [3, 4]], columns()[name].dtype)
    with pytest.raises(ProtocolError, match=rf"sample \(0, [01]\): {name}"):
        MicroBatch.of([SampleKey(0, 0), SampleKey(0, 1)], columns(**{name: bad}))
    with pytest.raises(ProtocolError, match="rows for"):
        MicroBatch.of([SampleKey(0, 0)], columns())


def test_a_counting_trainer_takes_the_time_of_its_micro_batch() -> None:
    options = CountingOptions(sleep_s=1.0, sample_s=0.25, token_s=0.125)
    assert options.micro_batch_s(samples=4, tokens=16) == 4.0
    assert CountingOptions().micro_batch_s(samples=4, tokens=16) == 0.0
