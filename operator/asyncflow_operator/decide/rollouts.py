"""Rollouts: their wanted number, which ones to create, and which ones to drain.

A rollout to drain is chosen once and recorded, then drained through the driver, and then deleted: when the driver no
longer lists it, when it has ended, or when its time is over. A rollout that does not run, or that no driver knows, has
no work to hand back.

The built-in policy runs in the driver (``asyncflow.driver.elastic``), which has the figures of the job.

Invariants: ``replicas`` has one owner. If another manager scales the job, or the built-in policy is in dry-run mode,
the number in the spec is followed. Rollouts that stay are never changed, and decisions about rollouts neither read nor
change another role.
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
from asyncflow_operator.decide.replicas import AT_ONCE, PodReplica, ReplicaMoves, removed, replaced
from asyncflow_operator.decide.times import Alarm, from_rfc3339, to_rfc3339
from asyncflow_operator.observed import DriverProbe, JobState, PodView

_OFF: Final[dict[str, Any]] = {"desired_replicas": None}
LET_GO_S: Final = 10.0
"""Seconds after its drain time when a rollout is deleted even if the driver still lists it."""
FRESH_S: Final = 30.0
"""Seconds for which an answer of the driver counts as the present state."""
_AT_ONCE: Final = 256
_TOO_MANY: Final = "fewer rollouts are wanted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Wanted number of rollouts.

    fields: of the status; acts: whether the policy decides, None without one; reason, message: of ElasticityActive.
    """

    replicas: int
    fields: dict[str, Any]
    acts: bool | None = None
    reason: str = ""
    message: str = ""


def target(spec: RLJobSpec, state: JobState, alarm: Alarm) -> Target:
    """Return the number of rollouts to follow now."""
    replicas = spec.rollout.replicas
    if not (spec.elasticity.enabled or spec.elasticity.dry_run):
        return Target(replicas=replicas, fields=_OFF)
    if state.scaled_by:
        by = ", ".join(state.scaled_by)
        return Target(
            replicas=replicas,
            fields=_OFF,
            acts=False,
            reason="ForeignOwner",
            message=f"{by} sets spec.rollout.replicas, so the built-in policy does not change the number",
        )
    wanted = _wanted(spec, state.status, state.probe, alarm.now)
    fields = {"desired_replicas": wanted}
    if spec.elasticity.acts:
        return Target(
            replicas=replicas if wanted is None else wanted,
            fields=fields,
            acts=True,
            reason="Following",
            message="The number of rollouts follows the built-in policy (status.desiredReplicas)",
        )
    return Target(
        replicas=replicas,
        fields=fields,
        acts=False,
        reason="DryRun",
        message="The number of rollouts follows spec.rollout.replicas; the built-in policy only proposes "
        "status.desiredReplicas",
    )


def _wanted(spec: RLJobSpec, status: JobStatus, probe: DriverProbe, now: float) -> int | None:
    """Return the last known decision of the driver's policy, within the present bounds; None without a decision."""
    desired, seen = status.desired_replicas, probe.status
    if seen is not None and seen.phase == "Running" and now - probe.at <= FRESH_S:
        desired = desired if seen.desired_rollouts is None else seen.desired_rollouts
    return None if desired is None else max(spec.rollout.min_replicas, min(desired, spec.rollout.max_replicas))


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSet:
    """Rollouts after a decision. staying: number of pods that count for ``replicas``; draining: those being drained."""

    staying: int
    draining: tuple[DrainingRollout, ...]
    moves: ReplicaMoves


@dataclass(frozen=True, slots=True)
class RegisteredRollouts:
    """The rollouts that the driver knew at the time ``at``, by index; None if it has not answered recently."""

    by_index: Mapping[int, RolloutState] | None
    at: float

    @classmethod
    def of(cls, probe: DriverProbe, now: float) -> RegisteredRollouts:
        """Return the rollouts in the driver's last answer."""
        if probe.status is None or now - probe.at > FRESH_S:
            return cls(None, probe.at)
        return cls({each.index: each for each in probe.status.rollouts}, probe.at)


def still_draining(draining: Sequence[DrainingRollout], pods: Collection[PodView]) -> tuple[DrainingRollout, ...]:
    """Return those of ``draining`` whose pods still exist."""
    existing = {pod.uid for pod in pods}
    return tuple(each for each in draining if each.uid in existing)


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
    """Plan pods to create or to drain, so that ``target`` rollouts run in addition to those in ``draining``.

    may_make: whether pods may be created now; drain_s: seconds that a rollout has to hand back its work; core: number
    of rollouts, from index 0 on, that belong to the gang's core and are drained last.
    """
    chosen = {each.uid for each in draining}
    candidates = [pod for pod in pods if pod.uid not in chosen]
    surplus = min(max(len(candidates) - target, 0), _AT_ONCE - len(draining))
    victims = sorted(candidates, key=lambda pod: (pod.index < core, *_drain_order(pod, registered)))[:surplus]
    draining += tuple(DrainingRollout(name=pod.name, uid=pod.uid, since=to_rfc3339(alarm.now)) for pod in victims)
    since = {each.uid: from_rfc3339(each.since) or 0.0 for each in draining}
    staying = [pod for pod in candidates if pod.uid not in since]
    moves = ReplicaMoves(
        make=_new_replicas(role, pods, record, count=min(target - len(staying), AT_ONCE)) if may_make else (),
        remove=replaced(role, staying, record, alarm),
    )
    for pod in pods:
        if pod.uid in since:
            moves += _drain(pod, registered, since=since[pod.uid], drain_s=drain_s, alarm=alarm)
    return RolloutSet(staying=len(staying), draining=draining, moves=moves)


def _drain_order(pod: PodView, registered: RegisteredRollouts) -> tuple[bool, int, int, int]:
    """Return the sort key for draining: not running, then fewest sequences in flight, oldest version, highest index."""
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
        deletions = () if waits else removed([pod], alarm, why=f"{_TOO_MANY}, and it has handed back its work")
        return ReplicaMoves(remove=deletions)
    if known.state == "draining":
        return ReplicaMoves()
    return ReplicaMoves(orders=(DriverOrder(path=f"/v1/rollouts/{known.id}/drain"),))
