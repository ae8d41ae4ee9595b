"""A WeightSync that a job names, and one for followers of that job, on a real API server."""

from collections.abc import Iterator
from typing import Any

import pytest
from one_job import OneJob
from scripted_driver import Driver, ScriptedDrivers
from world import OURS

from kube.plane import ControlPlane
from operator_process import OperatorProcess

SYNCS = f"{OURS}/namespaces/jobs/weightsyncs"
NAMES = {"weightSync": {"name": "shared"}}
SECONDS = {"publish": 0.25, "transfer": 1.5, "stage": 0.5, "swap": 0.125}
LATE = {"id": "rollout-1-a", "version": 1, "lag": 3, "cause": "no heartbeat for 4 s"}


@pytest.fixture
def jobs(
    kwok_plane: ControlPlane, shared_operator: OperatorProcess, drivers: ScriptedDrivers
) -> Iterator[tuple[OneJob, OneJob]]:
    first, second = (OneJob(kwok_plane, "jobs", name, drivers.of("jobs", name), **NAMES) for name in ("one", "two"))
    yield first, second
    for path in (first.path, second.path, f"{SYNCS}/shared", f"{SYNCS}/fleet"):
        if kwok_plane.api.exists(path):
            kwok_plane.api.delete(path)


def make(plane: ControlPlane, name: str, **spec: Any) -> None:
    manifest = {"apiVersion": "asyncflow.dev/v1alpha1", "kind": "WeightSync", "metadata": {"name": name}, "spec": spec}
    plane.api.create(SYNCS, manifest)


def status_of(plane: ControlPlane, name: str) -> dict[str, Any]:
    return dict(plane.api.get(f"{SYNCS}/{name}").get("status", {}))


def ready(plane: ControlPlane, name: str) -> tuple[str, str]:
    conditions = status_of(plane, name).get("conditions", ())
    return next(((each["status"], each["reason"]) for each in conditions if each["type"] == "Ready"), ("", ""))


def tell(driver: Driver, **words: Any) -> None:
    """Have the driver say something, and that a rollout has come: that is heard at once, figures alone after 15 s."""
    known = len(driver.status.get("rollouts", ()))
    driver.say_rollouts(*((index, "ready") for index in range(known + 1)))
    driver.say(**words)


def test_a_job_runs_by_the_weight_sync_that_it_names(kwok_plane: ControlPlane, jobs: tuple[OneJob, OneJob]) -> None:
    job, other = jobs
    job.create().until_says("Accepted", "NoWeightSync", "there is no such WeightSync")
    assert not job.pods()
    make(kwok_plane, "shared", keep=5, bandwidth="100Mi")
    make(kwok_plane, "fleet", source={"job": "one"}, update="staggered", stagger=1)
    job.until_phase("Running")
    assert job.status()["weights"]["keep"] == 5
    config = kwok_plane.api.get("/api/v1/namespaces/jobs/configmaps/one")["data"]["job.yaml"]
    assert '"bandwidth": "100Mi"' in config
    assert not kwok_plane.api.exists(f"{SYNCS}/one"), "it makes none of its own"
    other.create().until_says("Accepted", "NoWeightSync", "RLJob one uses that WeightSync")
    job.until(lambda: ready(kwok_plane, "fleet") == ("False", "NoFollower"), "the driver to be heard")

    versions = {"rollouts": 2, "behind": 1, "lag": (1, 0, 0, 1), "laggards": (LATE,), "bytes": 99, "seconds": SECONDS}
    tell(job.driver, version=4, versions=versions | {"followers": 1}, fleets={"other": {"followers": 1}})
    job.until(lambda: status_of(kwok_plane, "shared").get("version") == 4, "the versions", timeout_s=60)
    shared = status_of(kwok_plane, "shared")
    assert (shared["job"], shared["seconds"], shared["laggards"], shared["bytes"]) == ("one", SECONDS, [LATE], 99)
    assert shared["followers"] == 1
    lagging = next(each for each in shared["conditions"] if each["type"] == "Lagging")
    assert "rollout-1-a by 3: no heartbeat for 4 s" in lagging["message"]
    assert ready(kwok_plane, "fleet") == ("False", "NoFollower")
    told = kwok_plane.api.get("/api/v1/namespaces/jobs/configmaps/fleet.sync")["data"]["job.yaml"]
    assert '"update": "staggered"' in told

    tell(
        job.driver, versions=versions | {"followers": 2}, fleets={"other": {"followers": 1}, "fleet": {"followers": 1}}
    )
    job.until(lambda: ready(kwok_plane, "fleet") == ("True", "Serving"), "a follower to be seen", timeout_s=60)
    fleet = status_of(kwok_plane, "fleet")
    assert fleet["address"] == "tcp://one-driver.jobs.svc:5571"
    assert set(job.secret("follower")) == {"ca.crt", "tls.crt", "tls.key"}
    assert fleet["certificate"] == job.status()["secrets"]["follower"]["name"]

    kwok_plane.api.delete(f"{SYNCS}/shared")
    job.until_says("Accepted", "NoWeightSync", "there is no such WeightSync")
    assert job.status()["weights"]["keep"] == 5
    assert job.phase() == "Running"
