"""What to do about one TransferQueue now: controllers and storage units, of a job or of a queue that stands alone.

A job's own queue has pods while its job is active; the job takes them away when it ends. The ends of controllers and
units are entered here, and what cannot be mended is said by the condition Degraded, which the job reads.

Invariant: units come and go in order, and only at the upper end: the units of a queue are 0 to n - 1. One that goes has
``LEAVE_S`` seconds to take its rows to the others, and its holder goes after it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Final

from asyncflow.api.names import LABEL_JOB, LABEL_QUEUE, LABEL_ROLE, QUEUE_ROLES, RPC_PORT, RoleName, service
from asyncflow.api.queue import QueueStatus, TransferQueue
from asyncflow.api.status import RoleRecord
from asyncflow.plan import plan as plan_of
from asyncflow.plan.roles import Role
from asyncflow_operator.actions import Apply, Plan
from asyncflow_operator.decide.admission import admitted, released
from asyncflow_operator.decide.builders import DesiredQueue, stale
from asyncflow_operator.decide.draft import Draft, refuse
from asyncflow_operator.decide.failure import Verdict, take_stock
from asyncflow_operator.decide.phases import ACTIVE, lacking, may_start, ready_of
from asyncflow_operator.decide.seats import Moves, tend
from asyncflow_operator.desired.queues import queue_roles
from asyncflow_operator.observed import JobState, PodView, QueueState

FIGURES: Final = frozenset(("rows", "bytes", "limit", "ready_units"))
"""Fields of a queue's status that may wait."""


@dataclass(frozen=True, slots=True)
class _Setting:
    """Where a queue stands: its roles, who they wait for, whether pods may be made at all, and the address to dial."""

    roles: tuple[Role, ...]
    around: tuple[Role, ...]
    pods: tuple[PodView, ...]
    active: bool
    ran: bool
    gang: str
    admitted: bool
    address: str
    selector: str


def decide_queue(state: QueueState, *, now: float, desired: DesiredQueue) -> Plan:
    """Give the plan for a queue as it is at ``now`` (unix seconds)."""
    if state.owner.deleting:
        return Plan()
    draft = Draft(owner=state.owner, before=state.status, now=now)
    if state.queue is None:
        return refuse(draft, problem=state.problem, reason=state.problem_reason)
    setting = _alone(state, state.queue) if state.job is None else _of_job(state, state.queue, state.job)
    draft.board.say("Accepted", True, "Accepted")
    verdict = _act(draft, state, setting, desired) if setting.active else None
    _tell(draft, state, setting, verdict)
    return draft.plan(figures=FIGURES)


def _alone(state: QueueState, queue: TransferQueue) -> _Setting:
    owner, roles = state.owner, queue_roles(queue)
    return _Setting(
        roles=roles,
        around=roles,
        pods=state.pods,
        active=not state.namespace_ending,
        ran=any(each.type == "Ready" and each.status == "True" for each in state.status.conditions),
        gang="none",
        admitted=True,
        address=_address(owner.name, owner.namespace, "controller"),
        selector=f"{LABEL_QUEUE}={owner.name},{LABEL_ROLE}=storage",
    )


def _of_job(state: QueueState, queue: TransferQueue, job: JobState) -> _Setting:
    planned = plan_of(job.job).roles if job.job is not None else ()
    units = queue.spec.storage_units
    roles = tuple(
        replace(role, replicas=units, core=units, most=units) if role.name in ("holder", "storage") else role
        for role in planned
        if role.name in QUEUE_ROLES
    )
    spec = job.job.spec if job.job is not None else None
    gang = spec.scheduling.gang if spec is not None else "none"
    active = spec is not None and not spec.suspend and not job.owner.deleting and job.status.phase in ACTIVE
    return _Setting(
        roles=roles,
        around=planned,
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


def _act(draft: Draft[QueueStatus], state: QueueState, setting: _Setting, desired: DesiredQueue) -> Verdict | None:
    """Enter what ended, fill seats and empty them; give why the queue cannot go on."""
    ready, verdict, moves = ready_of(setting.pods), None, Moves()
    records = dict(state.status.failures)
    for role in setting.roles:
        pods = [pod for pod in state.pods if pod.role == role.name and not _holds_for(pod, role, state.pods)]
        wanted = [pod for pod in pods if pod.index < role.replicas]
        stock = take_stock(role, wanted, records.get(role.name, RoleRecord()), draft.alarm)
        records[role.name] = stock.record
        draft.notes.extend(stock.notes)
        verdict = verdict or stock.verdict
        if state.job is not None:
            draft.do_first(released(state.job, role, pods))
        if stock.verdict is None:
            may = may_start(role, setting.around, ready, ran=setting.ran, gang=setting.gang)
            moves += tend(role, pods, stock.record, open_=may and setting.admitted, alarm=draft.alarm)
    draft.fields["failures"] = records
    begins = any(seat.role == "controller" for seat in moves.make)
    draft.take_away(moves.remove)
    draft.do_first(stale(desired.queue_supporting(state), seen=state.objects, pods=state.pods, begins=begins))
    draft.do_then(Apply(manifest=desired.queue_pod(state, seat.role, seat.index, seat.attempt)) for seat in moves.make)
    return verdict


def _holds_for(pod: PodView, role: Role, pods: Collection[PodView]) -> bool:
    """Tell whether ``pod`` is a holder too many whose unit is still there: its rows lie here until they have moved."""
    units = {each.index for each in pods if each.role == "storage"}
    return role.name == "holder" and pod.index >= role.replicas and pod.index in units


def _tell(draft: Draft[QueueStatus], state: QueueState, setting: _Setting, verdict: Verdict | None) -> None:
    board, ready = draft.board, ready_of(state.pods)
    draft.fields |= {"address": setting.address, "selector": setting.selector, "ready_units": ready["storage"]}
    draft.fields |= _figures(state.job)
    if not setting.active:
        phase = state.job.status.phase if state.job is not None else ""
        reason = phase if phase and phase not in ACTIVE else "Inactive"
        for kind in ("Ready", "Progressing"):
            board.say(kind, False, reason)
        return
    lacks = lacking(setting.roles, ready)
    board.say("Ready", not lacks, "Waiting" if lacks else "Ready", f"Only {', '.join(lacks)} ready" if lacks else "")
    if state.denied:
        board.say("Progressing", False, "Denied", f"The API server refused {state.denied}")
    else:
        board.say("Progressing", bool(lacks) and verdict is None, "Starting" if lacks else "Settled")
    if verdict is not None:
        board.say("Degraded", True, verdict.reason, verdict.message)
    elif board.has("Degraded"):
        board.say("Degraded", False, "Mended")


def _figures(job: JobState | None) -> dict[str, Any]:
    """Give what the job's driver says of the queue; of a queue that stands alone nobody says it."""
    seen = job.probe.status if job is not None else None
    if job is None or seen is None:
        return {}
    depth = seen.queue
    return {
        "rows": depth.ready + depth.leased + depth.staged,
        "bytes": depth.bytes,
        "limit": depth.limit,
        "partitions": int(job.status.phase in ACTIVE),
    }
