"""The end of a job, permanent or until it is resumed: its last status, and which pods are deleted or kept.

To suspend a job, the operator orders a checkpoint from the driver and waits until the driver has ended or its time is
over; only then it deletes the pods.

Invariants: the phase of a finished job never changes. A suspended job has no pods. While a job is ending, no end of a
pod counts as a failure and no pod is created.
"""

from __future__ import annotations

from typing import Any, Final

from pydantic import ValidationError

from asyncflow.api.job import RLJobSpec
from asyncflow.api.status import DriverStatus, JobStatus, Phase
from asyncflow.plan.describe import duration
from asyncflow_operator.actions import Delete, DriverOrder, Plan
from asyncflow_operator.decide.admission import delete_gang, evicted, release_pods, requeue
from asyncflow_operator.decide.draft import Draft
from asyncflow_operator.decide.failure import FailureResult, PodEnd, end_of
from asyncflow_operator.decide.pending import held, why_denied
from asyncflow_operator.decide.progress import FIGURES, figures, one_line
from asyncflow_operator.decide.replicas import next_attempt, removed
from asyncflow_operator.decide.times import from_rfc3339, to_rfc3339
from asyncflow_operator.observed import JobState, PodView, Ref

STOPS: Final = 4
"""Time for the checkpoint of a job that is suspended, in multiples of ``limits.stopSeconds``, plus ``SPARE_S``."""
SPARE_S: Final = 60.0


def driver_of(state: JobState) -> PodView | None:
    """Return the driver's pod."""
    return next((pod for pod in state.pods if pod.role == "driver"), None)


def last_status(driver: PodView | None, state: JobState) -> DriverStatus | None:
    """Return the driver's last answer, updated with the phase and figures in its termination message."""
    seen = state.probe.status
    try:
        final = DriverStatus.model_validate_json(driver.last_words if driver is not None else "")
    except ValidationError:
        return seen
    if seen is None:
        return final
    return seen.model_copy(update={name: getattr(final, name) for name in final.model_fields_set})


def final_phase(driver: PodView, state: JobState) -> str:
    """Return the phase in which a driver has ended, "" if it reported none."""
    last = last_status(driver, state)
    return last.phase if last is not None else ""


def finish(draft: Draft[JobStatus], state: JobState, failure: FailureResult | None) -> None:
    """End the job permanently: as succeeded, or as failed because of ``failure``."""
    phase: Phase = "Succeeded" if failure is None else "Failed"
    draft.fields |= figures(last_status(driver_of(state), state), ())
    draft.fields |= {"phase": phase, "completion_time": to_rfc3339(draft.now), "eta": "", "waiting_for": ""}
    draft.fields |= {"draining": (), "ready_rollouts": 0, "replicas": 0}
    if failure is None:
        draft.conditions.set("Complete", True, "Succeeded", "The driver has ended the run")
        draft.note("Succeeded", "The run is complete")
    else:
        draft.conditions.set("Failed", True, failure.reason, failure.message)
        draft.note(failure.reason, failure.message, warning=True)
    _set_inactive(draft, reason=phase, message=f"The job has {phase.lower()}")


def clean_up(draft: Draft[JobStatus], state: JobState, spec: RLJobSpec) -> Plan:
    """Delete the pods that a finished job does not need, and the job itself when its time to live is over."""
    kept = _pods_to_keep(state, keeps_failures=spec.limits.keep_on_failure)
    why = f"the job has {state.status.phase.lower()}"
    draft.delete_pods(removed((pod for pod in state.pods if pod.uid not in kept), draft.alarm, why=why))
    draft.add_first(delete_gang(state.objects, why=why) + release_pods(state))
    ttl, finished = spec.limits.ttl_seconds_after_finished, from_rfc3339(state.status.completion_time)
    if ttl is not None and finished is not None and not draft.alarm.until(finished + ttl):
        why = f"it ended {duration(ttl)} ago (limits.ttlSecondsAfterFinished)"
        draft.add_then([Delete(ref=Ref("RLJob", state.owner.name), uid=state.owner.uid, why=why)])
    return draft.plan(figures=FIGURES)


def suspend(draft: Draft[JobStatus], state: JobState, spec: RLJobSpec) -> Plan:
    """Return the plan for the next step of suspending a job."""
    driver, status = driver_of(state), state.status
    if status.phase not in ("Suspending", "Suspended"):
        draft.fields |= {"phase": "Suspending", "suspend_time": to_rfc3339(draft.now)}
        why = _cannot_resume(spec)
        message = "A checkpoint is written, then all pods are deleted" + (f". {why}" if why else "")
        draft.note("Suspending", message, warning=bool(why))
    ended = end_of(driver) if driver is not None else None
    seen = state.probe.status
    if driver is not None and ended is PodEnd.DONE and final_phase(driver, state) == "Succeeded":
        finish(draft, state, None)
        return draft.plan(figures=FIGURES)
    if ended is PodEnd.DONE:
        draft.fields |= figures(last_status(driver, state), ())
    started = from_rfc3339(status.suspend_time) or draft.now
    in_time = draft.alarm.until(started + STOPS * spec.limits.stop_seconds + SPARE_S)
    saves = status.phase in ("Running", "Suspending") and _may_save(state)
    if status.phase != "Suspended" and driver is not None and ended is None and in_time and saves:
        draft.add_first(
            [DriverOrder(path="/v1/suspend")] if seen is None or seen.phase in ("Running", "Paused") else []
        )
        _set_suspended(draft, done=False, message="Waits for the checkpoint")
        return draft.plan(figures=FIGURES)
    why = _why_suspended(state, spec, in_time=in_time, saves=saves)
    draft.delete_pods(removed(state.pods, draft.alarm, why=why))
    draft.add_first(release_pods(state))
    done = not state.pods
    if done:
        draft.add_first(delete_gang(state.objects, why=why) if spec.suspend else requeue(state.objects, now=draft.now))
    if done and status.phase != "Suspended":
        draft.fields |= {"phase": "Suspended", "start_time": None, "replicas": 0, "ready_rollouts": 0, "draining": ()}
        draft.fields["eta"] = ""
        draft.note("Suspended", f"All pods are deleted; suspend: false {_on_resume(spec)}")
    obstacle = why_denied(state.denied).message if state.denied else held(state.pods)
    suspended = done or status.phase == "Suspended"
    left = "" if suspended else f"Waits until all pods are deleted. {obstacle}".rstrip()
    _set_suspended(draft, done=suspended, message=left)
    return draft.plan(figures=() if ended is PodEnd.DONE else FIGURES)


def _on_resume(spec: RLJobSpec) -> str:
    if not _cannot_resume(spec):
        return "resumes the job from the checkpoint"
    if spec.storage.checkpoints.claim is not None:
        return "starts the job again, which fails while the claim has checkpoints"
    return "starts the job again"


def _cannot_resume(spec: RLJobSpec) -> str:
    """Return why a suspended job loses its progress, "" if it does not."""
    claims = {
        "storage.ledger.claim": spec.storage.ledger.claim,
        "storage.checkpoints.claim": spec.storage.checkpoints.claim,
    }
    missing = [name for name, claim in claims.items() if claim is None]
    return f"The job cannot resume from it without {' and '.join(missing)}" if missing else ""


def _why_suspended(state: JobState, spec: RLJobSpec, *, in_time: bool, saves: bool) -> str:
    why = "Kueue has evicted the job's Workload" if evicted(state) and not spec.suspend else "the job is suspended"
    if driver_of(state) is None or not saves:
        return why
    return f"{why}, and " + ("its driver has ended" if in_time else "its driver's time for a checkpoint is over")


def resumed(status: JobStatus) -> dict[str, Any]:
    """Return the fields of the status with which a suspended job resumes, with the next attempt of every role."""
    failures = {
        name: next_attempt(record).model_copy(update={"in_a_row": 0, "counted": ()})
        for name, record in status.failures.items()
    }
    return {"phase": "Pending", "suspend_time": None, "failures": failures}


def deadline_exceeded(draft: Draft[JobStatus], spec: RLJobSpec) -> FailureResult | None:
    """Return the failure of a job that has exceeded its deadline, None for any other job."""
    deadline, started = spec.limits.active_deadline_seconds, from_rfc3339(draft.before.start_time)
    if deadline is None or started is None or draft.alarm.until(started + deadline):
        return None
    return FailureResult(
        "DeadlineExceeded", f"The job did not finish within limits.activeDeadlineSeconds ({duration(deadline)})"
    )


def _may_save(state: JobState) -> bool:
    """Return whether the driver can still write a checkpoint."""
    seen = state.probe.status
    return seen is None or seen.phase not in ("Starting", "Pending", "Suspended", "Succeeded")


def _pods_to_keep(state: JobState, *, keeps_failures: bool) -> set[str]:
    """Return the UIDs of the pods that stay for their logs: the driver and, in a failed job, the failed pods. A pod in
    which a sidecar still runs is not kept, because it would hold resources of its node.
    """
    failed = state.status.phase == "Failed"
    if failed and not keeps_failures:
        return set()
    candidates = [pod for pod in state.pods if not pod.leftover]
    ended = {pod.uid for pod in candidates if end_of(pod) in (PodEnd.FAILED, PodEnd.REFUSED)} if failed else set()
    return ended | {pod.uid for pod in candidates if pod.role == "driver"}


def _set_suspended(draft: Draft[JobStatus], *, done: bool, message: str) -> None:
    reason = "Suspended" if done else "Suspending"
    draft.conditions.set("Suspended", done, reason, message)
    draft.fields["waiting_for"] = one_line(message)
    _set_inactive(draft, reason=reason, message="")


def _set_inactive(draft: Draft[JobStatus], *, reason: str, message: str) -> None:
    """Set the conditions of a job that neither runs nor is to run."""
    for kind in ("Ready", "Progressing", "WhyPending"):
        draft.conditions.set(kind, False, reason, message)
    for kind in ("Stalled", "ElasticityActive"):
        if draft.conditions.has(kind):
            draft.conditions.set(kind, False, reason, message)
