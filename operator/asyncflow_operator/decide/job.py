"""Decision about one RLJob: what to do now.

The order of the questions is the order of this file: is it ours and legal, is it over, is it to be suspended, has
something ended, and only then: what is missing, what is too much, and what is there to tell.

Invariant: the plan's status says everything that its actions rely on, so it may be cut off after any of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from asyncflow.api.base import GROUP
from asyncflow.api.job import RLJob
from asyncflow.api.names import QUEUE_ROLES, labels
from asyncflow.api.status import JobStatus, RoleRecord
from asyncflow.plan import plan as plan_of
from asyncflow.plan.roles import Role
from asyncflow_operator.actions import Plan
from asyncflow_operator.decide.admission import (
    admitted,
    changeable,
    evicted,
    given_back,
    outgrown,
    pods_ready,
    released,
)
from asyncflow_operator.decide.builders import DesiredJob, needs, put_back, upkeep
from asyncflow_operator.decide.draft import Draft, accept, refuse
from asyncflow_operator.decide.elastic import Target, target
from asyncflow_operator.decide.ending import after_the_end, driver_of, finish, left_as, overdue, resumed, suspend
from asyncflow_operator.decide.failure import End, Verdict, end_of, take_stock
from asyncflow_operator.decide.gang import caught_up, tend_gang
from asyncflow_operator.decide.moments import read, written
from asyncflow_operator.decide.pending import why_lacking, why_pending
from asyncflow_operator.decide.phases import FINISHED, lacking, may_start, reached, ready_of
from asyncflow_operator.decide.progress import FIGURES, figures, judge
from asyncflow_operator.decide.scaling import Registered, still_leaving, tend_rollouts
from asyncflow_operator.decide.seats import Moves, tend
from asyncflow_operator.observed import JobState, PodView

MANAGER: Final = f"{GROUP}/operator"
"""Value of ``spec.managedBy`` that names this operator."""
_MOMENT_S: Final = 10.0
"""Seconds within which a pod that was put on record may still be on its way to the API server."""
_ELSEWHERE: Final = frozenset(QUEUE_ROLES)
"""Roles whose pods belong to the job's TransferQueue, which decides about them."""
_OUTGROWN: Final = (
    "Kueue has admitted the job as it was: what pods ask for beyond that is not counted until the job is suspended and "
    "resumed"
)
_UNFIT: Final = frozenset(("Refused", "BudgetExceeded"))
"""Reasons of a queue's condition Degraded with which its job cannot go on."""


def decide_job(state: JobState, *, now: float, desired: DesiredJob) -> Plan:
    """Return the plan for a job as it is at ``now`` (unix seconds)."""
    job, phase = state.job, state.status.phase
    if state.owner.deleting or (job is not None and job.spec.managed_by not in (None, MANAGER)):
        return Plan()
    draft = Draft(owner=state.owner, before=state.status, now=now)
    if job is None:
        draft.do_first(() if state.status.begun else given_back(state.objects))
        return refuse(draft, problem=state.problem, reason=state.problem_reason)
    if phase in FINISHED:
        return after_the_end(draft, state, job.spec)
    accept(draft, problem=state.problem, reason=state.problem_reason)
    if phase == "Suspending" or job.spec.suspend or evicted(state):
        return suspend(draft, state, job.spec)
    if phase == "Suspended":
        draft.fields |= resumed(state.status)
        draft.note("Resumed", "The job begins again from its checkpoint")
        state = replace(state, status=state.status.model_copy(update=draft.fields))
    return _Running(draft, state, job, desired).plan()


class _Running:
    """One look at a job that runs, or is to."""

    def __init__(self, draft: Draft[JobStatus], state: JobState, job: RLJob, desired: DesiredJob) -> None:
        self._draft = draft
        self._state = state
        self._job = job
        self._desired = desired
        self._roles = plan_of(job).roles
        self._ours = [role for role in self._roles if role.name not in _ELSEWHERE]
        self._ready = ready_of(state.pods)
        self._leaving = still_leaving(state.status.draining, state.pods)
        self._records = dict(state.status.failures)
        self._may_make = not state.namespace_ending and admitted(state)
        if not state.status.images:
            draft.fields |= {"images": desired.images(job)}
        self._pinned = replace(state, status=draft.after())
        supporting = desired.supporting(self._pinned)
        self._outgrown = outgrown(supporting, state.objects)
        self._kept = upkeep(
            [each for each in supporting if changeable(each, state.objects)],
            seen=state.objects,
            pods=state.pods,
            begins=self._may_make and driver_of(state) is None,
            alarm=draft.alarm,
        )

    def plan(self) -> Plan:
        draft, spec = self._draft, self._job.spec
        verdict = self._take_stock() or overdue(draft, spec)
        driver = driver_of(self._state)
        if driver is not None and end_of(driver) is End.DONE:
            if left_as(driver, self._state) in ("Suspending", "Suspended"):
                return suspend(draft, self._state, spec)
            finish(draft, self._state, None)
        elif verdict is not None:
            finish(draft, self._state, verdict)
        else:
            wanted = target(spec, self._state, draft.alarm)
            self._tell(wanted, staying=self._act(wanted))
        return draft.plan(figures=FIGURES)

    def _take_stock(self) -> Verdict | None:
        """Enter what ended into the records."""
        leaving = {each.uid for each in self._leaving}
        verdict = _verdict_of_queue(self._state)
        for role in self._ours:
            pods = [pod for pod in self._pods(role) if pod.uid not in leaving]
            record = self._records.get(role.name, RoleRecord())
            if role.gang:
                record = caught_up(record, pods, known=self._known_attempt())
            stock = take_stock(role, pods, record, self._draft.alarm)
            self._records[role.name] = stock.record
            verdict = verdict or stock.verdict
            self._draft.notes.extend(stock.notes)
        self._draft.fields |= self._remembered()
        return verdict

    def _act(self, wanted: Target) -> int:
        """Fill seats and empty them; give the rollouts that stay."""
        moves, staying = Moves(), 0
        for role in self._ours:
            pods, record = self._pods(role), self._records[role.name]
            if role.gang:
                self._records[role.name], more, notes = tend_gang(
                    role,
                    pods,
                    record,
                    open_=self._open(role),
                    unmade=any(denial.missing for denial in self._state.denied) or self._just_written(),
                    alarm=self._draft.alarm,
                )
                self._draft.notes.extend(notes)
            elif role.name == "rollout":
                crew = tend_rollouts(
                    role,
                    pods,
                    record,
                    target=wanted.replicas,
                    leaving=self._leaving,
                    registered=Registered.of(self._state.probe, self._draft.now),
                    drain_s=self._job.spec.rollout.drain_seconds,
                    open_=self._open(role),
                    alarm=self._draft.alarm,
                    core=role.core if self._job.spec.scheduling.gang != "none" else 0,
                )
                more, staying = crew.moves, crew.staying
                self._draft.fields["draining"] = crew.leaving
            else:
                more = tend(role, pods, record, open_=self._open(role), alarm=self._draft.alarm)
            moves += more
        self._draft.fields |= self._remembered() | wanted.fields
        self._carry_out(moves)
        return staying

    def _carry_out(self, moves: Moves) -> None:
        draft, state, desired = self._draft, self._pinned, self._desired
        if moves.make and state.status.start_time is None:
            draft.fields |= {"start_time": written(draft.now)}
        draft.take_away(moves.remove)
        draft.do_first(released(state))
        draft.do_first(moves.ask)
        if not state.namespace_ending:
            children = upkeep(desired.children(state), seen=state.objects, alarm=draft.alarm)
            pods = (desired.pod(state, seat.role, seat.index, seat.attempt) for seat in moves.make)
            draft.do_first(self._kept.write)
            draft.do_then(children.write)
            draft.do_then(self._kept.with_needs(pods))
            changed = self._kept.changed + children.changed
            draft.notes.extend(put_back(changed, state.denied, owner=f"RLJob {self._job.name}"))

    def _tell(self, wanted: Target, *, staying: int) -> None:
        """Record how far the job is."""
        draft, state, spec = self._draft, self._state, self._job.spec
        rollouts = [pod for pod in state.pods if pod.role == "rollout"]
        begun = any(self._records[role.name].begun for role in self._ours if role.gang)
        phase = reached(state.status.phase, self._roles, state.pods, self._ready, begun=begun)
        draft.fields |= figures(state.probe.status, rollouts) if state.probe.asked else {}
        selector = ",".join(f"{key}={value}" for key, value in labels(self._job.name, "rollout").items())
        draft.fields |= {"phase": phase, "replicas": staying, "selector": selector}
        if phase == "Running" != state.status.phase:
            draft.note(phase, "The job is running")
        board, lacks = draft.board, lacking(self._roles, self._ready)
        if self._outgrown and not state.problem:
            board.say("Accepted", True, "Accepted", _OUTGROWN)
        board.say(
            "Ready", not lacks, "Waiting" if lacks else "Ready", f"Only {', '.join(lacks)} ready" if lacks else ""
        )
        draft.do_then(pods_ready(state.objects, lacks=lacks, now=draft.now))
        why = why_pending(self._roles, state)
        if why is None and lacks:
            why = why_lacking(lacks, state.pods, going=self._kept.going, ran=phase == "Running", alarm=draft.alarm)
        if why is not None and why.reason == "Denied" and not board.says("WhyPending", why.message):
            draft.note(why.reason, why.message, warning=True)
        board.say("WhyPending", why is not None, why.reason if why else "NothingPending", why.message if why else "")
        if phase == "Running":
            trainers = [pod for pod in state.pods if pod.role == "trainer"]
            judge(
                board, limits=spec.limits, status=state.status, probe=state.probe, trainers=trainers, alarm=draft.alarm
            )
        stalled = any(each.type == "Stalled" and each.status == "True" for each in board.shown)
        board.say("Progressing", not stalled, "Stalled" if stalled else phase)
        if board.has("Suspended"):
            board.say("Suspended", False, "Resumed")
        if wanted.acts is None:
            board.drop("ElasticityActive")
        else:
            board.say("ElasticityActive", wanted.acts, wanted.reason, wanted.message)

    def _open(self, role: Role) -> bool:
        """Return whether pods of ``role`` may be made now."""
        ran, gang = self._state.status.phase == "Running", self._job.spec.scheduling.gang
        if not (self._may_make and may_start(role, self._roles, self._ready, ran=ran, gang=gang)):
            return False
        going = self._kept.going
        return not (going and needs(self._desired.pod(self._pinned, role.name, 0, 0), going))

    def _pods(self, role: Role) -> list[PodView]:
        return [pod for pod in self._state.pods if pod.role == role.name]

    def _known_attempt(self) -> int:
        """The newest attempt of the trainer that is known beside its record and its pods."""
        seen = self._state.probe.status
        return max(self._state.status.attempt, seen.attempt if seen is not None else 0)

    def _just_written(self) -> bool:
        """Return whether the status was written so lately that what it says may not have come about yet."""
        since = read(self._state.status.progress_time)
        return since is not None and 0 <= self._draft.now - since < _MOMENT_S

    def _remembered(self) -> dict[str, Any]:
        """Return the records as fields of the status."""
        queue = self._state.queue
        every = self._records | (queue.failures if queue is not None else {})
        trainer = self._records.get("trainer", RoleRecord())
        return {
            "failures": dict(self._records),
            "attempt": trainer.attempt,
            "restarts": {name: record.restarts for name, record in every.items() if record.restarts},
        }


def _verdict_of_queue(state: JobState) -> Verdict | None:
    """Return the verdict where the job's own queue cannot go on, else None."""
    for condition in state.queue.conditions if state.queue is not None else ():
        if condition.type == "Degraded" and condition.status == "True" and condition.reason in _UNFIT:
            return Verdict(condition.reason, condition.message)
    return None
