"""The life of a job, from its first pod to its last word, with a driver that says what the test wants it to say."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
from one_job import OneJob
from scripted_driver import ScriptedDrivers
from world import DECISIONS

from kube.plane import ControlPlane
from operator_process import OperatorProcess

HELD = {"annotations": {"kwok.test/hold": "true"}}
ONCE = {"maxRestarts": 0, "backoffSeconds": 0}
JOBS = {
    "ordered": {"template": HELD},
    "seen": {},
    "ganged": {"trainer": {"replicas": 2}},
    "spent": {"failurePolicy": {"trainer": ONCE}},
    "unkept": {"failurePolicy": {"trainer": ONCE}, "limits": {"keepOnFailure": False}},
    "refused": {},
    "done": {"limits": {"ttlSecondsAfterFinished": 4}},
    "paused": {},
    "late": {"limits": {"activeDeadlineSeconds": 5}},
    "foreign": {"managedBy": "example.org/mine"},
    "again": {},
}

LATE = {"id": "worker-1", "version": 1, "lag": 2, "cause": "receiving θ_3, 40% of it here"}
SEEN = {
    "step": 3,
    "reward": 0.5,
    "tokens_per_second": 1234.0,
    "eta_seconds": 8000.0,
    "version": 3,
    "staleness": {"start": 1.0},
    "queue": {"ready": 7, "leased": 2, "bytes": 1000, "limit": 5000},
    "versions": {"rollouts": 2, "behind": 1, "lag": (1, 0, 1), "laggards": (LATE,), "bytes": 99},
    "rollouts": [
        {"id": f"worker-{index}", "index": index, "state": "ready", "version": version}
        for index, version in enumerate((3, 1))
    ],
}
"""What the driver of the job "seen" says."""


@pytest.fixture(scope="module")
def jobs(
    kwok_plane: ControlPlane, shared_operator: OperatorProcess, drivers: ScriptedDrivers
) -> Iterator[dict[str, OneJob]]:
    """All jobs of this module, begun together. What a driver says at first is told at once, later figures are not."""
    begun = {name: OneJob(kwok_plane, "jobs", name, drivers.of("jobs", name), **spec) for name, spec in JOBS.items()}
    begun["seen"].driver.say(**SEEN)
    for job in begun.values():
        job.create()
    yield begun
    for job in begun.values():
        if job.exists():
            job.delete()


def test_roles_start_one_after_another_as_those_before_are_ready(jobs: dict[str, OneJob]) -> None:
    job = jobs["ordered"]
    first, second = {"driver-0"}, {"controller-0", "storage-0", "storage-1"}
    third = {"trainer-0", "rollout-0", "rollout-1"}
    for there, begun in ((first, first), (first | second, second), (first | second | third, third)):
        job.until(lambda wanted=there: set(job.pods()) >= wanted, f"the pods {there}")
        assert set(job.pods()) == there
        assert job.phase() in ("Pending", "Starting")
        assert job.condition("WhyPending")["status"] == "True"
        for seat in begun:
            job.annotate(seat, hold=None)
    job.until_phase("Running")
    job.until(lambda: job.condition("WhyPending")["status"] == "False", "nothing to be pending")


def test_what_the_driver_says_is_what_kubectl_shows(jobs: dict[str, OneJob]) -> None:
    job = jobs["seen"]
    job.until_phase("Running")
    job.until(lambda: job.status().get("step") == 3, "the step to be seen", timeout_s=30)
    status = job.status()
    assert (status["progress"], status["eta"], status["queueDepth"], status["version"]) == ("3/60", "2h13m", 7, 3)
    shown = job.kubectl("get", "rlj", job.name)
    for figure in ("Running", "3/60", "0.5", "1234", "2h13m"):
        assert figure in shown
    job.until(lambda: job.child("weightsyncs").get("status", {}).get("lag") == [1, 0, 1], "the histogram", timeout_s=30)
    versions = job.child("weightsyncs")["status"]
    assert versions["laggards"] == [LATE]
    assert versions["bytes"] == 99
    job.until(lambda: job.child("transferqueues").get("status", {}).get("rows") == 9, "the rows", timeout_s=30)
    assert job.child("transferqueues")["status"]["readyUnits"] == 2


def test_a_failed_rank_restarts_the_gang_and_nobody_else(jobs: dict[str, OneJob]) -> None:
    job = jobs["ganged"]
    job.until_phase("Running")
    others = {seat: uid for seat, uid in job.uids().items() if "trainer" not in seat}
    job.annotate("trainer-1", exit="137", exit_reason="OOMKilled")
    job.until(
        lambda: set(job.attempts("trainer").values()) == {"1"} and len(job.pods("trainer")) == 2, "the second attempt"
    )
    job.until(lambda: job.status()["attempt"] == 1 and job.restarts() == {"trainer": 1}, "the attempt to be said")
    why = "attempt 1 of trainer starts when all pods of older attempts are deleted"
    status, said = decisions(job.plane, "explain", f"jobs/{job.name}", f"{job.name}-trainer-0", "--decisions")
    assert status == 0, said
    assert f"deleted Pod/{job.name}-trainer-0: {why}. It was Running" in said
    events = job.kubectl("get", "events", "--field-selector", f"involvedObject.name={job.name},reason=PodsDeleted")
    assert f"{job.name}-trainer-0, {job.name}-trainer-1: {why}" in events
    assert {seat: uid for seat, uid in job.uids().items() if "trainer" not in seat} == others
    job.kubectl("delete", "pod", f"{job.name}-trainer-0", "--wait=false")
    job.until(
        lambda: set(job.attempts("trainer").values()) == {"2"} and len(job.pods("trainer")) == 2, "the third attempt"
    )
    assert job.restarts() == {"trainer": 1}, "what a person deletes is nobody's failure"
    assert {seat: uid for seat, uid in job.uids().items() if "trainer" not in seat} == others


def decisions(plane: ControlPlane, command: str, *words: str) -> tuple[int, str]:
    """Return the exit status of a command about the log of the shared operator, whose folder comes last."""
    line = [sys.executable, "-m", "asyncflow_operator", command, *words, str(plane.folder / DECISIONS)]
    done = subprocess.run(line, capture_output=True, check=False, text=True)
    return done.returncode, done.stdout + done.stderr


def test_a_budget_that_is_used_up_ends_the_job_and_keeps_what_failed(jobs: dict[str, OneJob]) -> None:
    job = jobs["spent"]
    job.until_phase("Running")
    job.annotate("trainer-0", exit="1")
    job.until_phase("Failed")
    said = job.until_says("Failed", "BudgetExceeded")
    assert "spent-trainer-0 ended with exit code 1" in said
    assert "0 restarts of trainer" in said
    job.until(lambda: set(job.pods()) == {"driver-0", "trainer-0"}, "the others to be gone")


def test_a_failed_job_that_keeps_nothing_leaves_no_pod(jobs: dict[str, OneJob]) -> None:
    job = jobs["unkept"]
    job.until_phase("Running")
    job.annotate("trainer-0", exit="1")
    job.until_phase("Failed")
    job.until(lambda: not job.pods(), "all pods to be gone")


def test_a_role_that_refuses_its_input_ends_the_job_at_once_with_its_words(jobs: dict[str, OneJob]) -> None:
    job = jobs["refused"]
    job.until_phase("Running")
    words = "asyncflow: error: model.source: no such folder /models/x"
    ended = {"exitCode": 2, "reason": "Error", "message": words}
    job.set_status("rollout-1", phase="Failed", containerStatuses=[container(terminated=ended)])
    job.until_phase("Failed")
    assert words in job.until_says("Failed", "Refused")


def container(**state: object) -> dict[str, object]:
    known = {"name": "asyncflow", "image": "x", "imageID": "x", "ready": False, "restartCount": 0}
    return known | {"state": state}


def test_a_driver_that_ends_well_ends_the_job_and_its_time_to_live_begins(jobs: dict[str, OneJob]) -> None:
    job = jobs["done"]
    job.until_phase("Running")
    job.driver.say(step=60)
    job.until(lambda: job.driver.heard > 1, "the last step to be heard")
    job.annotate("driver-0", exit="0")
    job.until_phase("Succeeded")
    assert job.status()["progress"] == "60/60"
    job.until(lambda: set(job.pods()) == {"driver-0"}, "the others to be gone")
    job.until(lambda: not job.exists(), "the job to be deleted")
    job.until(lambda: not job.pods(), "the driver's pod to be collected")


def test_a_suspended_job_saves_first_and_resumes_as_the_next_attempt(jobs: dict[str, OneJob]) -> None:
    job = jobs["paused"]
    job.until_phase("Running")
    before = job.uids()
    job.edit(suspend=True)
    job.until(lambda: "/v1/suspend" in job.driver.asked, "the driver to be asked")
    assert job.uids() == before, "pods wait until the driver has saved"
    job.until_phase("Suspending")
    job.driver.say(phase="Suspended")
    job.until_phase("Suspended")
    assert set(job.driver.asked) == {"/v1/suspend"}
    assert not job.pods()
    assert job.status()["replicas"] == 0
    job.driver.say(phase="Running")
    job.edit(suspend=False)
    job.until_phase("Running")
    assert set(job.attempts().values()) <= {"0", "1"}
    assert job.attempts("trainer") == {"trainer-0": "1"}
    assert job.condition("Suspended")["status"] == "False"


def test_a_job_that_takes_too_long_fails(jobs: dict[str, OneJob]) -> None:
    job = jobs["late"]
    job.until_phase("Failed")
    assert "limits.activeDeadlineSeconds (5s)" in job.until_says("Failed", "DeadlineExceeded")


def test_a_job_of_the_same_name_waits_for_pods_that_still_end_and_starts_afresh(jobs: dict[str, OneJob]) -> None:
    job = jobs["again"]
    job.until_phase("Running")
    job.until(job.is_whole, "all pods")
    earlier = job.uids()
    for seat in earlier:
        job.annotate(seat, never_stop="true")
    job.delete()
    job.create()
    job.until_says("WhyPending", "Terminating", "is being deleted")
    for seat in earlier:
        job.annotate(seat, never_stop=None)
    job.until_phase("Running")
    job.until(job.is_whole, "all pods")
    assert not set(job.uids().values()) & set(earlier.values())
    assert set(job.attempts().values()) == {"0"}
    events = f"/api/v1/namespaces/jobs/events?fieldSelector=involvedObject.uid={job.job()['metadata']['uid']}"
    assert {event["reason"] for event in job.plane.api.get(events)["items"]} <= {"Running"}


def test_what_another_controller_manages_is_left_alone(jobs: dict[str, OneJob]) -> None:
    job = jobs["foreign"]
    jobs["seen"].until_phase("Running")
    assert "status" not in job.job()
    assert not job.pods()


def test_every_decision_can_be_made_again_from_the_log(kwok_plane: ControlPlane, jobs: dict[str, OneJob]) -> None:
    assert jobs
    status, said = decisions(kwok_plane, "decide-again")
    assert status == 0, said
    assert ", 0 differ" in said
