"""Pods live on the fake nodes, and every failure that an operator must survive can be had by an annotation."""

from collections.abc import Callable
from typing import Any

import pytest

from kube.plane import ControlPlane

NPU = "huawei.com/Ascend910"
GATE = "asyncflow.dev/caught-up"


class Pods:
    """The pods of one test."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self.plane = plane
        self.path = f"/api/v1/namespaces/{namespace}/pods"

    def create(self, name: str, *, npus: int = 1, annotations: dict[str, str] | None = None, **spec: Any) -> None:
        resources = {"limits": {NPU: str(npus)}}
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "annotations": annotations or {}},
            "spec": {"containers": [{"name": "main", "image": "none", "resources": resources}]} | spec,
        }
        self.plane.api.create(self.path, body)

    def get(self, name: str) -> dict[str, Any]:
        return self.plane.api.get(f"{self.path}/{name}")

    def annotate(self, name: str, **values: str | None) -> None:
        annotations = {f"kwok.test/{key.replace('_', '-')}": value for key, value in values.items()}
        self.plane.api.patch(f"{self.path}/{name}", {"metadata": {"annotations": annotations}})

    def condition(self, name: str, kind: str) -> dict[str, str]:
        held = self.get(name)["status"].get("conditions", ())
        return next((condition for condition in held if condition["type"] == kind), {})

    def wait(self, name: str, what: str, condition: Callable[[dict[str, Any]], object]) -> None:
        self.plane.wait_until(lambda: condition(self.get(name)), f"{name} to be {what}", timeout_s=20)

    def wait_phase(self, name: str, phase: str) -> None:
        self.wait(name, phase, lambda pod: pod["status"].get("phase") == phase)

    def wait_ready(self, name: str, status: str) -> None:
        def reached() -> bool:
            return self.condition(name, "Ready").get("status") == status

        self.plane.wait_until(reached, f"Ready of {name} to be {status}", timeout_s=20)


@pytest.fixture
def pods(kwok_plane: ControlPlane, kwok_namespace: str) -> Pods:
    return Pods(kwok_plane, kwok_namespace)


def test_a_pod_is_scheduled_and_runs(pods: Pods) -> None:
    pods.create("plain")
    pods.wait_phase("plain", "Running")
    pod = pods.get("plain")
    assert pod["spec"]["nodeName"].startswith("node-")
    assert pod["status"]["podIP"]
    assert pods.condition("plain", "Ready")["status"] == "True"


def test_what_no_node_can_hold_stays_pending_with_the_arithmetic(pods: Pods) -> None:
    pods.create("big", npus=17)

    def said() -> str:
        return pods.condition("big", "PodScheduled").get("message", "")

    pods.plane.wait_until(lambda: f"Insufficient {NPU}" in said(), "the scheduler's answer", timeout_s=20)


def test_a_slow_start_and_a_held_one(pods: Pods) -> None:
    pods.create("held", annotations={"kwok.test/hold": "true"})
    pods.create("late", annotations={"kwok.test/start-delay": "1s"})
    pods.wait_phase("late", "Running")
    assert pods.get("held")["status"]["phase"] == "Pending"
    pods.annotate("held", hold=None)
    pods.wait_phase("held", "Running")


def test_an_exit_fails_or_completes_the_pod(pods: Pods) -> None:
    pods.create("killed")
    pods.create("done", annotations={"kwok.test/exit": "0"})
    pods.wait_phase("done", "Succeeded")
    pods.wait_phase("killed", "Running")
    pods.annotate("killed", exit="137", exit_reason="OOMKilled")
    pods.wait_phase("killed", "Failed")
    ended = pods.get("killed")["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (ended["exitCode"], ended["reason"]) == (137, "OOMKilled")


def test_a_crash_restarts_in_place(pods: Pods) -> None:
    pods.create("restless")
    pods.wait_phase("restless", "Running")
    for crashes in (1, 2):
        pods.annotate("restless", crash=str(crashes), crash_code="1")
        pods.wait(
            "restless",
            f"restarted {crashes} times",
            lambda pod, wanted=crashes: pod["status"]["containerStatuses"][0]["restartCount"] == wanted,
        )
    assert pods.get("restless")["status"]["containerStatuses"][0]["lastState"]["terminated"]["exitCode"] == 1


def test_ready_follows_the_readiness_gates(pods: Pods) -> None:
    pods.create("gated", readinessGates=[{"conditionType": GATE}])
    pods.wait_phase("gated", "Running")
    assert pods.condition("gated", "Ready")["status"] == "False"
    for status in ("True", "False", "True"):
        gate = {"status": {"conditions": [*pods.get("gated")["status"]["conditions"]]}}
        others = [condition for condition in gate["status"]["conditions"] if condition["type"] != GATE]
        gate["status"]["conditions"] = [*others, {"type": GATE, "status": status}]
        pods.plane.api.patch(f"{pods.path}/gated/status", gate)
        pods.wait_ready("gated", status)


def test_a_deletion_takes_its_time_or_never_ends(pods: Pods) -> None:
    pods.create("slow", annotations={"kwok.test/stop-delay": "1s"})
    pods.create("lost", annotations={"kwok.test/never-stop": "true"})
    for name in ("slow", "lost"):
        pods.wait_phase(name, "Running")
        pods.plane.api.delete(f"{pods.path}/{name}")
    assert pods.get("slow")["metadata"]["deletionTimestamp"]
    pods.plane.wait_until(lambda: not pods.plane.api.exists(f"{pods.path}/slow"), "slow to be gone", timeout_s=20)
    assert pods.plane.api.exists(f"{pods.path}/lost")
    pods.annotate("lost", never_stop=None)
    pods.plane.wait_until(lambda: not pods.plane.api.exists(f"{pods.path}/lost"), "lost to be gone", timeout_s=20)


def test_no_pod_is_deleted_for_an_earlier_one_of_its_name(pods: Pods) -> None:
    """kwok deletes by name: what it deletes beside the pod that is ending would be the next one."""
    for name, end in (("running", {}), ("ended", {"kwok.test/exit": "1"})):
        pods.create(name, annotations=end)
        pods.wait_phase(name, "Failed" if end else "Running")
        pods.plane.api.delete(f"{pods.path}/{name}")
        pods.plane.wait_until(
            lambda name=name: not pods.plane.api.exists(f"{pods.path}/{name}"), f"{name} to be gone", timeout_s=20
        )
        pods.create(name)
        pods.wait_phase(name, "Running")
    namespace = pods.path.split("/")[4]
    deleted = [
        each.name
        for each in pods.plane.requests(user="kwok")
        if (each.verb, each.resource, each.namespace) == ("delete", "pods", namespace)
    ]
    assert deleted == ["running"], "of what has ended the API server needs nobody's word"


def test_a_node_is_lost_with_its_pods_and_comes_back(pods: Pods) -> None:
    plane = pods.plane
    for name in ("plain", "deleted"):
        pods.create(name)
        pods.wait_phase(name, "Running")
    nodes = {name: pods.get(name)["spec"]["nodeName"] for name in ("plain", "deleted")}

    def tainted() -> bool:
        taints = plane.api.get(f"/api/v1/nodes/{nodes['plain']}")["spec"].get("taints", ())
        return any(taint["key"] == "node.kubernetes.io/unreachable" for taint in taints)

    for node in set(nodes.values()):
        plane.lose_node(node)
    try:
        plane.wait_until(tainted, "the node to be tainted", timeout_s=20)
        pods.wait_ready("plain", "False")
        plane.api.delete(f"{pods.path}/deleted")
        pods.wait_ready("deleted", "False")
    finally:
        for node in set(nodes.values()):
            plane.return_node(node)
    plane.wait_until(lambda: not tainted(), "the node to be back", timeout_s=20)
    pods.wait_ready("plain", "True")
    plane.wait_until(lambda: not plane.api.exists(f"{pods.path}/deleted"), "the deleted to be gone", timeout_s=20)


def test_what_an_object_owns_goes_with_it(pods: Pods) -> None:
    maps = pods.path.replace("pods", "configmaps")
    owner = pods.plane.api.create(maps, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owner"}})
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
    owned = {"name": "owned", "ownerReferences": [reference]}
    pods.plane.api.create(maps, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": owned})
    pods.plane.api.delete(f"{maps}/owner")
    pods.plane.wait_until(lambda: not pods.plane.api.exists(f"{maps}/owned"), "the owned to be gone", timeout_s=30)
