"""Several who write: two operators, of which one works; and people and autoscalers, who own ``replicas``."""

import signal
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Any

import pytest
from world import World

import operator_rights
from kube.audit import Request
from kube.plane import ControlPlane
from kube.rest import APPLY, Refused
from operator_process import OperatorProcess

LOST = 3
"""Exit status of an operator that has lost the lead."""
SCALED = ("spec", "rollout", "replicas")


class Pair:
    """Two operators of one namespace; the first leads, and a job runs."""

    def __init__(self, plane: ControlPlane, name: str) -> None:
        self.world = World.new(plane, name)
        operator_rights.grant(plane, self.world.namespace)
        self.first, self.second = (self._operator(plane, f"{name}-{which}") for which in ("first", "second"))

    def _operator(self, plane: ControlPlane, name: str) -> OperatorProcess:
        own = {"namespace": self.world.namespace, "namespaces": self.world.namespace}
        return OperatorProcess(plane, name, kubeconfig=operator_rights.account(plane, name), **own)

    def begin(self) -> dict[str, str]:
        """Start both; give the pods of the job, with their UIDs."""
        self.first.start()
        self.first.lead()
        self.second.start()
        self.world.apply()
        self.world.until_whole()
        self.world.until(self._is_quiet, "the leader to have written what it had to")
        return self.pods()

    def _is_quiet(self) -> bool:
        latest = self.writes(self.first)[-1].answered
        return datetime.now(UTC) - latest > timedelta(seconds=2)

    def leader(self) -> str:
        """Return who holds the Lease."""
        path = f"/apis/coordination.k8s.io/v1/namespaces/{self.world.namespace}/leases/asyncflow-operator"
        return str(self.world.plane.api.get(path)["spec"]["holderIdentity"])

    def pods(self) -> dict[str, str]:
        return {name: pod["metadata"]["uid"] for name, pod in self.world.pods().items()}

    def writes(self, operator: OperatorProcess) -> list[Request]:
        """Return what an operator has written, its Lease aside."""
        requests = operator_rights.of(self.world.plane, operator.process.name)
        return [each for each in requests if each.is_write and each.resource != "leases"]

    def end(self) -> None:
        self.first.process.end()
        self.second.process.end()
        self.world.plane.api.delete(f"/api/v1/namespaces/{self.world.namespace}")


@pytest.fixture
def pair(kwok_plane: ControlPlane) -> Iterator[Callable[[str], Pair]]:
    begun: list[Pair] = []

    def begin(name: str) -> Pair:
        begun.append(Pair(kwok_plane, name))
        return begun[-1]

    yield begin
    for each in begun:
        each.end()


@pytest.fixture
def world(kwok_plane: ControlPlane, kwok_namespace: str) -> Iterator[World]:
    """A namespace with an operator of its own."""
    operator_rights.grant(kwok_plane, kwok_namespace)
    own = {"namespace": kwok_namespace, "namespaces": kwok_namespace, "resync_seconds": 10}
    name = f"alone-{kwok_namespace}"
    operator = OperatorProcess(kwok_plane, name, kubeconfig=operator_rights.account(kwok_plane, name), **own)
    operator.start()
    yield World(kwok_plane, kwok_namespace)
    operator.process.end()


def test_when_the_leader_is_killed_or_hangs_the_other_works_and_no_two_ever_write(pair: Callable[[str], Pair]) -> None:
    """A leader that hung wakes to a changed world, which it would tidy: it must end instead, without one write."""
    killed, hung = pair("leader-killed"), pair("leader-hung")
    before = [each.begin() for each in (killed, hung)]
    killed.first.process.end()
    hung.first.process.send(signal.SIGSTOP)
    for each in (killed, hung):
        each.world.annotate("quickstart-storage-1", exit="1")
        each.world.kubectl("scale", "rlj/quickstart", "--replicas=3")
    for each in (killed, hung):
        each.second.lead()
    hung.first.process.send(signal.SIGCONT)
    assert hung.first.wait() == LOST
    assert hung.leader() == "leader-hung-second", "whose the lead is, it leaves to him"
    for each, made in zip((killed, hung), before, strict=True):
        each.world.until(lambda world=each.world: world.is_whole(rollout=3), "the job to be whole")
        assert each.world.attempts()["quickstart-storage-1"] == "1"
        kept = each.pods()
        assert {name for name in made if made[name] != kept[name]} == {"quickstart-storage-1"}
        last, first = each.writes(each.first)[-1], each.writes(each.second)[0]
        assert last.at < first.at


def replicas(world: World) -> int:
    return int(world.job()["spec"]["rollout"]["replicas"])


def managers(raw: dict[str, Any], path: tuple[str, ...]) -> set[str]:
    """Return who manages a field."""
    found = set()
    for entry in raw["metadata"]["managedFields"]:
        fields = entry.get("fieldsV1")
        for step in path:
            fields = (fields or {}).get(f"f:{step}")
        if fields is not None:
            found.add(str(entry["manager"]))
    return found


def autoscaled(plane: ControlPlane, path: str, replicas: int) -> bool:
    """Scale as an HPA does: what it has read may have changed meanwhile."""
    scale = plane.api.get(f"{path}/scale")
    scale["spec"]["replicas"] = replicas
    try:
        plane.api.replace(f"{path}/scale", scale, query={"fieldManager": "horizontal-pod-autoscaler"})
    except Refused as refused:
        if refused.status != HTTPStatus.CONFLICT:
            raise
        return False
    return True


def test_replicas_belong_to_whoever_scales_and_never_to_the_operator(world: World) -> None:
    """An autoscaler writes through /scale, a person applies; the built-in policy is switched on beside them."""
    world.apply(lambda spec: spec.update(elasticity={"enabled": True}))
    world.until_whole()
    path = f"/apis/asyncflow.dev/v1alpha1/namespaces/{world.namespace}/rljobs/quickstart"

    world.until(lambda: autoscaled(world.plane, path, 4), "the autoscaler to find the job as it has read it")
    world.until_whole(rollout=4)
    world.until(lambda: world.condition("ElasticityActive").get("reason") == "ForeignOwner", "the policy to yield")

    mine = {"apiVersion": "asyncflow.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "quickstart"}}
    mine["spec"] = {"rollout": {"replicas": 3}}
    world.plane.api.patch(path, mine, form=APPLY, query={"fieldManager": "jane", "force": "true"})
    world.until_whole(rollout=3)

    world.kubectl("scale", "rlj/quickstart", "--replicas=2")
    world.until_whole(rollout=2)
    assert replicas(world) == 2
    assert "asyncflow-operator" not in managers(world.job(), ("spec",))
