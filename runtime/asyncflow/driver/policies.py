"""The policies that a manifest asks for.

Invariant: everything here is a function of the manifest, so that the planner, the simulator and a restarted driver
build the same objects.
"""

from __future__ import annotations

from asyncflow.api.job import RLJobSpec
from asyncflow.flow.admission import Admission, BoundedLag, Concurrency, StalenessThreshold
from asyncflow.flow.schedule import Schedule


def schedule_of(spec: RLJobSpec) -> Schedule:
    """Give the schedule: η is 0 where everybody waits, 1 for delayed quotas, maxStaleness where versions may mix."""
    exact = spec.schedule.swap_at == "quota"
    lag = 0 if spec.schedule.update == "sync" and exact else 1 if exact else spec.schedule.max_staleness
    return Schedule(
        steps=spec.algorithm.steps,
        lag=lag,
        exact=exact,
        sync_every=spec.schedule.sync_every,
        eval_every=spec.evaluation.every if spec.evaluation else 0,
    )


def admission_of(spec: RLJobSpec) -> list[Admission]:
    """Give the rules under which prompts are dispatched; quotas admit whole steps, so verl's fraction is not theirs."""
    batch = spec.algorithm.prompts_per_step
    schedule = schedule_of(spec)
    policies: list[Admission] = [BoundedLag(prompts_per_step=batch, lag=schedule.lag, steps=spec.algorithm.steps)]
    if not schedule.exact:
        threshold = StalenessThreshold(
            prompts_per_step=batch,
            sync_every=schedule.sync_every,
            threshold=spec.schedule.staleness_threshold,
        )
        policies.append(threshold)
    if spec.schedule.max_inflight is not None:
        policies.append(Concurrency(limit=spec.schedule.max_inflight))
    return policies


def collects_whole_steps(spec: RLJobSpec) -> bool:
    """Tell whether training waits for all of D_k, in the order of keys, instead of streaming."""
    return spec.schedule.mode == "sync" or spec.schedule.require_batches == 1 or spec.schedule.deterministic
