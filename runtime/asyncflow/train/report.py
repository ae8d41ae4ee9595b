"""Report of the trainer on each step: to the driver, and so to ``metrics.jsonl``.

Invariant: everything is measured over the whole of D_step and all ranks, and every number is finite, so a line is JSON.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from asyncflow.train.tally import Tally


class Seconds(Struct, frozen=True, kw_only=True):
    """Parts of the time since the last report.

    wall: all of it; wait: for samples; compute: forward and backward, on a device until they are queued there;
    optimizer: the step, and what is still queued before it; publish: waiting for a publication, which goes on beside
    the rest; checkpoint: for which the step before this one waited (the copying, and the end of the checkpoint before),
    not the writing beside training.
    """

    wall: float
    wait: float
    compute: float
    optimizer: float
    publish: float
    checkpoint: float


class TrainReport(Struct, frozen=True, kw_only=True):
    """One optimizer step.

    ranks: of the gang; metrics: the backend's, by name; reward: mean over the samples; tokens: prompt and response of
    all samples; staleness_start, staleness_end: versions between the gradient and a sample's oldest and newest token,
    (step - 1) - v; staleness_token_mean: mean over all response tokens; logprob_gap_p99: |engine - trainer| under the
    weights that made the tokens, of all that the trained version made, and of some of each older version whose weights
    are at hand, None where there are none; busy_s: forward, backward, optimizer and checkpoint of rank 0 since its
    process began; publication_s: what the last finished publication took, from the copy to the answer of the driver,
    None before the first; started, ended: unix time of the step; keys: digest of the set of samples, whatever their
    order; published: whether θ_step is published.
    """

    attempt: int
    ranks: int
    step: int
    samples: int
    reward: float
    tokens: int
    response_tokens: int
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
    tally: Tally,
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
    """Make the report of ``step``. spent: seconds by the names of ``Seconds``; what is missing there is 0."""
    return TrainReport(
        attempt=attempt,
        ranks=ranks,
        step=step,
        samples=tally.samples,
        reward=tally.reward_mean,
        tokens=tally.prompt_tokens + tally.response_tokens,
        response_tokens=tally.response_tokens,
        staleness_start_max=tally.staleness_start_max,
        staleness_start_mean=tally.staleness_start_sum / max(1, tally.spoken),
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


class Reported(Struct, frozen=True):
    """Answer of the driver to a report."""
