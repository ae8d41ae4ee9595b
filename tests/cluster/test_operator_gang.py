"""A core that gets its place as a whole, by Kueue or by Volcano, whose part the tests play."""

from collections.abc import Iterator
from typing import Any

import pytest
from one_job import OneJob
from scripted_driver import ScriptedDrivers

from kube.plane import ControlPlane
from operator_process import OperatorProcess

KUEUE = {"scheduling": {"gang": "kueue", "queue": "research"}}
JOBS: dict[str, dict[str, Any]] = {
    "lined-up": KUEUE | {"rollout": {"replicas": 3, "minReplicas": 2}},
    "grouped": {"scheduling": {"gang": "volcano"}},
}
CORE = {"driver-0", "controller-0", "storage-0", "storage-1", "trainer-0"}
WORKLOADS = "/apis/kueue.x-k8s.io/v1beta1/namespaces/jobs/workloads"
GROUPS = "/apis/scheduling.volcano.sh/v1beta1/namespaces/jobs/podgroups"


@pytest.fixture(scope="module")
def jobs(
    kwok_plane: ControlPlane, shared_operator: OperatorProcess, drivers: ScriptedDrivers
) -> Iterator[dict[str, OneJob]]:
    begun = {
        name: OneJob(kwok_plane, "jobs", name, drivers.of("jobs", name), **spec).create() for name, spec in JOBS.items()
    }
    yield begun
    for job in begun.values():
        job.delete()


def workload(job: OneJob) -> dict[str, Any]:
    job.until(lambda: job.plane.api.exists(f"{WORKLOADS}/{job.name}"), "the Workload")
    return job.plane.api.get(f"{WORKLOADS}/{job.name}")


def say(job: OneJob, **conditions: tuple[str, str]) -> None:
    """Write the Workload's conditions as Kueue does: by type, status and message."""
    stated = [
        {
            "type": kind,
            "status": status,
            "message": message,
            "reason": kind,
            "lastTransitionTime": "2026-11-21T10:00:00Z",
        }
        for kind, (status, message) in conditions.items()
    ]
    job.plane.api.patch(f"{WORKLOADS}/{job.name}/status", {"status": {"conditions": stated}})


def test_no_pod_is_made_before_kueue_admits_the_workload_and_then_all_are(jobs: dict[str, OneJob]) -> None:
    job = jobs["lined-up"]
    asked = workload(job)
    assert {each["name"]: each["count"] for each in asked["spec"]["podSets"]}["rollout"] == 2
    say(job, QuotaReserved=("False", "insufficient unused quota for cpu in flavor default, 8 more needed"))
    job.until_says("WhyPending", "Gang", "Kueue has not admitted the job's Workload")
    assert not job.pods()
    say(job, QuotaReserved=("True", ""), Admitted=("True", "The workload is admitted"))
    job.until(lambda: set(job.pods()) == CORE | {"rollout-0", "rollout-1", "rollout-2"}, "all pods at once")
    job.until_phase("Running")
    job.until_says("WhyPending", "NothingPending")


def test_who_has_no_place_with_the_gang_leaves_first(jobs: dict[str, OneJob]) -> None:
    job = jobs["lined-up"]
    job.until_phase("Running")
    busy = {0: 0, 1: 0, 2: 64}
    job.driver.say(rollouts=[{"id": f"w{i}", "index": i, "state": "ready", "inflight": n} for i, n in busy.items()])
    job.until(lambda: job.driver.heard > 1, "the rollouts to be known")
    before = workload(job)["metadata"]["uid"]
    job.scale(2)
    job.until(lambda: set(job.driver.asked_for()) == {"/v1/rollouts/w2/drain"}, "the last one alone to be drained")
    job.driver.say_rollouts((0, "ready"), (1, "ready"))
    job.until(lambda: set(job.pods("rollout")) == {"rollout-0", "rollout-1"}, "the last one to be gone")
    assert workload(job)["metadata"]["uid"] == before


def test_an_evicted_job_saves_gives_its_place_back_and_queues_again(jobs: dict[str, OneJob]) -> None:
    job = jobs["lined-up"]
    job.until_phase("Running")
    evicted = workload(job)["metadata"]["uid"]
    say(job, Evicted=("True", "Preempted to accommodate a workload"), Admitted=("True", ""))
    job.until(lambda: "/v1/suspend" in job.driver.asked_for(), "the driver to be asked to save")
    job.driver.say(phase="Suspended")
    job.until(lambda: workload(job)["metadata"]["uid"] != evicted, "a Workload of its own")
    job.until_says("WhyPending", "Gang")
    assert not job.pods()
    assert job.job()["spec"].get("suspend", False) is False
    job.driver.say(phase="Running")
    say(job, QuotaReserved=("True", ""), Admitted=("True", ""))
    job.until_phase("Running")
    assert job.attempts("trainer") == {"trainer-0": "1"}


def test_a_job_that_has_ended_gives_its_place_back(jobs: dict[str, OneJob]) -> None:
    job = jobs["lined-up"]
    job.until_phase("Running")
    job.annotate("driver-0", exit="0")
    job.until_phase("Succeeded")
    job.until(lambda: not job.plane.api.exists(f"{WORKLOADS}/{job.name}"), "the Workload to be gone")


def test_volcano_sees_the_whole_core_at_once_and_gets_its_place_back(jobs: dict[str, OneJob]) -> None:
    job = jobs["grouped"]
    job.until(lambda: set(job.pods()) == CORE | {"rollout-0", "rollout-1"}, "all pods at once")
    group = job.plane.api.get(f"{GROUPS}/{job.name}")
    assert group["spec"]["minMember"] == len(CORE) + 1
    grouped = {
        seat for seat, pod in job.pods().items() if "scheduling.k8s.io/group-name" in pod["metadata"]["annotations"]
    }
    assert grouped == CORE | {"rollout-0"}
    job.edit(suspend=True)
    job.until_phase("Suspended")
    job.until(lambda: not job.plane.api.exists(f"{GROUPS}/{job.name}"), "the PodGroup to be gone")
    job.edit(suspend=False)
    job.until(lambda: len(job.pods()) == len(CORE) + 2 and job.plane.api.exists(f"{GROUPS}/{job.name}"), "all again")
