"""Decision about one RLJob.

The checks are made in the order of this file: whether the job belongs to this operator and is valid, whether it has
finished, whether it must be suspended, whether a process has ended; then which pods are missing, which are surplus, and
the new status.

Invariant: the status of a plan contains everything on which its actions rely, so the plan may be interrupted after any
action.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from asyncflow.api.job import RLJob
from asyncflow.api.names import FOLLOWER, GROUP, QUEUE_ROLES, VIEWER, labels
from asyncflow.api.records import RoleRecord
from asyncflow.api.status import JobStatus
from asyncflow.plan import plan as plan_of
from asyncflow.plan.roles import Role
from asyncflow_operator.actions import Apply, Plan
from asyncflow_operator.decide.admission import (
    admitted,
    changeable,
    delete_gang,
    evicted,
    outgrown,
    pods_ready,
    release_pods,
)
from asyncflow_operator.decide.draft import Draft, accept, refuse
from asyncflow_operator.decide.ending import (
    clean_up,
    deadline_exceeded,
    driver_of,
    final_phase,
    finish,
    resumed,
    suspend,
)
from asyncflow_operator.decide.failure import FailureResult, PodEnd, end_of, record_ends
from asyncflow_operator.decide.pending import EVENT_REASONS, why_lacking, why_pending
from asyncflow_operator.decide.progress import (
    FIGURES,
    FINISHED,
    figures,
    lacking,
    may_start,
    one_line,
    reached,
    ready_of,
    set_stalled,
)
from asyncflow_operator.decide.replicas import ReplicaMoves, caught_up, plan_gang, plan_replicas, track_single_pod
from asyncflow_operator.decide.rollouts import RegisteredRollouts, Target, plan_rollouts, still_draining, target
from asyncflow_operator.decide.secrets import certified, secret_upkeep
from asyncflow_operator.decide.times import from_rfc3339, to_rfc3339
from asyncflow_operator.decide.upkeep import DesiredJob, needs, restore_notes, upkeep, with_needs
from asyncflow_operator.observed import JobState, PodView

MANAGER: Final = f"{GROUP}/operator"
"""Value of ``spec.managedBy`` that names this operator."""
_JUST_WRITTEN_S: Final = 10.0
"""Seconds within which a recorded pod may not have been created at the API server yet."""
_OF_QUEUE: Final = frozenset(QUEUE_ROLES)
"""Roles whose pods belong to the job's TransferQueue and are decided there."""
_OUTGROWN: Final = (
    "Kueue has admitted the job with its earlier requests: additional requests of pods are not counted until the job "
    "is suspended and resumed"
)


def decide_job(state: JobState, *, now: float, desired: DesiredJob) -> Plan:
    """Return the plan for a job as it is at ``now`` (unix seconds)."""
    job, phase = state.job, state.status.phase
    if state.owner.deleting or (job is not None and job.spec.managed_by not in (None, MANAGER)):
        return Plan()
    draft = Draft(owner=state.owner, before=state.status, now=now, denied=state.denied)
    if job is None:
        draft.add_first(() if state.status.begun else delete_gang(state.objects, why="the job is refused"))
        return refuse(draft, problem=state.problem, reason=state.problem_reason)
    if phase in FINISHED:
        return clean_up(draft, state, job.spec)
    accept(draft, problem=state.problem, reason=state.problem_reason)
    if phase == "Suspending" or job.spec.suspend or evicted(state):
        return suspend(draft, state, job.spec)
    if phase == "Suspended":
        draft.fields |= resumed(state.status)
        draft.note("Resumed", "The job is no longer suspended")
        state = replace(state, status=state.status.model_copy(update=draft.fields))
    return _Running(draft, state, job, desired).plan()


class _Running:
    """Decision about a job that runs or is to run."""

    def __init__(self, draft: Draft[JobStatus], state: JobState, job: RLJob, desired: DesiredJob) -> None:
        self._draft = draft
        self._state = state
        self._job = job
        self._desired = desired
        self._roles = plan_of(job).roles
        self._own_roles = [role for role in self._roles if role.name not in _OF_QUEUE]
        self._ready = ready_of(state.pods)
        self._draining = still_draining(state.status.draining, state.pods)
        self._records = dict(state.status.failures)
        self._may_make = not state.namespace_ending and admitted(state)
        if not state.status.images:
            draft.fields |= {"images": desired.images(job)}
        if job.spec.weight_sync.name is not None:
            draft.fields |= {"weights": job.spec.weight_sync.own}
        self._pinned = replace(state, status=draft.after())
        supporting = desired.supporting(self._pinned)
        self._outgrown = outgrown(supporting, state.objects)
        self._upkeep = upkeep([each for each in supporting if changeable(each, state.objects)], seen=state.objects)

    def plan(self) -> Plan:
        draft, spec = self._draft, self._job.spec
        failure = self._record_ends() or deadline_exceeded(draft, spec)
        driver = driver_of(self._state)
        if driver is not None and end_of(driver) is PodEnd.DONE:
            if final_phase(driver, self._state) in ("Suspending", "Suspended"):
                return suspend(draft, self._state, spec)
            finish(draft, self._state, None)
        elif failure is not None:
            finish(draft, self._state, failure)
        else:
            wanted = target(spec, self._state, draft.alarm)
            self._report(wanted, staying=self._act(wanted))
        return draft.plan(figures=FIGURES)

    def _record_ends(self) -> FailureResult | None:
        """Enter the ends of pods into the records, and return a failure of the job that follows."""
        draining = {each.uid for each in self._draining}
        failure = _queue_failure(self._state)
        for role in self._own_roles:
            pods = [pod for pod in self._pods(role) if pod.uid not in draining]
            record = self._records.get(role.name, RoleRecord())
            if role.gang:
                record = caught_up(record, pods, known=self._known_attempt())
            ends = record_ends(role, pods, record, self._draft.alarm)
            self._records[role.name] = (
                track_single_pod(ends.record, pods, before=record) if role.leader else ends.record
            )
            failure = failure or ends.failure
            self._draft.notes.extend(ends.notes)
        self._draft.fields |= self._record_fields()
        return failure

    def _act(self, wanted: Target) -> int:
        """Plan the pods to create and to delete, and return the number of rollouts that stay."""
        moves, staying = ReplicaMoves(), 0
        for role in self._own_roles:
            pods, record = self._pods(role), self._records[role.name]
            if role.gang:
                self._records[role.name], more, notes = plan_gang(
                    role,
                    pods,
                    record,
                    may_make=self._may_make_pods(role),
                    never_made=any(denial.missing for denial in self._state.denied) or self._just_written(),
                    alarm=self._draft.alarm,
                )
                self._draft.notes.extend(notes)
            elif role.name == "rollout":
                rollouts = plan_rollouts(
                    role,
                    pods,
                    record,
                    target=wanted.replicas,
                    draining=self._draining,
                    registered=RegisteredRollouts.of(self._state.probe, self._draft.now),
                    drain_s=self._job.spec.rollout.drain_seconds,
                    may_make=self._may_make_pods(role),
                    alarm=self._draft.alarm,
                    core=role.core if self._job.spec.scheduling.gang != "none" else 0,
                )
                more, staying = rollouts.moves, rollouts.staying
                self._draft.fields["draining"] = rollouts.draining
            else:
                more = plan_replicas(role, pods, record, may_make=self._may_make_pods(role), alarm=self._draft.alarm)
            moves += more
        self._draft.fields |= self._record_fields() | wanted.fields
        self._carry_out(moves)
        return staying

    def _carry_out(self, moves: ReplicaMoves) -> None:
        draft, state, desired = self._draft, self._pinned, self._desired
        if moves.make and state.status.start_time is None:
            draft.fields |= {"start_time": to_rfc3339(draft.now)}
        draft.delete_pods(moves.remove)
        draft.add_first(release_pods(state))
        draft.add_first(moves.orders)
        if not state.namespace_ending:
            children = upkeep(desired.children(state), seen=state.objects)
            pods = self._make_pods(moves)
            draft.add_first(self._upkeep.write)
            draft.add_then(children.write)
            draft.add_then(pods)
            changed = self._upkeep.changed + children.changed
            draft.notes.extend(restore_notes(changed, state.denied, owner=f"RLJob {self._job.name}"))

    def _make_pods(self, moves: ReplicaMoves) -> Iterable[Apply]:
        """Return the creation of pods, and add the writes of the Secrets of the job and its own queue to the draft."""
        draft, state, desired = self._draft, self._pinned, self._desired
        if not (self._may_make or state.pods):
            return ()
        secrets = secret_upkeep(
            state.owner,
            self._roles,
            external_roles=(VIEWER, FOLLOWER),
            pods=state.pods,
            made=moves.make,
            records=state.status.secrets,
            desired=desired,
            alarm=draft.alarm,
        )
        draft.keep_secrets(secrets)
        ready = certified(state.owner, moves.make, records=secrets.records, now=draft.now)
        pods = (desired.pod(state, replica.role, replica.index, replica.attempt) for replica in ready)
        return with_needs(pods, {**self._upkeep.absent, **secrets.needed})

    def _report(self, wanted: Target, *, staying: int) -> None:
        """Write the progress of the job into the draft."""
        draft, state, spec = self._draft, self._state, self._job.spec
        rollouts = [pod for pod in state.pods if pod.role == "rollout"]
        begun = any(self._records[role.name].begun for role in self._own_roles if role.gang)
        phase = reached(state.status.phase, self._roles, state.pods, self._ready, begun=begun)
        draft.fields |= figures(state.probe.status, rollouts) if state.probe.asked else {}
        selector = ",".join(f"{key}={value}" for key, value in labels(self._job.name, "rollout").items())
        draft.fields |= {"phase": phase, "replicas": staying, "selector": selector}
        if phase == "Running" != state.status.phase:
            draft.note(phase, "The job is running")
        conditions, lacks = draft.conditions, lacking(self._roles, self._ready)
        if self._outgrown and not state.problem:
            conditions.set("Accepted", True, "Accepted", _OUTGROWN)
        conditions.set(
            "Ready", not lacks, "Waiting" if lacks else "Ready", f"Only {', '.join(lacks)} ready" if lacks else ""
        )
        draft.add_then(pods_ready(state.objects, lacks=lacks, now=draft.now))
        why = why_pending(self._roles, state)
        if why is None and lacks:
            terminating = self._upkeep.terminating
            why = why_lacking(lacks, state.pods, terminating=terminating, ran=phase == "Running", alarm=draft.alarm)
        if why is not None and why.reason in EVENT_REASONS and not conditions.has_message("WhyPending", why.message):
            draft.note(why.reason, why.message, warning=True)
        conditions.set(
            "WhyPending", why is not None, why.reason if why else "NothingPending", why.message if why else ""
        )
        if state.probe.status is None and (why is not None or state.probe.asked):
            draft.fields["waiting_for"] = one_line(why.message) if why is not None else ""
        if phase == "Running":
            trainers = [pod for pod in state.pods if pod.role == "trainer"]
            set_stalled(
                conditions,
                limits=spec.limits,
                status=state.status,
                probe=state.probe,
                trainers=trainers,
                alarm=draft.alarm,
            )
        stalled = conditions.holds("Stalled")
        conditions.set("Progressing", not stalled, "Stalled" if stalled else phase)
        if conditions.has("Suspended"):
            conditions.set("Suspended", False, "Resumed")
        if wanted.acts is None:
            conditions.drop("ElasticityActive")
        else:
            conditions.set("ElasticityActive", wanted.acts, wanted.reason, wanted.message)

    def _may_make_pods(self, role: Role) -> bool:
        """Return whether pods of ``role`` may be created now."""
        ran, gang = self._state.status.phase == "Running", self._job.spec.scheduling.gang
        if not (self._may_make and may_start(role, self._roles, self._ready, ran=ran, gang=gang)):
            return False
        terminating = self._upkeep.terminating
        return not (terminating and needs(self._desired.pod(self._pinned, role.name, 0, 0), terminating))

    def _pods(self, role: Role) -> list[PodView]:
        return [pod for pod in self._state.pods if pod.role == role.name]

    def _known_attempt(self) -> int:
        """Return the newest attempt of the trainer that the status and the driver's answer show."""
        seen = self._state.probe.status
        return max(self._state.status.attempt, seen.attempt if seen is not None else 0)

    def _just_written(self) -> bool:
        """Return whether the status was written so recently that its pods may not exist yet."""
        since = from_rfc3339(self._state.status.progress_time)
        return since is not None and 0 <= self._draft.now - since < _JUST_WRITTEN_S

    def _record_fields(self) -> dict[str, Any]:
        """Return the records as fields of the status."""
        queue = self._state.queue
        all_records = self._records | (queue.failures if queue is not None else {})
        trainer = self._records.get("trainer", RoleRecord())
        return {
            "failures": dict(self._records),
            "attempt": trainer.attempt,
            "restarts": {name: record.restarts for name, record in all_records.items() if record.restarts},
        }


def _queue_failure(state: JobState) -> FailureResult | None:
    """Return the failure if the job's own queue cannot continue, None otherwise."""
    for condition in state.queue.conditions if state.queue is not None else ():
        if condition.type == "Degraded" and condition.status == "True":
            return FailureResult(condition.reason, condition.message)
    return None
