"""A core that gets its place as a whole, by Kueue or Volcano, whose part the tests play on their real definitions."""

from collections.abc import Iterator
from typing import Any

import pytest
from kueue_played import BIG, FLAVOR, GATES, NEWEST, OLDER, RESERVED, kueues, say
from one_job import OneJob
from scripted_driver import ScriptedDrivers
from world import World, quickstart

from kube import foreign
from kube.plane import ControlPlane
from operator_process import OperatorProcess

KUEUE = {"scheduling": {"gang": "kueue", "queue": "research"}}
JOBS: dict[str, dict[str, Any]] = {
    "lined-up": KUEUE | {"rollout": {"replicas": 3, "minReplicas": 2}},
    "held": KUEUE | {"rollout": {"replicas": 2, "minReplicas": 1}, "template": {"podSpec": GATES}},
    "ranked": KUEUE | {"template": {"podSpec": {"priorityClassName": "research"}}},
    "grouped": {"scheduling": {"gang": "volcano"}},
}
CORE = {"driver-0", "controller-0", "storage-0", "storage-1", "trainer-0"}
WORKLOADS = f"{NEWEST}/namespaces/jobs/workloads"
GROUPS = "/apis/scheduling.volcano.sh/v1beta1/namespaces/jobs/podgroups"
CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"


@pytest.fixture(scope="module")
def jobs(
    kwok_plane: ControlPlane, shared_operator: OperatorProcess, drivers: ScriptedDrivers
) -> Iterator[dict[str, OneJob]]:
    kwok_plane.api.create(f"{NEWEST}/resourceflavors", kueues("ResourceFlavor", FLAVOR, spec=BIG))
    begun = {
        name: OneJob(kwok_plane, "jobs", name, drivers.of("jobs", name), **spec).create() for name, spec in JOBS.items()
    }
    yield begun
    for job in begun.values():
        job.delete()
    kwok_plane.api.delete(f"{NEWEST}/resourceflavors/{FLAVOR}")


def workload(job: OneJob) -> dict[str, Any]:
    job.until(lambda: job.plane.api.exists(f"{WORKLOADS}/{job.name}"), "the Workload")
    return job.plane.api.get(f"{WORKLOADS}/{job.name}")


def conditions(asked: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {each["type"]: (each["status"], each["reason"]) for each in asked.get("status", {}).get("conditions", ())}


def admit(job: OneJob) -> None:
    workload(job)
    say(job.plane, f"{WORKLOADS}/{job.name}", **RESERVED)


def test_no_pod_is_made_before_kueue_admits_the_workload_and_then_all_are(jobs: dict[str, OneJob]) -> None:
    job = jobs["lined-up"]
    asked = workload(job)
    assert {each["name"]: each["count"] for each in asked["spec"]["podSets"]}["rollout"] == 2
    lacks = "insufficient unused quota for cpu in flavor default, 8 more needed"
    say(job.plane, f"{WORKLOADS}/{job.name}", QuotaReserved=("False", lacks))
    job.until_says("WhyPending", "Gang", "Kueue has not admitted the job's Workload")
    assert not job.pods()
    admit(job)
    job.until(lambda: set(job.pods()) == CORE | {"rollout-0", "rollout-1", "rollout-2"}, "all pods at once")
    job.until_phase("Running")
    job.until_says("WhyPending", "NothingPending")


def test_pods_of_the_core_are_placed_by_their_flavor_and_kueue_is_told_that_they_are_ready(
    jobs: dict[str, OneJob],
) -> None:
    job = jobs["lined-up"]
    job.until_phase("Running")
    for name, pod in job.pods().items():
        given = pod["spec"].get("nodeSelector", {}).items() >= BIG["nodeLabels"].items()
        assert given == (name != "rollout-2"), name
        assert (BIG["tolerations"][0] in pod["spec"]["tolerations"]) == (name != "rollout-2")
    job.until(lambda: conditions(workload(job)).get("PodsReady") == ("True", "Started"), "PodsReady to be told")
    job.annotate("storage-0", exit="1")
    job.until(lambda: conditions(workload(job))["PodsReady"] == ("True", "Recovered"), "a recovery to be told")


def test_who_has_no_place_with_the_gang_leaves_first(jobs: dict[str, OneJob]) -> None:
    job = jobs["lined-up"]
    job.until_phase("Running")
    busy = {0: 0, 1: 0, 2: 64}
    job.driver.say(rollouts=[{"id": f"w{i}", "index": i, "state": "ready", "inflight": n} for i, n in busy.items()])
    job.until(lambda: job.driver.heard > 1, "the rollouts to be known")
    before = workload(job)["metadata"]["uid"]
    job.scale(2)
    job.until(lambda: set(job.driver.asked) == {"/v1/rollouts/w2/drain"}, "the last one alone to be drained")
    job.driver.say_rollouts((0, "ready"), (1, "ready"))
    job.until(lambda: set(job.pods("rollout")) == {"rollout-0", "rollout-1"}, "the last one to be gone")
    assert workload(job)["metadata"]["uid"] == before


def test_an_evicted_job_saves_gives_its_place_back_and_keeps_its_place_in_the_queue(jobs: dict[str, OneJob]) -> None:
    job = jobs["lined-up"]
    job.until_phase("Running")
    before = workload(job)["metadata"]
    say(job.plane, f"{WORKLOADS}/{job.name}", Evicted=("True", "Preempted to accommodate a workload"))
    job.until(lambda: "/v1/suspend" in job.driver.asked, "the driver to be asked to save")
    assert workload(job)["status"]["admission"]
    job.driver.say(phase="Suspended")
    job.until(lambda: conditions(workload(job)).get("Requeued") == ("True", "Preempted"), "the Workload to wait again")
    asked = workload(job)
    assert not job.pods()
    assert asked["status"].get("admission") is None
    assert {kind: conditions(asked)[kind][0] for kind in ("QuotaReserved", "Admitted", "PodsReady")} == {
        "QuotaReserved": "False",
        "Admitted": "False",
        "PodsReady": "False",
    }
    since = ("uid", "creationTimestamp")
    assert [asked["metadata"][field] for field in since] == [before[field] for field in since]
    job.until_says("WhyPending", "Gang")
    assert job.job()["spec"].get("suspend", False) is False
    job.driver.say(phase="Running")
    say(job.plane, f"{WORKLOADS}/{job.name}", **RESERVED, Evicted=("False", "QuotaReserved again"))
    job.until_phase("Running")
    assert job.attempts("trainer") == {"trainer-0": "1"}


def test_a_job_that_has_ended_gives_its_place_back(jobs: dict[str, OneJob]) -> None:
    job = jobs["lined-up"]
    job.until_phase("Running")
    job.annotate("driver-0", exit="0")
    job.until_phase("Succeeded")
    job.until(lambda: not job.plane.api.exists(f"{WORKLOADS}/{job.name}"), "the Workload to be gone")


def test_gates_that_kueue_puts_on_pods_are_taken_from_the_core_and_left_on_others(jobs: dict[str, OneJob]) -> None:
    """Its webhook does that where it manages plain pods; here a template does."""
    job = jobs["held"]
    admit(job)
    job.until_phase("Running")
    gates = {name: len(pod["spec"].get("schedulingGates", ())) for name, pod in job.pods().items()}
    assert gates == dict.fromkeys(CORE | {"rollout-0"}, 0) | {"rollout-1": 2}
    job.until_says("WhyPending", "Gated", "held-rollout-1", "Kueue")


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


def test_a_kueue_that_has_no_v1beta2_is_served_in_v1beta1(plane: ControlPlane) -> None:
    foreign.install(plane, kueue=foreign.OLDER)
    world = World.new(plane, "older-kueue")
    operator = OperatorProcess(plane, "older-kueue", namespace="older-kueue", namespaces="older-kueue")
    operator.start()
    operator.lead()
    manifest = quickstart("older-kueue", "lined-up")
    manifest["spec"]["scheduling"] = {"gang": "kueue"}
    plane.api.create("/apis/asyncflow.dev/v1alpha1/namespaces/older-kueue/rljobs", manifest)
    path = f"{OLDER}/namespaces/older-kueue/workloads/lined-up"
    world.until(lambda: plane.api.exists(path), "the Workload")
    if not plane.api.exists(f"{OLDER}/resourceflavors/{FLAVOR}"):
        plane.api.create(f"{OLDER}/resourceflavors", kueues("ResourceFlavor", FLAVOR, version=OLDER, spec=BIG))
    assert not world.pods()
    say(plane, path, **RESERVED)
    world.until(lambda: len(world.pods()) == 7, "all pods at once")
    assert world.pods("trainer")["lined-up-trainer-0"]["spec"]["nodeSelector"] == BIG["nodeLabels"]
    operator.stop()


def test_a_workload_has_the_priority_of_its_pods_once_it_can_be_read(jobs: dict[str, OneJob]) -> None:
    job = jobs["ranked"]
    job.until_says("WhyPending", "Gang", "PriorityClass research cannot be read", "not found")
    assert not job.plane.api.exists(f"{WORKLOADS}/{job.name}")
    job.plane.api.create(CLASSES, {"metadata": {"name": "research"}, "value": 1000})
    job.until(lambda: job.plane.api.exists(f"{WORKLOADS}/{job.name}"), "the Workload", timeout_s=120)
    spec = workload(job)["spec"]
    assert spec["priority"] == 1000
    assert spec["priorityClassRef"] == {"group": "scheduling.k8s.io", "kind": "PriorityClass", "name": "research"}
    job.plane.api.delete(f"{CLASSES}/research")
