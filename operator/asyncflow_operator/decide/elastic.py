"""The built-in elastic policy of a job: whether it may act, and what it wants.

Invariant: ``replicas`` has one owner. Where somebody else scales, or the policy only shows what it would do, the wanted
number is shown and the spec's number is followed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from asyncflow.api.job import RLJobSpec
from asyncflow.api.status import JobStatus
from asyncflow.flow.scaling import Elasticity, Signals, Wish
from asyncflow_operator.decide.moments import Alarm, read, written
from asyncflow_operator.observed import JobState, Probe

_FRESH_S: Final = 60.0
_OFF: Final[dict[str, Any]] = {"desired_replicas": None, "wish": None, "wish_time": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """How many rollouts there shall be.

    fields: of the status; acts: whether the policy decides; None where the job has none; reason, message: why.
    """

    replicas: int
    fields: dict[str, Any]
    acts: bool | None = None
    reason: str = ""
    message: str = ""


def target(spec: RLJobSpec, state: JobState, alarm: Alarm) -> Target:
    """Give the number of rollouts that counts now."""
    asked = spec.rollout.replicas
    if not (spec.elasticity.enabled or spec.elasticity.dry_run):
        return Target(replicas=asked, fields=_OFF)
    if state.scaled_by:
        by = ", ".join(state.scaled_by)
        return Target(
            replicas=asked,
            fields=_OFF,
            acts=False,
            reason="ForeignOwner",
            message=f"{by} sets spec.rollout.replicas; the built-in policy leaves it alone",
        )
    acts = spec.elasticity.enabled and not spec.elasticity.dry_run
    wanted, fields = _followed(spec, state.status, state.probe, alarm, acts=acts)
    if acts:
        return Target(
            replicas=wanted,
            fields=fields,
            acts=True,
            reason="Following",
            message="status.desiredReplicas is what the built-in policy wants and what is done",
        )
    return Target(
        replicas=asked,
        fields=fields,
        acts=False,
        reason="DryRun",
        message="status.desiredReplicas is what the built-in policy would do; spec.rollout.replicas is what is done",
    )


def _followed(
    spec: RLJobSpec, status: JobStatus, probe: Probe, alarm: Alarm, *, acts: bool
) -> tuple[int, dict[str, Any]]:
    """Give what the policy wants, and the fields that say so. acts: whether it starts from what it wanted before."""
    rollout, elasticity = spec.rollout, spec.elasticity
    before = status.desired_replicas if status.desired_replicas is not None else rollout.replicas
    policy = Elasticity(
        least=rollout.min_replicas,
        most=rollout.max_replicas,
        wait_share=elasticity.target_trainer_wait_share,
        queued_steps=elasticity.max_queued_steps,
        lag=spec.schedule.max_staleness,
        stabilization_s=elasticity.stabilization_seconds,
    )
    signals = _signals(spec, probe, alarm.now, rollouts=before if acts else rollout.replicas)
    if signals is None:
        held = max(policy.least, min(before, policy.most))
        return held, {"desired_replicas": held, "wish": None, "wish_time": None}
    since = read(status.wish_time)
    wish = Wish(status.wish, since) if status.wish is not None and since is not None else None
    wanted, wish = policy.follow(signals, wish=wish, now=alarm.now)
    if wish is None:
        return wanted, {"desired_replicas": wanted, "wish": None, "wish_time": None}
    alarm.until(wish.since + policy.stabilization_s)
    kept = before if not acts else wanted
    return kept, {"desired_replicas": kept, "wish": wish.direction, "wish_time": written(wish.since)}


def _signals(spec: RLJobSpec, probe: Probe, now: float, *, rollouts: int) -> Signals | None:
    """Give what the policy looks at; None where the driver has nothing new to say, or no step was made yet."""
    seen = probe.status
    if seen is None or now - probe.at > _FRESH_S or seen.phase != "Running" or seen.step == 0:
        return None
    return Signals(
        rollouts=rollouts,
        ready=sum(each.state in ("ready", "lagging") for each in seen.rollouts),
        wait_share=seen.trainer_wait_share,
        queued_steps=seen.queue.ready / (spec.algorithm.prompts_per_step * spec.algorithm.group_size),
        lag=seen.staleness.start,
    )
