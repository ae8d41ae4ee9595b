"""Rollouts and storage units come and go: asked for by a person, by an autoscaler, or by the built-in policy."""

import itertools
from collections.abc import Iterator

import pytest
from one_job import OneJob
from scripted_driver import ScriptedDrivers
from world import OURS

from kube.plane import ControlPlane
from operator_process import OperatorProcess

JOBS = {
    "drained": {"rollout": {"replicas": 3}},
    "eager": {"rollout": {"replicas": 1, "maxReplicas": 3}, "elasticity": {"enabled": True}},
    "watched": {"rollout": {"replicas": 2, "maxReplicas": 4}, "elasticity": {"dryRun": True}},
    "owned": {"elasticity": {"enabled": True}},
    "spot": {"rollout": {"replicas": 1, "template": {"podSpec": {"nodeSelector": {"price": "spot"}}}}},
}
ALONE = f"{OURS}/namespaces/jobs/transferqueues"


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


def until_wanted(job: OneJob, replicas: int, *, decided: int) -> None:
    """Let the driver have decided on a number, until so many rollouts are wanted.

    A rollout lags and catches up meanwhile: that is heard at once, where figures alone are looked at every 15 s.
    """
    states = itertools.cycle(("lagging", "ready"))

    def wanted() -> bool:
        first, *others = job.driver.status["rollouts"]
        rollouts = [first | {"state": next(states)}, *others]
        job.driver.say(desiredRollouts=decided, rollouts=rollouts)
        return bool(job.status().get("desiredReplicas") == replicas)

    job.until(wanted, f"{replicas} rollouts to be wanted", timeout_s=30)


def until_there(job: OneJob, *rollouts: str) -> None:
    job.until(
        lambda: set(job.pods("rollout")) == set(rollouts) and job.running_by_role()["rollout"] == len(rollouts),
        f"the rollouts {rollouts}",
    )


def test_who_has_least_to_hand_back_is_drained_and_then_deleted(jobs: dict[str, OneJob]) -> None:
    job = jobs["drained"]
    job.until_phase("Running")
    before = job.uids()
    known = {0: 5, 1: 2, 2: 5}
    job.driver.say(rollouts=[{"id": f"w{i}", "index": i, "state": "ready", "inflight": n} for i, n in known.items()])
    job.until(lambda: job.driver.heard > 1, "the rollouts to be known")
    job.scale(2)
    job.until(lambda: job.driver.asked, "a drain to be asked for")
    assert set(job.driver.asked) == {"/v1/rollouts/w1/drain"}
    job.driver.say_rollouts((0, "ready"), (1, "draining"), (2, "ready"))
    job.until(lambda: job.driver.heard > 3, "the drain to be seen")
    assert job.uids() == before
    assert [each["name"] for each in job.status()["draining"]] == ["drained-rollout-1"]
    job.driver.say_rollouts((0, "ready"), (2, "ready"))
    until_there(job, "rollout-0", "rollout-2")
    assert job.uids().items() <= before.items()
    job.until(lambda: not job.status()["draining"], "nobody to be on the way out")
    job.scale(3)
    until_there(job, "rollout-0", "rollout-1", "rollout-2")


def test_what_the_driver_has_decided_is_done_within_the_bounds(jobs: dict[str, OneJob]) -> None:
    job = jobs["eager"]
    job.until_phase("Running")
    trainer = job.uids("trainer")
    job.driver.say_rollouts((0, "ready"))
    until_wanted(job, 2, decided=2)
    until_there(job, "rollout-0", "rollout-1")
    job.driver.say_rollouts((0, "ready"), (1, "ready"))
    until_wanted(job, 3, decided=9)
    until_there(job, "rollout-0", "rollout-1", "rollout-2")
    assert job.condition("ElasticityActive")["status"] == "True"
    assert job.job()["spec"]["rollout"]["replicas"] == 1, "the spec is the user's"
    job.driver.say_rollouts((0, "ready"), (1, "ready"), (2, "ready"))
    until_wanted(job, 1, decided=0)
    job.driver.say_rollouts()
    job.until(lambda: len(job.pods("rollout")) == 1, "the others to be gone")
    assert job.uids("trainer") == trainer


def test_a_dry_run_shows_what_it_would_do_and_does_nothing(jobs: dict[str, OneJob]) -> None:
    job = jobs["watched"]
    job.until_phase("Running")
    before = job.uids()
    job.driver.say_rollouts((0, "ready"), (1, "ready"))
    until_wanted(job, 4, decided=4)
    job.until_says("ElasticityActive", "DryRun")
    assert job.uids() == before


def test_whoever_else_scales_switches_the_policy_off(jobs: dict[str, OneJob]) -> None:
    job = jobs["owned"]
    job.until_phase("Running")
    job.driver.say_rollouts((0, "ready"), (1, "ready"))
    job.scale(3)
    assert "kubectl" in job.until_says("ElasticityActive", "ForeignOwner")
    job.driver.say(step=9, desiredRollouts=2)
    until_there(job, "rollout-0", "rollout-1", "rollout-2")
    job.until(lambda: job.driver.heard > 3, "the figures to be heard")
    assert "desiredReplicas" not in job.status()
    assert len(job.pods("rollout")) == 3


def test_a_node_that_is_taken_back_takes_its_rollouts_with_it_and_nobody_else(
    jobs: dict[str, OneJob], kwok_plane: ControlPlane
) -> None:
    """A notice of the end of a spot node is a taint, or a deletion of its pods: they are told to end, and drain."""
    job = jobs["spot"]
    (node,) = kwok_plane.add_nodes(1, labels={"price": "spot"})
    job.until_phase("Running")
    before = job.uids()
    assert job.pods("rollout")["rollout-0"]["spec"]["nodeName"] == node
    notice = {"key": "cloud.example/spot-ends", "effect": "NoExecute"}
    kwok_plane.api.patch(f"/api/v1/nodes/{node}", {"spec": {"taints": [notice]}})
    job.until(lambda: job.uids("rollout").get("rollout-0") not in (None, before["rollout-0"]), "another one")
    waiting = job.pods("rollout")["rollout-0"]
    assert "nodeName" not in waiting["spec"], "there is no other node of that kind"
    job.until_says("WhyPending", "Unschedulable")
    kwok_plane.api.patch(f"/api/v1/nodes/{node}", {"spec": {"taints": None}})
    job.until(lambda: job.running_by_role()["rollout"] == 1, "it to run")
    after = job.uids()
    assert {seat for seat in before if after[seat] != before[seat]} == {"rollout-0"}
    assert job.status()["attempt"] == 0
    assert not job.status().get("restarts"), "it is no failure"


def test_a_queue_that_stands_alone_starts_in_order_heals_scales_and_goes(
    kwok_plane: ControlPlane, shared_operator: OperatorProcess
) -> None:
    queue = {"apiVersion": "asyncflow.dev/v1alpha1", "kind": "TransferQueue"}
    kwok_plane.api.create(ALONE, queue | {"metadata": {"name": "alone"}, "spec": {"storageUnits": 2}})

    def pods() -> dict[str, str]:
        label = "asyncflow.dev/queue=alone"
        found = kwok_plane.api.get("/api/v1/namespaces/jobs/pods", labelSelector=label)["items"]
        return {pod["metadata"]["name"].removeprefix("alone-"): pod["metadata"]["uid"] for pod in found}

    def until(*wanted: str) -> None:
        kwok_plane.wait_until(lambda: set(pods()) == set(wanted), f"the pods {wanted}")

    until("controller-0", "storage-0", "storage-1")
    kwok_plane.wait_until(lambda: ready(kwok_plane), "the queue to be ready")
    before = pods()
    assert kwok_plane.api.get(f"{ALONE}/alone")["status"]["address"] == "tcp://alone-controller.jobs.svc:5571"
    kwok_plane.api.patch(
        "/api/v1/namespaces/jobs/pods/alone-storage-0", {"metadata": {"annotations": {"kwok.test/exit": "1"}}}
    )
    kwok_plane.wait_until(lambda: pods().get("storage-0", before["storage-0"]) != before["storage-0"], "a new unit")
    kwok_plane.kubectl("-n", "jobs", "scale", "tq/alone", "--replicas=3")
    until("controller-0", "storage-0", "storage-1", "storage-2")
    kwok_plane.kubectl("-n", "jobs", "scale", "tq/alone", "--replicas=1")
    until("controller-0", "storage-0")
    assert pods()["controller-0"] == before["controller-0"]
    kwok_plane.api.delete(f"{ALONE}/alone")
    until()


def ready(plane: ControlPlane) -> bool:
    conditions = plane.api.get(f"{ALONE}/alone").get("status", {}).get("conditions", ())
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
