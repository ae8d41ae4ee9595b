"""A WeightSync that publishes a model by itself, on a real API server: its publisher, and what its status says."""

import base64
from collections.abc import Iterator
from typing import Any

import pytest
from scripted_driver import Driver, ScriptedDrivers
from world import OURS, World

from kube.plane import ControlPlane
from operator_process import OperatorProcess

NAME = "published"
SYNC = f"{OURS}/namespaces/jobs/weightsyncs/{NAME}"
POD = f"/api/v1/namespaces/jobs/pods/{NAME}-publisher-0"
SECONDS = {"publish": 2.5, "transfer": 1.5, "swap": 0.125}


@pytest.fixture
def world(kwok_plane: ControlPlane, shared_operator: OperatorProcess) -> Iterator[World]:
    yield World(kwok_plane, "jobs")
    if kwok_plane.api.exists(SYNC):
        kwok_plane.api.delete(SYNC)


@pytest.fixture
def driver(drivers: ScriptedDrivers) -> Driver:
    return drivers.of("jobs", NAME)


def status(world: World) -> dict[str, Any]:
    return dict(world.plane.api.get(SYNC).get("status", {}))


def says(world: World, kind: str) -> dict[str, Any]:
    return next((each for each in status(world).get("conditions", ()) if each["type"] == kind), {})


def test_a_publisher_is_kept_and_goes_with_its_object(world: World, driver: Driver) -> None:
    api = world.plane.api
    driver.say(phase="Starting", waiting_for="the model to be read")
    manifest = {
        "apiVersion": "asyncflow.dev/v1alpha1",
        "kind": "WeightSync",
        "metadata": {"name": NAME},
        "spec": {"source": {"model": "tiny://reverse-digits"}, "follower": {"maxLength": 64}},
    }
    api.create(f"{OURS}/namespaces/jobs/weightsyncs", manifest)
    world.until(lambda: api.exists(POD), "the publisher's pod")
    world.until(lambda: driver.heard, "the publisher to be asked")
    api.patch(SYNC, {"spec": {"follower": {"maxLength": 65}}})
    world.until(lambda: "the model to be read" in says(world, "Ready").get("message", ""), "what it waits for")

    versions = {"followers": 2, "lag": (1, 1), "behind": 1, "bytes": 4096, "seconds": SECONDS}
    driver.say(phase="Running", version=3, waiting_for="", versions=versions)
    world.until(lambda: says(world, "Ready").get("reason") == "Serving", "its followers to be seen", timeout_s=60)
    seen = status(world)
    assert (seen["version"], seen["followers"], seen["behind"], seen["bytes"]) == (3, 2, 1, 4096)
    assert seen["seconds"] == SECONDS
    assert seen["address"] == f"tcp://{NAME}-publisher.jobs.svc:5571"
    secret = api.get(f"/api/v1/namespaces/jobs/secrets/{seen['certificate']}")
    assert set(secret["data"]) == {"ca.crt", "tls.crt", "tls.key"}
    assert b"BEGIN CERTIFICATE" in base64.b64decode(secret["data"]["tls.crt"])

    uid = api.get(POD)["metadata"]["uid"]
    api.delete(POD)
    world.until(lambda: api.exists(POD) and api.get(POD)["metadata"]["uid"] != uid, "the publisher to be made again")
    assert api.get(POD)["metadata"]["labels"]["asyncflow.dev/attempt"] == "1"

    moved = api.get(SYNC) | {"spec": {"source": {"model": "tiny://other"}}}
    with pytest.raises(Exception, match="followers have certificates of one source"):
        api.patch(SYNC, {"spec": moved["spec"]})
    api.delete(SYNC)
    world.until(lambda: not api.exists(POD), "its pod to go with it", timeout_s=60)
