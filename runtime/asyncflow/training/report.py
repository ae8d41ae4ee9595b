"""The trainer's report of each step to the driver, which writes it to ``metrics.jsonl``, and the underlying statistics.

Invariants: all values are measured over the whole of D_step and all ranks, and every number is finite, so that a line
is valid JSON. Memory is bounded, whatever the number of samples and tokens. The statistics do not depend on the
division of D_step into slots and ranks. A reported quantile is never below the true one and at most 1.2 % above it. Two
different sets of samples have different digests, up to collisions of 64 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import starmap
from typing import Self

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from asyncflow.identity import steps_of
from asyncflow.training.batch import MicroBatch

_FLOOR = 1e-9
_PER_DECADE = 200
_DECADES = 12
_BINS = _PER_DECADE * _DECADES + 2

_UNITS = 1 << 149
_DIGIT_BITS = 40
_DIGITS = 8
"""Digits of a sum of rewards: 320 bits hold 2^40 times the largest float32."""
_DIGIT = (1 << _DIGIT_BITS) - 1
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class Histogram:
    """Counts of non-negative values in bins of equal ratio from 1e-9 to 1e3, with one more bin at each end."""

    def __init__(self, counts: NDArray[np.float64] | None = None) -> None:
        self.counts = np.zeros(_BINS) if counts is None else counts

    def add(self, values: NDArray[np.floating]) -> None:
        """Count ``values`` [n] >= 0; NaN is ignored."""
        known = values[~np.isnan(values)]
        scaled = np.log10(np.maximum(known, _FLOOR / 10) / _FLOOR) * _PER_DECADE
        bins = np.clip(np.floor(scaled) + 1, 0, _BINS - 1).astype(np.int64)
        self.counts += np.bincount(bins, minlength=_BINS)

    def quantile(self, q: float) -> float:
        """Return the upper edge of the bin that holds quantile ``q``; nan if nothing was counted."""
        total = self.counts.sum()
        if not total:
            return float("nan")
        index = int(np.searchsorted(np.cumsum(self.counts), np.ceil(q * total)))
        return float("inf") if index == _BINS - 1 else float(_FLOOR * 10 ** (index / _PER_DECADE))


class StepMeter:
    """Named sums, maxima and a histogram; ``array`` and ``merged`` combine the meters of several ranks."""

    def __init__(self, *, sums: Sequence[str], maxima: Sequence[str]) -> None:
        self.sums = dict.fromkeys(sums, 0.0)
        self.maxima = dict.fromkeys(maxima, float("-inf"))
        self.histogram = Histogram()

    def add(self, values: Iterable[tuple[str, float]]) -> None:
        """Add values to sums or maxima, by name."""
        for name, value in values:
            if name in self.sums:
                self.sums[name] += value
            else:
                self.maxima[name] = max(self.maxima[name], value)

    def array(self) -> NDArray[np.float64]:
        """Return all values as float64[n], with the same n on every rank."""
        return np.concatenate([list(self.sums.values()), list(self.maxima.values()), self.histogram.counts])

    def merged(self, rows: NDArray[np.float64]) -> Self:
        """Return the combination of the arrays of all ranks, [world, n]."""
        one = type(self)(sums=list(self.sums), maxima=list(self.maxima))
        added, highest = rows.sum(axis=0).tolist(), rows.max(axis=0).tolist()
        one.sums = dict(zip(self.sums, added, strict=False))
        one.maxima = dict(zip(self.maxima, highest[len(self.sums) :], strict=False))
        one.histogram = Histogram(rows.sum(axis=0)[len(self.sums) + len(self.maxima) :])
        return one


@dataclass(kw_only=True)
class StepTally:
    """Counts of one step. Lags are in steps, (step - 1) - v; ``staleness_start_sum`` is over samples that have tokens.
    Response tokens are those that the policy chose; observation tokens are all other tokens of a response.

    The digest is a sum of 64-bit hashes of the keys, modulo 2^64, stored as int64. ``rewards`` is the exact sum of the
    float32 rewards in units of 2^-149, of which every float32 is an integer multiple. nonempty: samples that have
    tokens.
    """

    samples: int = 0
    nonempty: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    observation_tokens: int = 0
    staleness_start_sum: int = 0
    staleness_token_sum: int = 0
    digest: int = 0
    rewards: int = 0
    staleness_start_max: int = 0
    staleness_end_max: int = 0

    def add(self, batch: MicroBatch, *, step: int) -> None:
        """Count the samples of ``batch``, which are part of D_step."""
        self.samples += len(batch)
        self.prompt_tokens += len(batch.prompts.values)
        chosen = batch.counted()
        self.response_tokens += int(chosen.sum())
        self.observation_tokens += int(np.count_nonzero(~chosen))
        digest = np.array([self.digest], dtype=np.int64).view(np.uint64)
        self.digest = int(np.append(_hashes(batch), digest).sum(dtype=np.uint64).view(np.int64))
        if batch.rewards is not None:
            ratios = map(float.as_integer_ratio, batch.rewards.tolist())
            self.rewards += sum(starmap(lambda numerator, denominator: numerator * (_UNITS // denominator), ratios))
        starts = batch.versions.offsets[:-1][batch.responses.lengths > 0]
        if not len(starts):
            return
        lags = step - 1 - steps_of(batch.versions.values)
        oldest, newest = np.maximum.reduceat(lags, starts), np.minimum.reduceat(lags, starts)
        self.nonempty += len(starts)
        self.staleness_start_sum += int(oldest.sum())
        self.staleness_token_sum += int(lags[chosen].sum())
        self.staleness_start_max = max(self.staleness_start_max, int(oldest.max()))
        self.staleness_end_max = max(self.staleness_end_max, int(newest.max()))

    @property
    def reward_mean(self) -> float:
        """Mean reward over the samples, 0 if there are none."""
        return float(Fraction(self.rewards, _UNITS * max(1, self.samples)))

    def array(self) -> NDArray[np.int64]:
        """Return all entries in the order of the fields, with the ``_DIGITS`` digits of ``rewards`` at the end."""
        digits = [self.rewards >> _DIGIT_BITS * place & _DIGIT for place in range(_DIGITS - 1)]
        last = self.rewards >> _DIGIT_BITS * (_DIGITS - 1)
        entries = [value for name, value in vars(self).items() if name != "rewards"]
        return np.array([*entries, *digits, last], dtype=np.int64)

    @classmethod
    def merged(cls, rows: NDArray[np.int64]) -> StepTally:
        """Return the combination of the arrays of all ranks, [world, fields]."""
        total, highest = rows.sum(axis=0), rows.max(axis=0)
        names = [name for name in vars(cls()) if name != "rewards"]
        entries = {name: int((highest if name.endswith("_max") else total)[index]) for index, name in enumerate(names)}
        digits = enumerate(total[len(names) :].tolist())
        return cls(**entries, rewards=sum(digit << _DIGIT_BITS * place for place, digit in digits))


def _hashes(batch: MicroBatch) -> NDArray[np.uint64]:
    keys = np.array([(key.serial, key.sample) for key in batch.keys], dtype=np.uint64).reshape(-1, 2)
    mixed: NDArray[np.uint64] = keys[:, 0] * np.uint64(0x9E3779B97F4A7C15) + keys[:, 1]
    for shift, factor in zip((30, 27), _MIX, strict=True):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * factor
    return mixed ^ (mixed >> np.uint64(31))


class Seconds(Struct, frozen=True, kw_only=True):
    """The time since the last report, by activity.

    wall: total.
    wait: waiting for samples.
    compute: forward and backward, on a device until they are queued there.
    optimizer: the step, including work that was still queued on the device before it.
    publish: waiting for a publication, which otherwise runs in the background.
    checkpoint: time that the previous step waited for checkpoints (copying, and the end of the checkpoint before),
        without the writing in the background.
    """

    wall: float
    wait: float
    compute: float
    optimizer: float
    publish: float
    checkpoint: float


class TrainReport(Struct, frozen=True, kw_only=True):
    """Report of one step.

    ranks: size of the gang.
    metrics: the backend's metrics, by name.
    reward: mean over the samples.
    tokens: tokens of prompts, responses and observations.
    response_tokens: tokens that the policy chose.
    observation_tokens: tokens of observations.
    staleness_start, staleness_end: lag of a sample's oldest and newest token, (step - 1) - v.
    staleness_token_mean: mean over response tokens.
    logprob_gap_p99: |engine - trainer| under the weights that generated the tokens. It covers all tokens of the trained
        version and some tokens of each older version whose weights are available; None if there are none.
    busy_s: forward, backward, optimizer and checkpoint time of rank 0 since its process started.
    publication_s: duration of the last finished publication, from the copy to the driver's answer; None before the
        first.
    started, ended: unix time of the step.
    keys: digest of the set of samples, independent of their order.
    published: whether θ_step is published.
    """

    attempt: int
    ranks: int
    step: int
    samples: int
    reward: float
    tokens: int
    response_tokens: int
    observation_tokens: int
    staleness_start_max: int
    staleness_start_mean: float
    staleness_end_max: int
    staleness_token_mean: float
    logprob_gap_p99: float | None
    metrics: dict[str, float]
    seconds: Seconds
    publication_s: float | None
    busy_s: float
    started: float
    ended: float
    keys: str
    published: bool


def describe(
    tally: StepTally,
    metrics: dict[str, float],
    *,
    attempt: int,
    ranks: int,
    step: int,
    published: bool,
    spent: Mapping[str, float],
    publication_s: float | None,
    busy_s: float,
    started: float,
    ended: float,
) -> TrainReport:
    """Return the report of ``step``, without metrics that are not finite, which JSON cannot represent.

    spent: seconds by the names of ``Seconds``; missing names count as 0.
    """
    metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return TrainReport(
        attempt=attempt,
        ranks=ranks,
        step=step,
        samples=tally.samples,
        reward=tally.reward_mean,
        tokens=tally.prompt_tokens + tally.response_tokens + tally.observation_tokens,
        response_tokens=tally.response_tokens,
        observation_tokens=tally.observation_tokens,
        staleness_start_max=tally.staleness_start_max,
        staleness_start_mean=tally.staleness_start_sum / max(1, tally.nonempty),
        staleness_end_max=tally.staleness_end_max,
        staleness_token_mean=tally.staleness_token_sum / max(1, tally.response_tokens),
        logprob_gap_p99=metrics.get("logprob_gap_p99"),
        metrics=metrics,
        seconds=Seconds(**{name: spent.get(name, 0.0) for name in Seconds.__struct_fields__}),
        publication_s=publication_s,
        busy_s=busy_s,
        started=started,
        ended=ended,
        keys=f"{tally.digest & (1 << 64) - 1:016x}",
        published=published,
    )


class ReportReply(Struct, frozen=True):
    """The driver's answer to a report."""
