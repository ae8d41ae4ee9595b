"""The end of a job: for good, or until it is resumed. What is told, what goes, and what stays to be read.

Suspending asks the driver for a checkpoint and waits until it has ended, or its time is over; only then pods go.

Invariants: a finished job stays as it finished; a suspended job has no pods; while a job ends, no end is a failure and
nothing is made.
"""

from __future__ import annotations

from typing import Any, Final

from asyncflow.api.job import RLJobSpec
from asyncflow.api.status import JobStatus, Phase
from asyncflow.plan.describe import duration
from asyncflow_operator.actions import Ask, Delete, Plan
from asyncflow_operator.decide.admission import given_back, queued_again, released
from asyncflow_operator.decide.draft import Draft
from asyncflow_operator.decide.failure import End, Verdict, end_of
from asyncflow_operator.decide.gang import next_attempt
from asyncflow_operator.decide.moments import read, written
from asyncflow_operator.decide.progress import FIGURES, figures
from asyncflow_operator.decide.seats import removed
from asyncflow_operator.observed import JobState, PodView, Ref

STOPS: Final = 4
"""Times ``limits.stopSeconds`` that a checkpoint may take when a job is suspended, beside ``SPARE_S``."""
SPARE_S: Final = 60.0


def driver_of(state: JobState) -> PodView | None:
    """Return the driver's pod."""
    return next((pod for pod in state.pods if pod.role == "driver"), None)


def left_as(driver: PodView, state: JobState) -> str:
    """Return the phase in which a driver that is done has left the job: its last word, or what it answered last."""
    seen = state.probe.status
    return driver.last_words or (seen.phase if seen is not None else "")


def finish(draft: Draft[JobStatus], state: JobState, verdict: Verdict | None) -> None:
    """End the job for good: well, or because of ``verdict``."""
    phase: Phase = "Succeeded" if verdict is None else "Failed"
    draft.fields |= figures(state.probe.status, ())
    draft.fields |= {"phase": phase, "completion_time": written(draft.now), "eta": "", "waiting_for": ""}
    draft.fields |= {"draining": (), "ready_rollouts": 0, "replicas": 0, "elasticity": None}
    if verdict is None:
        draft.board.say("Complete", True, "Succeeded", "The driver has ended the run")
        draft.note("Succeeded", "The run is complete")
    else:
        draft.board.say("Failed", True, verdict.reason, verdict.message)
        draft.note(verdict.reason, verdict.message, warning=True)
    _quiet(draft, reason=phase, message=f"The job has {phase.lower()}")


def after_the_end(draft: Draft[JobStatus], state: JobState, spec: RLJobSpec) -> Plan:
    """Take away what a finished job does not need, and the job itself when its time to live is over."""
    kept = _kept(state, keeps_failures=spec.limits.keep_on_failure)
    draft.take_away(removed((pod for pod in state.pods if pod.uid not in kept), draft.alarm))
    draft.do_first(given_back(state.objects) + released(state))
    ttl, finished = spec.limits.ttl_seconds_after_finished, read(state.status.completion_time)
    if ttl is not None and finished is not None and not draft.alarm.until(finished + ttl):
        draft.do_then([Delete(ref=Ref("RLJob", state.owner.name), uid=state.owner.uid)])
    return draft.plan(figures=FIGURES)


def suspend(draft: Draft[JobStatus], state: JobState, spec: RLJobSpec) -> Plan:
    """Bring a job closer to being suspended."""
    driver, status = driver_of(state), state.status
    if status.phase not in ("Suspending", "Suspended"):
        draft.fields |= {"phase": "Suspending", "suspend_time": written(draft.now)}
        draft.note("Suspending", "A checkpoint is made, then all pods are released")
    ended = end_of(driver) if driver is not None else None
    seen = state.probe.status
    if driver is not None and ended is End.DONE and left_as(driver, state) == "Succeeded":
        finish(draft, state, None)
        return draft.plan(figures=FIGURES)
    began = read(status.suspend_time) or draft.now
    in_time = draft.alarm.until(began + STOPS * spec.limits.stop_seconds + SPARE_S)
    saves = status.phase in ("Running", "Suspending") and _may_save(state)
    if status.phase != "Suspended" and driver is not None and ended is None and in_time and saves:
        draft.do_first([Ask(path="/v1/suspend")] if seen is None or seen.phase in ("Running", "Paused") else [])
        _say_suspended(draft, done=False)
        return draft.plan(figures=FIGURES)
    draft.take_away(removed(state.pods, draft.alarm))
    draft.do_first(released(state))
    done = not state.pods
    if done:
        draft.do_first(given_back(state.objects) if spec.suspend else queued_again(state.objects, now=draft.now))
    if done and status.phase != "Suspended":
        draft.fields |= {"phase": "Suspended", "start_time": None, "replicas": 0, "ready_rollouts": 0, "draining": ()}
        draft.fields |= {"eta": "", "waiting_for": "", "elasticity": None}
        draft.note("Suspended", "All pods are released; suspend: false resumes from the checkpoint")
    _say_suspended(draft, done=done or status.phase == "Suspended")
    return draft.plan(figures=FIGURES)


def resumed(status: JobStatus) -> dict[str, Any]:
    """Return the fields of the status with which a suspended job begins again, as the next attempt of every role."""
    failures = {
        name: next_attempt(record).model_copy(update={"in_a_row": 0, "counted": ()})
        for name, record in status.failures.items()
    }
    return {"phase": "Pending", "suspend_time": None, "failures": failures}


def overdue(draft: Draft[JobStatus], spec: RLJobSpec) -> Verdict | None:
    """Return the verdict on a job that has taken longer than it may, None on any other."""
    deadline, began = spec.limits.active_deadline_seconds, read(draft.before.start_time)
    if deadline is None or began is None or draft.alarm.until(began + deadline):
        return None
    return Verdict("DeadlineExceeded", f"The job did not finish within activeDeadlineSeconds ({duration(deadline)})")


def _may_save(state: JobState) -> bool:
    """Return whether the driver can still be brought to a checkpoint."""
    seen = state.probe.status
    return seen is None or seen.phase not in ("Starting", "Pending", "Suspended", "Succeeded")


def _kept(state: JobState, *, keeps_failures: bool) -> set[str]:
    """Return the UIDs of the pods that stay for their logs: the driver's, and of a failed job those that failed, unless
    nothing is kept. Of a pod that a sidecar keeps running nothing stays: it would hold its node's resources.
    """
    failed = state.status.phase == "Failed"
    if failed and not keeps_failures:
        return set()
    over = [pod for pod in state.pods if not pod.leftover]
    ended = {pod.uid for pod in over if end_of(pod) in (End.FAILED, End.REFUSED)} if failed else set()
    return ended | {pod.uid for pod in over if pod.role == "driver"}


def _say_suspended(draft: Draft[JobStatus], *, done: bool) -> None:
    reason = "Suspended" if done else "Suspending"
    draft.board.say("Suspended", done, reason)
    _quiet(draft, reason=reason, message="")


def _quiet(draft: Draft[JobStatus], *, reason: str, message: str) -> None:
    """State that nothing runs or is to run."""
    for kind in ("Ready", "Progressing", "WhyPending"):
        draft.board.say(kind, False, reason, message)
    for kind in ("Stalled", "ElasticityActive"):
        if draft.board.has(kind):
            draft.board.say(kind, False, reason, message)
