"""The operator may do what it does, and nothing else: the chart's rules against the API server's audit log.

This file is run after all others (conftest), so that whatever they made the operators do on this plane counts.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kueue_played import BIG, FLAVOR, GATES, NEWEST, RESERVED, kueues, say
from scripted_driver import ScriptedDrivers
from world import OURS, World, quickstart

import operator_rights
from asyncflow.api.names import DIGEST
from asyncflow_operator.cluster.kinds import MEMBERS, POD, QUEUE, SYNC, Kind
from kube import foreign
from kube.plane import ControlPlane
from operator_process import OperatorProcess

NAME = "privilege"
RANKED = {"priorityClassName": "system-cluster-critical"}
CLASSES = f"{NEWEST}/workloadpriorityclasses"
CLAIM = {"claim": {"size": "1Gi"}}


@pytest.fixture
def world(kwok_plane: ControlPlane) -> Iterator[World]:
    foreign.install(kwok_plane)
    made = World.new(kwok_plane, NAME)
    operator_rights.grant(kwok_plane, NAME)
    kwok_plane.api.create(CLASSES, kueues("WorkloadPriorityClass", NAME, value=10))
    kwok_plane.api.create(f"{NEWEST}/resourceflavors", kueues("ResourceFlavor", FLAVOR, spec=BIG))
    yield made
    for path in (f"/api/v1/namespaces/{NAME}", f"{CLASSES}/{NAME}", f"{NEWEST}/resourceflavors/{FLAVOR}"):
        kwok_plane.api.delete(path)


@pytest.fixture
def operator(kwok_plane: ControlPlane, world: World, drivers: ScriptedDrivers) -> Iterator[OperatorProcess]:
    account = operator_rights.account(kwok_plane, NAME)
    own = {"namespace": NAME, "namespaces": NAME, "probe_url": drivers.url, "probe_seconds": 1}
    running = OperatorProcess(kwok_plane, NAME, kubeconfig=account, **own)
    running.start()
    running.lead()
    yield running
    running.process.end()


def test_every_right_that_is_granted_is_used_and_none_is_missing(
    world: World, operator: OperatorProcess, drivers: ScriptedDrivers
) -> None:
    """The first job lives a whole life; the others are placed by somebody else, or find no place."""
    others: dict[str, Callable[[dict[str, Any]], object]] = {
        "volcano": lambda spec: spec.update(scheduling={"gang": "volcano"}),
        "kueue": lambda spec: spec.update(scheduling={"gang": "kueue"}, template={"podSpec": GATES}),
        "ranked": lambda spec: spec.update(scheduling={"gang": "kueue"}, template={"podSpec": RANKED}),
        "homeless": lambda spec: spec.update(template={"podSpec": {"nodeSelector": {"nowhere": "true"}}}),
        "kept": lambda spec: spec["storage"].update(ledger=CLAIM, checkpoints=CLAIM),
    }
    for name, change in others.items():
        manifest = quickstart(NAME, name)
        change(manifest["spec"])
        manifest["metadata"]["labels"] = {"kueue.x-k8s.io/priority-class": NAME} if name == "kueue" else {}
        world.plane.api.create(f"{OURS}/namespaces/{NAME}/rljobs", manifest)
    world.apply(lambda spec: spec.update(limits={"ttlSecondsAfterFinished": 1}))
    world.until(lambda: world.phase() == "Running" and len(gangs(world)) == 3, "the jobs to begin")
    say(world.plane, f"{NEWEST}/namespaces/{NAME}/workloads/kueue", **RESERVED)
    lose_a_rollout(world, attempt=1)
    operator.stop()
    make_old(world)
    operator.start()
    world.until(lambda: ready_is_told(world), "Kueue to be told that the pods are ready")
    lose_a_rollout(world, attempt=2)
    for name in ("volcano", "kueue", "ranked"):
        world.plane.api.patch(f"{OURS}/namespaces/{NAME}/rljobs/{name}", {"spec": {"suspend": True}})
    drivers.of(NAME, "kueue").say(phase="Suspended")
    world.annotate("quickstart-driver-0", exit="0")
    world.until(lambda: not world.exists() and not gangs(world), "the first job and the places to be gone")

    requests = operator_rights.of(world.plane)
    assert operator_rights.used(requests) == operator_rights.granted()
    assert operator_rights.refused(requests) == set()


def made(world: World, kind: Kind) -> list[dict[str, Any]]:
    labels = {"labelSelector": "app.kubernetes.io/managed-by=asyncflow-operator"}
    return list(world.plane.api.get(kind.path(NAME), **labels)["items"])


def gangs(world: World) -> list[dict[str, Any]]:
    return [each for kind in MEMBERS if kind.optional for each in made(world, kind)]


def ready_is_told(world: World) -> bool:
    asked = world.plane.api.get(f"{NEWEST}/namespaces/{NAME}/workloads/kueue")
    return any(each["type"] == "PodsReady" for each in asked["status"]["conditions"])


def make_old(world: World) -> None:
    """Have everything look as if an operator of another version had made it."""
    older = {"metadata": {"annotations": {DIGEST: "older"}}}
    for kind in (*MEMBERS, QUEUE, SYNC):
        if kind is not POD:
            for each in made(world, kind):
                world.plane.api.patch(kind.path(NAME, each["metadata"]["name"]), older)


def lose_a_rollout(world: World, *, attempt: int) -> None:
    """Twice the same words: an event that is there already is counted up."""
    world.annotate("quickstart-rollout-0", exit="1")
    world.until(lambda: world.attempts().get("quickstart-rollout-0") == str(attempt), "the next attempt", timeout_s=90)
