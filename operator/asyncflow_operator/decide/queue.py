"""Decision about one TransferQueue, of a job or without one: its controllers and storage units.

A job's own queue has pods while its job is active; the job deletes them when it ends. The ends of controllers and units
are recorded here. The condition Degraded reports a failure that no restart fixes, and the job reads it.

Invariant: the units of a queue are numbered 0 to n - 1, and are added and removed at the upper end only. A unit that is
removed has ``DRAIN_S`` seconds to move its rows to the others, and its holder is removed after it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from asyncflow.api.names import CLIENT, LABEL_JOB, LABEL_QUEUE, LABEL_ROLE, QUEUE_ROLES, RPC_PORT, RoleName, service
from asyncflow.api.queue import QueueStatus, TransferQueue
from asyncflow.api.records import RoleRecord
from asyncflow.plan import plan as plan_of
from asyncflow.plan.queue import queue_roles
from asyncflow.plan.roles import Role
from asyncflow_operator.actions import Plan
from asyncflow_operator.decide.admission import admitted
from asyncflow_operator.decide.alone import make_alone
from asyncflow_operator.decide.draft import Draft, accept, refuse
from asyncflow_operator.decide.failure import FailureResult, record_ends
from asyncflow_operator.decide.pending import Obstacle, why_denied, why_lacking, why_waiting
from asyncflow_operator.decide.progress import ACTIVE, lacking, may_start, ready_of
from asyncflow_operator.decide.replicas import PodReplica, ReplicaMoves, plan_replicas
from asyncflow_operator.decide.secrets import certified
from asyncflow_operator.decide.upkeep import DesiredQueue, Upkeep, needs, upkeep, with_needs
from asyncflow_operator.observed import JobState, Manifest, PodView, Ref, TransferQueueState

FIGURES: Final = frozenset(("rows", "bytes", "limit", "ready_units"))
"""Fields of a queue's status whose changes may be written with a delay."""


@dataclass(frozen=True, slots=True)
class _Setting:
    """Setting of a queue: its own roles, all roles that it waits for and their pods, and whether it may have pods."""

    roles: tuple[Role, ...]
    all_roles: tuple[Role, ...]
    pods: tuple[PodView, ...]
    active: bool
    ran: bool
    gang: str
    admitted: bool
    address: str
    selector: str


def decide_queue(state: TransferQueueState, *, now: float, desired: DesiredQueue) -> Plan:
    """Return the plan for a queue as it is at ``now`` (unix seconds)."""
    if state.owner.deleting:
        return Plan()
    draft = Draft(owner=state.owner, before=state.status, now=now, denied=state.denied)
    if state.job is not None:
        setting = _of_job(state, state.job)
        accept(draft, problem="", reason="", message=f"It follows RLJob {state.job.owner.name}: change that instead")
    elif state.queue is not None:
        setting = _alone(state, state.queue)
        accept(draft, problem=state.problem, reason=state.problem_reason)
    else:
        return refuse(draft, problem=state.problem, reason=state.problem_reason)
    supporting = _upkeep(state, desired) if setting.active else None
    failure = None if supporting is None else _act(draft, state, setting, desired, supporting)
    _report(draft, state, setting, failure, terminating=() if supporting is None else supporting.terminating)
    return draft.plan(figures=FIGURES)


def _alone(state: TransferQueueState, queue: TransferQueue) -> _Setting:
    owner, roles = state.owner, queue_roles(queue)
    return _Setting(
        roles=roles,
        all_roles=roles,
        pods=state.pods,
        active=not state.namespace_ending,
        ran=any(each.type == "Ready" and each.status == "True" for each in state.status.conditions),
        gang="none",
        admitted=True,
        address=_address(owner.name, owner.namespace, "controller"),
        selector=f"{LABEL_QUEUE}={owner.name},{LABEL_ROLE}=storage",
    )


def _of_job(state: TransferQueueState, job: JobState) -> _Setting:
    """Return the setting of a job's queue, from the job's spec, from which the queue's own spec is derived."""
    planned = plan_of(job.job).roles if job.job is not None else ()
    roles = tuple(role for role in planned if role.name in QUEUE_ROLES)
    spec = job.job.spec if job.job is not None else None
    gang = spec.scheduling.gang if spec is not None else "none"
    active = spec is not None and not spec.suspend and not job.owner.deleting and job.status.phase in ACTIVE
    return _Setting(
        roles=roles,
        all_roles=planned,
        pods=job.pods,
        active=active and not state.namespace_ending,
        ran=job.status.phase == "Running",
        gang=gang,
        admitted=admitted(job),
        address=_address(job.owner.name, job.owner.namespace, "driver"),
        selector=f"{LABEL_JOB}={job.owner.name},{LABEL_ROLE}=storage",
    )


def _address(name: str, namespace: str, role: RoleName) -> str:
    return f"tcp://{service(name, role)}.{namespace}.svc:{RPC_PORT}"


def _act(
    draft: Draft[QueueStatus],
    state: TransferQueueState,
    setting: _Setting,
    desired: DesiredQueue,
    supporting_upkeep: Upkeep,
) -> FailureResult | None:
    """Record ends of pods, plan pods to create and delete, and return why the queue cannot continue, None if it can."""
    ready, failure, moves = ready_of(setting.pods), None, ReplicaMoves()
    records = dict(state.status.failures)
    for role in setting.roles:
        pods = [pod for pod in state.pods if pod.role == role.name and not _holds_for(pod, role, state.pods)]
        wanted = [pod for pod in pods if pod.index < role.replicas]
        ends = record_ends(role, wanted, records.get(role.name, RoleRecord()), draft.alarm)
        records[role.name] = ends.record
        draft.notes.extend(ends.notes)
        failure = failure or ends.failure
        if ends.failure is None:
            may = setting.admitted and may_start(role, setting.all_roles, ready, ran=setting.ran, gang=setting.gang)
            waits = supporting_upkeep.terminating if state.job is None else supporting_upkeep.absent
            if may and waits:
                may = not needs(desired.queue_pod(state, role.name, 0, 0), waits)
            moves += plan_replicas(role, pods, ends.record, may_make=may, alarm=draft.alarm)
    draft.fields["failures"] = records
    draft.delete_pods(moves.remove)

    def pod(replica: PodReplica) -> Manifest:
        return desired.queue_pod(state, replica.role, replica.index, replica.attempt)

    if state.job is not None:
        job, secrets = state.job.owner, state.job.status.secrets
        made = certified(job, moves.make, records=secrets, now=draft.now)
        draft.add_then(with_needs(map(pod, made), supporting_upkeep.absent))
    else:
        make_alone(
            draft,
            moves.make,
            pod=pod,
            roles=setting.roles,
            external_roles=(CLIENT,),
            pods=state.pods,
            supporting=supporting_upkeep,
            denied=state.denied,
            desired=desired,
        )
    return failure


def _upkeep(state: TransferQueueState, desired: DesiredQueue) -> Upkeep:
    """Compare the objects that the pods need; those of a job's queue are created by the job and must exist first."""
    if state.job is not None:
        return upkeep(desired.supporting(state.job), seen=state.job.objects)
    return upkeep(desired.queue_supporting(state), seen=state.objects)


def _holds_for(pod: PodView, role: Role, pods: Collection[PodView]) -> bool:
    """Return whether ``pod`` is a surplus holder whose unit still exists, so that it still stores the unit's rows."""
    units = {each.index for each in pods if each.role == "storage"}
    return role.name == "holder" and pod.index >= role.replicas and pod.index in units


def _report(
    draft: Draft[QueueStatus],
    state: TransferQueueState,
    setting: _Setting,
    failure: FailureResult | None,
    *,
    terminating: Collection[Ref],
) -> None:
    conditions, ready = draft.conditions, ready_of(state.pods)
    draft.fields |= {"address": setting.address, "selector": setting.selector, "ready_units": ready["storage"]}
    draft.fields |= _figures(state.job)
    if not setting.active:
        phase = state.job.status.phase if state.job is not None else ""
        reason = phase if phase and phase not in ACTIVE else "Inactive"
        for kind in ("Ready", "Progressing"):
            conditions.set(kind, False, reason)
        return
    lacks = lacking(setting.roles, ready)
    denied = why_denied(state.denied) if state.denied else None
    if lacks:
        why = why_waiting(setting.roles, state) or failure
        only = f"Only {', '.join(lacks)} ready"
        if state.job is not None:
            why = Obstacle("Waiting", only)
        elif why is not None:
            why = Obstacle(why.reason, f"{only}. {why.message}")
        else:
            why = why_lacking(lacks, state.pods, terminating=terminating, ran=False, alarm=draft.alarm)
        conditions.set("Ready", False, why.reason, why.message)
    else:
        conditions.set("Ready", True, "Ready")
    if denied is not None:
        if state.job is None and not conditions.has_message("Progressing", denied.message):
            draft.note(denied.reason, denied.message, warning=True)
        conditions.set("Progressing", False, denied.reason, denied.message)
    else:
        conditions.set("Progressing", bool(lacks) and failure is None, "Starting" if lacks else "Settled")
    if failure is not None:
        conditions.set("Degraded", True, failure.reason, failure.message)
    elif conditions.has("Degraded"):
        conditions.set("Degraded", False, "Mended")


def _figures(job: JobState | None) -> dict[str, Any]:
    """Return the figures of the queue that the job's driver reports; a queue without a job has none."""
    if job is None:
        return {}
    seen = job.probe.status
    if seen is None:
        ended = {**dict.fromkeys(("rows", "bytes", "limit")), "partitions": 0}
        return {} if job.status.phase in ACTIVE else ended
    depth = seen.queue
    return {
        "rows": depth.ready + depth.leased + depth.staged,
        "bytes": depth.bytes,
        "limit": depth.limit,
        "partitions": int(job.status.phase in ACTIVE),
    }
