"""Decision about one WeightSync: its versions, their progress to the instances, which instances lag and why.

The figures come from the job's driver, or from the publisher if the source is a model that no job trains.

Invariants: a WeightSync owns only its publisher, with that publisher's objects, and the manifest for followers of a
job. In all other cases its plan consists of a status only. The size of the status is bounded for any number of
instances.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Protocol

from asyncflow.api.names import FOLLOWER
from asyncflow.api.records import RoleRecord
from asyncflow.api.status import DriverStatus
from asyncflow.api.versions import LAG_BUCKETS, PhaseSeconds, VersionsState
from asyncflow.api.weights import WeightsStatus
from asyncflow.plan.publisher import publisher_role
from asyncflow.plan.roles import Role
from asyncflow_operator.actions import Plan
from asyncflow_operator.decide.alone import make_alone
from asyncflow_operator.decide.draft import Draft, accept, refuse
from asyncflow_operator.decide.failure import record_ends
from asyncflow_operator.decide.pending import Obstacle, why_denied, why_lacking, why_waiting
from asyncflow_operator.decide.progress import ACTIVE, four_digits, lacking, ready_of
from asyncflow_operator.decide.replicas import ReplicaMoves, plan_replicas, track_single_pod
from asyncflow_operator.decide.secrets import DesiredSecrets
from asyncflow_operator.decide.upkeep import needs, restore_notes, upkeep
from asyncflow_operator.observed import Manifest, Owner, Ref, SyncState

_OF_DRIVER: Final = tuple(VersionsState.model_fields)
FIGURES: Final = frozenset((*_OF_DRIVER, "version", "attempt"))
"""Fields of its status whose changes may be written with a delay."""


class DesiredSync(DesiredSecrets, Protocol):
    """Interface for the desired objects of a WeightSync, and for the facts that followers need."""

    def sync_supporting(self, state: SyncState) -> tuple[Manifest, ...]:
        """Return all objects of the publisher except its pod and Secrets, or the manifest for followers of a job."""

    def sync_pod(self, state: SyncState, attempt: int) -> Manifest:
        """Return the publisher's pod."""

    def address(self, owner: Owner) -> str:
        """Return the address of a job's driver, or of a publisher."""

    def certificate(self, owner: Owner, role: str) -> str:
        """Return the name of the Secret with the certificate of an external ``role``."""


def decide_sync(state: SyncState, *, now: float, desired: DesiredSync) -> Plan:
    """Return the plan for a WeightSync as it is at ``now`` (unix seconds)."""
    if state.owner.deleting:
        return Plan()
    draft = Draft(owner=state.owner, before=state.status, now=now, denied=state.denied)
    if state.sync is None:
        return refuse(draft, problem=state.problem, reason=state.problem_reason)
    accept(draft, problem=state.problem, reason=state.problem_reason)
    if state.sync.spec.publishes is not None:
        _publish(draft, state, publisher_role(state.sync), desired)
        return draft.plan(figures=FIGURES)
    if state.sync.spec.source is not None:
        _write_follower_manifest(draft, state, desired)
    draft.fields |= dict.fromkeys(("job", "address", "certificate"))
    if state.job is not None:
        job = state.job.owner
        draft.fields |= {
            "job": job.name,
            "address": desired.address(job),
            "certificate": desired.certificate(job, FOLLOWER),
        }
    seen = state.job.probe.status if state.job is not None else None
    if state.job is None or state.job.status.phase not in ACTIVE:
        draft.conditions.set("Ready", False, *_why_none(state))
        draft.fields |= {"rollouts": 0, "followers": 0, "behind": 0, "serving": (), "lag": (), "laggards": ()}
    elif missing := [denial for denial in state.denied if denial.missing]:
        why = why_denied(missing)
        draft.conditions.set("Ready", False, why.reason, why.message)
    elif seen is None and (state.job.probe.asked or not draft.conditions.holds("Ready")):
        draft.conditions.set("Ready", False, "NoVersion", "The driver has not reported its versions yet")
    elif seen is not None:
        allowed = state.job.job.spec.schedule.max_staleness if state.job.job is not None else 0
        if state.sync.spec.source is None:
            _report(draft, seen, seen.versions, allowed=allowed)
        else:
            _report(draft, seen, _of_fleet(state.owner.name, seen), allowed=allowed, followed=True)
    return draft.plan(figures=FIGURES)


def _write_follower_manifest(draft: Draft[WeightsStatus], state: SyncState, desired: DesiredSync) -> None:
    """Add the writes of the manifest that followers of a job read."""
    supporting = upkeep(desired.sync_supporting(state), seen=state.objects)
    draft.add_first(supporting.write)
    owner = f"{state.owner.kind} {state.owner.name}"
    draft.notes.extend(restore_notes(supporting.changed, state.denied, owner=owner))


def _publish(draft: Draft[WeightsStatus], state: SyncState, role: Role, desired: DesiredSync) -> None:
    """Plan the pod of a publisher of a model, and report its answer in the status."""
    supporting = upkeep(desired.sync_supporting(state), seen=state.objects)
    before = state.status.failures.get(role.name, RoleRecord())
    ends = record_ends(role, state.pods, before, draft.alarm)
    record = track_single_pod(ends.record, state.pods, before=before)
    draft.notes.extend(ends.notes)
    moves = ReplicaMoves()
    if ends.failure is None:
        waits = state.namespace_ending or bool(needs(desired.sync_pod(state, 0), supporting.terminating))
        moves = plan_replicas(role, state.pods, record, may_make=not waits, alarm=draft.alarm)
    draft.fields |= {
        "failures": {role.name: record},
        "address": desired.address(state.owner),
        "certificate": desired.certificate(state.owner, FOLLOWER),
    }
    draft.delete_pods(moves.remove)
    make_alone(
        draft,
        moves.make,
        pod=lambda each: desired.sync_pod(state, each.attempt),
        roles=(role,),
        external_roles=(FOLLOWER,),
        pods=state.pods,
        supporting=supporting,
        denied=state.denied,
        desired=desired,
    )
    _report_publisher(draft, state, role, terminating=supporting.terminating)
    if ends.failure is not None:
        draft.conditions.set("Degraded", True, ends.failure.reason, ends.failure.message)
    elif draft.conditions.has("Degraded"):
        draft.conditions.set("Degraded", False, "Mended")


def _report_publisher(
    draft: Draft[WeightsStatus], state: SyncState, role: Role, *, terminating: Collection[Ref]
) -> None:
    """Report the versions of a publisher, or why it has none; before its first answer to this operator, neither."""
    probe, why, lacks = state.probe, why_waiting((role,), state), lacking((role,), ready_of(state.pods))
    if why is None and lacks:
        lost = why_lacking(lacks, state.pods, terminating=terminating, ran=False, alarm=draft.alarm)
        why = None if lost.reason == "Starting" else lost
    seen, is_unknown = probe.status, not probe.asked and not lacks and draft.conditions.holds("Ready")
    if seen is None or seen.versions.bytes is None:
        if not is_unknown:
            waits_for = f"waits for {seen.waiting_for}" if seen is not None and seen.waiting_for else ""
            why = why or Obstacle("NoVersion", f"The publisher {waits_for or 'has not published a version yet'}")
            draft.fields |= {"followers": 0, "behind": 0, "serving": (), "lag": (), "laggards": ()}
    elif why is None:
        _report(draft, seen, seen.versions, allowed=0, followed=True)
    if why is not None:
        draft.conditions.set("Ready", False, why.reason, why.message)


def _why_none(state: SyncState) -> tuple[str, str]:
    """Return why there are no versions, as a reason and a sentence."""
    if state.job is not None:
        return state.job.status.phase, f"RLJob {state.job.owner.name} publishes no versions now"
    source = state.sync.spec.source if state.sync is not None else None
    if source is not None:
        return "NoSource", f"spec.source.job = {source.job!r}: there is no such RLJob in this namespace"
    return "NoJob", "No RLJob names it in spec.weightSync.name"


def _of_fleet(name: str, seen: DriverStatus) -> VersionsState:
    """Return the versions of the followers of the WeightSync ``name``; of all the job's if the driver has no fleets."""
    if seen.fleets is None:
        return seen.versions
    published = PhaseSeconds(publish=seen.versions.seconds.publish)
    return seen.fleets.get(name) or VersionsState(bytes=seen.versions.bytes, seconds=published)


def _report(
    draft: Draft[WeightsStatus], seen: DriverStatus, versions: VersionsState, *, allowed: int, followed: bool = False
) -> None:
    draft.fields |= {name: getattr(versions, name) for name in _OF_DRIVER}
    took = {phase: four_digits(seconds) for phase, seconds in versions.seconds.model_dump().items()}
    draft.fields |= {"version": seen.version, "attempt": seen.attempt, "seconds": PhaseSeconds(**took)}
    kind, serving = ("follower", versions.followers) if followed else ("rollout", versions.rollouts)
    counted = f"{serving} {kind}{'' if serving == 1 else 's'} {'has' if serving == 1 else 'have'} a version"
    draft.conditions.set("Ready", serving > 0, "Serving" if serving else f"No{kind.title()}", counted)
    worst = max((each.lag for each in versions.laggards), default=0)
    if worst > allowed + (0 if draft.conditions.holds("Lagging") else 1):
        late = sum(versions.lag[min(allowed + 1, LAG_BUCKETS - 1) :])
        first = versions.laggards[0]
        cause = f"{first.id} by {first.lag}: {first.cause}"
        message = (
            f"{late} {'instance is' if late == 1 else 'instances are'} more than {allowed} versions behind, {cause}"
        )
        draft.conditions.set("Lagging", True, "Behind", message)
    else:
        draft.conditions.set("Lagging", False, "CaughtUp")
