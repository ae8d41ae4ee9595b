"""Fitting of models to a recorded run.

The trainer's seconds are regressed on slots and tokens. Publication, pulls, swaps, claims and rewards are means of the
measurements. The model of a simulated engine is taken from its options. For any other engine two values are fitted: the
seconds per token are those with which the simulated rollouts generate for as long as the real ones did, and the
slowdown per further sequence is the one, out of a few candidates, that best reproduces the duration of a step.

Invariant: fitting is pure: it depends only on its arguments, and the same record results in the same models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby
from statistics import fmean, pvariance
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from asyncflow.api.job import RLJob
from asyncflow.errors import ManifestError
from asyncflow.rollout.lengths import Lengths
from asyncflow.sim.models import EngineModel, LinkModel, Models, RewardTimes, StorageModel, TrainerModel
from asyncflow.sim.result import Simulated
from asyncflow.sim.run import simulate
from asyncflow.sim.scenario import Scenario, engine_model, scenario_of
from asyncflow.timeline.tracks import Timeline

WITHOUT: Final = 2
"""Steps at the beginning that are ignored, because processes start and caches are cold."""
_MOST_STEPS: Final = 64
"""Maximum steps of the simulated runs that are compared with the recorded one."""
_QUANTILES: Final = 33
_LEAST_PAIRS: Final = 30
"""Minimum number of pairs of samples of one group for which their correlation is computed."""
_SHARES: Final = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Candidates for the slowdown of running sequences by each further sequence."""
_TRIES: Final = 4
"""Number of simulations to fit the seconds per token: generation time is nearly proportional to them."""


class Drawn(NamedTuple):
    """A sample of a run's unbiased selection of samples."""

    serial: int
    prompt_tokens: int
    response_tokens: int


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Record of a run.

    steps: lines of metrics.jsonl; slots: number of slots by step, as far as the ledger has them; generating_s: total
    seconds in which rollouts generated for training; timeline: None if there is none.
    """

    steps: Sequence[Mapping[str, Any]]
    samples: Sequence[Drawn]
    generating_s: float
    slots: Mapping[int, int]
    timeline: Timeline | None = None


class Fitted(NamedTuple):
    """The models, and a run simulated with them, whose first steps correspond to those of the recorded run."""

    models: Models
    check: Simulated


def fitted(job: RLJob, recorded: Recorded) -> Fitted:
    """Return the models of a recorded job. Raises ManifestError if too few steps are recorded."""
    counted = recorded.steps[WITHOUT:]
    if not counted:
        what = f"{len(recorded.steps)} steps are recorded"
        raise ManifestError(what, where="metrics.jsonl", hint=f"Record more than {WITHOUT} steps")
    spec = job.spec
    engine, simulated = spec.rollout.engine, spec.rollout.engine.name == "simulated"
    lengths = lengths_of(recorded.samples, most=spec.sampling.max_tokens)
    load_s = _swap_s(recorded.timeline)
    model = EngineModel(slots=engine.slots, token_s=1e-3, load_s=load_s, lengths=lengths)
    if simulated:
        model = engine_model(engine.options, slots=engine.slots)
        if load_s and not model.recompute_s:
            model = msgspec.structs.replace(model, load_s=load_s)
    models = Models(
        engine=model,
        trainer=trainer_of(
            counted, recorded.slots, ranks=spec.trainer.ranks, shared=_shared(job), passes=spec.algorithm.epochs
        ),
        link=LinkModel(pull_s=_span_s(recorded.timeline, "receive")),
        storage=storage_of(recorded.timeline),
        reward=RewardTimes(seconds=_idle_s(recorded.timeline, "reward"), workers=engine.slots),
        prompt_tokens=round(fmean(sample.prompt_tokens for sample in recorded.samples)) if recorded.samples else 0,
    )
    scenario = scenario_of(job, models=models)
    scenario = replace(scenario, steps=min(len(recorded.steps), _MOST_STEPS))
    if not simulated:
        step_s = fmean(step["wall_s"] for step in counted)
        generating_s = recorded.generating_s * scenario.steps / len(recorded.steps)
        tried = [_scaled(scenario, share, generating_s, seed=spec.algorithm.seed) for share in _SHARES]
        scenario = min(
            tried, key=lambda each: abs(_simulate(each, spec.algorithm.seed).step_s(without=WITHOUT) - step_s)
        )
    return Fitted(scenario.models, _simulate(scenario, spec.algorithm.seed))


def lengths_of(samples: Sequence[Drawn], *, most: int) -> Lengths:
    """Return the empirical distribution of the lengths of samples. most: length to assume if there are no samples."""
    if not samples:
        return Lengths(tokens=float(most))
    tokens = [sample.response_tokens for sample in samples]
    places = np.linspace(0.0, 1.0, min(_QUANTILES, max(2, len(tokens))))
    quantiles = tuple(float(each) for each in np.quantile(tokens, places))
    return Lengths(quantiles=quantiles, rho=_correlation(samples))


def _correlation(samples: Sequence[Drawn]) -> float:
    """Return the correlation of the logarithms of two lengths of one group, 0 if too few pairs are known."""
    logs = sorted((sample.serial, math.log(max(1, sample.response_tokens))) for sample in samples)
    mean, variance = fmean(log for _, log in logs), pvariance([log for _, log in logs])
    groups = [[log - mean for _, log in group] for _, group in groupby(logs, key=lambda pair: pair[0])]
    products = [one * other for group in groups for one, other in combinations(group, 2)]
    if variance <= 0 or len(products) < _LEAST_PAIRS:
        return 0.0
    return min(1.0, max(0.0, fmean(products) / variance))


def _shared(job: RLJob) -> int:
    """Return the number of samples that share a copy of their prompt in the trainer."""
    spec = job.spec
    return spec.algorithm.group_size if spec.trainer.backend.packing == "shared-prompt" else 1


def trainer_of(
    steps: Sequence[Mapping[str, Any]], slots: Mapping[int, int], *, ranks: int, shared: int = 1, passes: int = 1
) -> TrainerModel:
    """Return the model of a trainer with these steps.

    shared: number of samples per copy of a prompt; passes: of the trainer over the samples of a step.
    """
    parts = ("wait_s", "compute_s", "optimizer_s", "publish_s", "checkpoint_s")
    rest = [max(0.0, step["wall_s"] - sum(step[part] for part in parts)) for step in steps]
    saved = [step["checkpoint_s"] for step in steps if step["checkpoint_s"] > 0]
    published = [step["publication_s"] for step in steps if step["publication_s"] is not None]
    slot_s, token_s = _compute_of(steps, slots, ranks=ranks, shared=shared)
    return TrainerModel(
        slot_s=slot_s / passes,
        token_s=token_s / passes,
        optimizer_s=fmean(step["optimizer_s"] for step in steps) + fmean(rest),
        publish_s=fmean(published) if published else 0.0,
        checkpoint_s=fmean(saved) if saved else 0.0,
    )


def _compute_of(
    steps: Sequence[Mapping[str, Any]], slots: Mapping[int, int], *, ranks: int, shared: int
) -> tuple[float, float]:
    """Return the non-negative seconds per slot and per token that fit ``compute_s`` best."""
    seconds = np.array([step["compute_s"] for step in steps])
    apart = np.array([step["response_tokens"] + step.get("observation_tokens", 0) for step in steps], np.float64)
    tokens = (apart + (np.array([step["tokens"] for step in steps]) - apart) / shared) / ranks
    if all(step["step"] in slots for step in steps):
        counts = np.array([slots[step["step"]] for step in steps], dtype=np.float64)
        (slot_s, token_s), _, rank, _ = np.linalg.lstsq(np.stack([counts, tokens], axis=1), seconds, rcond=None)
        if rank == 2 and slot_s >= 0 and token_s >= 0:
            return float(slot_s), float(token_s)
        by_slot = float(seconds @ counts / (counts @ counts))
        by_token = float(seconds @ tokens / (tokens @ tokens))
        errors = (np.abs(seconds - by_slot * counts).sum(), np.abs(seconds - by_token * tokens).sum())
        return (by_slot, 0.0) if errors[0] < errors[1] else (0.0, by_token)
    return 0.0, float(seconds @ tokens / (tokens @ tokens))


def storage_of(timeline: Timeline | None) -> StorageModel:
    """Return the model of a queue, from the times for which the roles of a run waited for it."""
    return StorageModel(
        put_s=_span_s(timeline, "dispatch", role="driver"),
        claim_s=_idle_s(timeline, "fetch"),
        write_s=_idle_s(timeline, "delivery"),
        slot_s=_span_s(timeline, "fetch", role="trainer"),
    )


def _span_s(timeline: Timeline | None, kind: str, *, role: str = "rollout") -> float:
    """Return the mean seconds of the spans of a kind, 0 if there are none."""
    if timeline is None:
        return 0.0
    tracks = [track for track in timeline.tracks if track.role == role]
    found = [span.seconds for track in tracks for span in (*track.main, *track.background) if span.kind == kind]
    return fmean(found) if found else 0.0


def _swap_s(timeline: Timeline | None) -> float:
    """Return the mean seconds of a change of weights, 0 if there was none. A change may consist of several spans."""
    if timeline is None:
        return 0.0
    swaps = [
        (place, span.version, span.seconds)
        for place, track in enumerate(timeline.tracks)
        for span in track.main
        if span.kind == "swap"
    ]
    return sum(seconds for _, _, seconds in swaps) / max(1, len({swap[:2] for swap in swaps}))


def _idle_s(timeline: Timeline | None, waits: str) -> float:
    """Return the mean seconds of the idle spans in which rollouts waited for this."""
    if timeline is None:
        return 0.0
    tracks = [track for track in timeline.tracks if track.role == "rollout"]
    found = [span.seconds for track in tracks for span in track.main if span.kind == "idle" and span.waits == waits]
    return fmean(found) if found else 0.0


def _scaled(scenario: Scenario, share: float, generating_s: float, *, seed: int) -> Scenario:
    """Return the scenario with the seconds per token for which its rollouts generate for ``generating_s``."""
    for _ in range(_TRIES):
        engine = scenario.models.engine
        engine = msgspec.structs.replace(engine, share_s=share * engine.token_s)
        spent = _simulate(_with_engine(scenario, engine), seed).spent["rollout"]
        found = sum(seconds for (kind, _), seconds in spent.items() if kind == "generate")
        factor = generating_s / found if found > 0 else 1.0
        engine = msgspec.structs.replace(engine, token_s=engine.token_s * factor, share_s=engine.share_s * factor)
        scenario = _with_engine(scenario, engine)
    return scenario


def _with_engine(scenario: Scenario, engine: EngineModel) -> Scenario:
    return replace(scenario, models=msgspec.structs.replace(scenario.models, engine=engine))


def _simulate(scenario: Scenario, seed: int) -> Simulated:
    return simulate(scenario, seed=seed, spans=False)
