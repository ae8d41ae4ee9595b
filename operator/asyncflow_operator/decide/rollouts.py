"""Rollouts: how many are wanted, which are made, and which are drained.

A rollout to drain is chosen once and put on record, then drained through the driver, then deleted: when the driver has
let it go, when it has ended, or when its time is over. A rollout that does not run, or that no driver knows, has no
work to hand back.

The built-in policy decides in the driver (``asyncflow.driver.elastic``), which sees the job.

Invariants: ``replicas`` has one owner: where another manager scales, or the built-in policy only shows what it would
do, the wanted number is shown and the spec's number is followed. Rollouts that stay are never touched, and what happens
to rollouts never reads or changes another role.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from asyncflow.api.job import RLJobSpec
from asyncflow.api.records import RoleRecord
from asyncflow.api.status import DrainingRollout, JobStatus, RolloutState
from asyncflow.plan.roles import Role
from asyncflow_operator.actions import DriverOrder
from asyncflow_operator.decide.failure import end_of
from asyncflow_operator.decide.replicas import PodReplica, ReplicaMoves, removed, replaced
from asyncflow_operator.decide.times import Alarm, from_rfc3339, to_rfc3339
from asyncflow_operator.observed import DriverProbe, JobState, PodView

_OFF: Final[dict[str, Any]] = {"desired_replicas": None}
LET_GO_S: Final = 10.0
"""Seconds beyond its drain time after which a rollout is deleted whatever the driver says."""
FRESH_S: Final = 30.0
"""Seconds for which an answer of the driver counts as what is."""
_AT_ONCE: Final = 256
_TOO_MANY: Final = "fewer rollouts are wanted"


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
    wanted = _wanted(spec, state.status, state.probe, alarm.now)
    fields = {"desired_replicas": wanted}
    if spec.elasticity.acts:
        return Target(
            replicas=asked if wanted is None else wanted,
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


def _wanted(spec: RLJobSpec, status: JobStatus, probe: DriverProbe, now: float) -> int | None:
    """Return the number that the policy in the driver has decided on, or had when the driver was last heard, within the
    bounds of now; None before it has decided.
    """
    said, seen = status.desired_replicas, probe.status
    if seen is not None and seen.phase == "Running" and now - probe.at <= FRESH_S:
        said = said if seen.desired_rollouts is None else seen.desired_rollouts
    return None if said is None else max(spec.rollout.min_replicas, min(said, spec.rollout.max_replicas))


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSet:
    """Rollouts after a decision. staying: pods that count for ``replicas``; draining: those on their way out."""

    staying: int
    draining: tuple[DrainingRollout, ...]
    moves: ReplicaMoves


@dataclass(frozen=True, slots=True)
class RegisteredRollouts:
    """The rollouts that the driver knows, by index, as of ``at``; None: it does not say."""

    by_index: Mapping[int, RolloutState] | None
    at: float

    @classmethod
    def of(cls, probe: DriverProbe, now: float) -> RegisteredRollouts:
        """Read the driver's last answer."""
        if probe.status is None or now - probe.at > FRESH_S:
            return cls(None, probe.at)
        return cls({each.index: each for each in probe.status.rollouts}, probe.at)


def still_draining(draining: Sequence[DrainingRollout], pods: Collection[PodView]) -> tuple[DrainingRollout, ...]:
    """Return those of ``draining`` whose pods are still there."""
    there = {pod.uid for pod in pods}
    return tuple(each for each in draining if each.uid in there)


def plan_rollouts(
    role: Role,
    pods: Collection[PodView],
    record: RoleRecord,
    *,
    target: int,
    draining: tuple[DrainingRollout, ...],
    registered: RegisteredRollouts,
    drain_s: float,
    may_make: bool,
    alarm: Alarm,
    core: int = 0,
) -> RolloutSet:
    """Plan pods to make or to drain until ``target`` rollouts run beside those ``draining``.

    may_make: whether pods may be made now; drain_s: seconds that a rollout has to hand back its work; core: how many,
    from index 0 on, have their place with the gang and are drained last.
    """
    chosen = {each.uid for each in draining}
    holders = [pod for pod in pods if pod.uid not in chosen]
    spare = min(max(len(holders) - target, 0), _AT_ONCE - len(draining))
    victims = sorted(holders, key=lambda pod: (pod.index < core, *_drain_order(pod, registered)))[:spare]
    draining += tuple(DrainingRollout(name=pod.name, uid=pod.uid, since=to_rfc3339(alarm.now)) for pod in victims)
    since = {each.uid: from_rfc3339(each.since) or 0.0 for each in draining}
    staying = [pod for pod in holders if pod.uid not in since]
    moves = ReplicaMoves(
        make=_new_replicas(role, pods, record, count=target - len(staying)) if may_make else (),
        remove=replaced(role, staying, record, alarm),
    )
    for pod in pods:
        if pod.uid in since:
            moves += _drain(pod, registered, since=since[pod.uid], drain_s=drain_s, alarm=alarm)
    return RolloutSet(staying=len(staying), draining=draining, moves=moves)


def _drain_order(pod: PodView, registered: RegisteredRollouts) -> tuple[bool, int, int, int]:
    """Return the sort key for draining: not running first, fewest in flight, oldest version, highest index."""
    known = (registered.by_index or {}).get(pod.index)
    runs = pod.phase == "Running" and end_of(pod) is None
    return runs, known.inflight if known else 0, known.version if known else 0, -pod.index


def _new_replicas(role: Role, pods: Collection[PodView], record: RoleRecord, *, count: int) -> tuple[PodReplica, ...]:
    taken = {pod.index for pod in pods}
    free = (index for index in range(len(taken) + max(count, 0)) if index not in taken)
    return tuple(PodReplica(role.name, index, record.attempt) for index, _ in zip(free, range(count), strict=False))


def _drain(pod: PodView, registered: RegisteredRollouts, *, since: float, drain_s: float, alarm: Alarm) -> ReplicaMoves:
    """Return the moves that drain one rollout and then delete it."""
    if pod.phase != "Running" or pod.deleting or registered.by_index is None:
        return ReplicaMoves(remove=removed([pod], alarm, why=f"{_TOO_MANY}, and it has no work to hand back"))
    if not alarm.until(since + drain_s + LET_GO_S):
        why = f"{_TOO_MANY}, and it had {drain_s:g} s to hand back its work"
        return ReplicaMoves(remove=removed([pod], alarm, why=why))
    known = registered.by_index.get(pod.index)
    if known is None:
        waits = registered.at < since and alarm.until(since + LET_GO_S)
        gone = () if waits else removed([pod], alarm, why=f"{_TOO_MANY}, and it has handed back its work")
        return ReplicaMoves(remove=gone)
    if known.state == "draining":
        return ReplicaMoves()
    return ReplicaMoves(ask=(DriverOrder(path=f"/v1/rollouts/{known.id}/drain"),))
