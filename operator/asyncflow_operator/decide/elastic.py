"""The built-in elastic policy of a job: whether it may act, and what it wants.

Invariant: ``replicas`` has one owner. Where somebody else scales, or the policy only shows what it would do, the wanted
number is shown and the spec's number is followed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from asyncflow.api.job import RLJobSpec
from asyncflow.api.status import ElasticityRecord, JobStatus
from asyncflow.flow.scaling import Elasticity, Signals, Window, Wish
from asyncflow_operator.decide.moments import Alarm, read, written
from asyncflow_operator.observed import JobState, Probe

_FRESH_S: Final = 60.0
_OFF: Final[dict[str, Any]] = {"desired_replicas": None, "elasticity": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Wanted number of rollouts.

    fields: of the status; acts: whether the policy decides; None where the job has none; reason, message: why.
    """

    replicas: int
    fields: dict[str, Any]
    acts: bool | None = None
    reason: str = ""
    message: str = ""


def target(spec: RLJobSpec, state: JobState, alarm: Alarm) -> Target:
    """Return the number of rollouts that counts now."""
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
    """Return what the policy wants, and the fields that say so. acts: whether it starts from what it wanted before."""
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
        held = policy.within(before)
        return held, {"desired_replicas": held} if status.desired_replicas is not None else {}
    decided, window = policy.follow(signals, window=_window(status.elasticity), now=alarm.now)
    if not acts:
        window = replace(window, rollouts=policy.within(signals.rollouts))
    if window.wish is not None:
        alarm.until(window.wish.since + policy.stabilization_s)
    wanted = policy.within(before) if decided is None else decided
    return wanted, {"desired_replicas": wanted, "elasticity": _record(window)}


def _window(record: ElasticityRecord | None) -> Window | None:
    """Return what was remembered."""
    if record is None:
        return None
    since = read(record.wish_time)
    wish = Wish(record.wish, since) if record.wish is not None and since is not None else None
    return Window(record.replicas, record.step, wish)


def _record(window: Window) -> ElasticityRecord:
    """Return what to remember."""
    wish = {"wish": window.wish.direction, "wish_time": written(window.wish.since)} if window.wish is not None else {}
    return ElasticityRecord.model_validate({"replicas": window.rollouts, "step": window.step, **wish})


def _signals(spec: RLJobSpec, probe: Probe, now: float, *, rollouts: int) -> Signals | None:
    """Return what the policy looks at; None where the driver has nothing new to say, or too few steps were made."""
    seen = probe.status
    if seen is None or now - probe.at > _FRESH_S or seen.phase != "Running" or seen.recent is None:
        return None
    return Signals(
        rollouts=rollouts,
        ready=sum(each.state in ("ready", "lagging") for each in seen.rollouts),
        step=seen.step,
        since=seen.recent.since,
        wait_share=seen.recent.wait_share,
        busy_share=seen.recent.busy_share,
        queued_steps=seen.queue.ready / (spec.algorithm.prompts_per_step * spec.algorithm.group_size),
        lag=seen.staleness.start,
    )
