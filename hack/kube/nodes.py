"""Fake nodes: objects that KWOK keeps Ready and whose pods it simulates by the stages in ``kwok/``.

Invariant: a fake node reports the capacity, hostname and zone that a real one reports, so the scheduler and affinity
rules see no difference. Only the label ``type: kwok`` assigns it to KWOK.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kube.rest import Api

NODES: Final = "/api/v1/nodes"
_PODS: Final = "/api/v1/pods"
_NOT_READY: Final = "kwok.test/notready"
_LOST: Final = "kwok.test/lost"
FAKE: Final = "type=kwok"
_CAPACITY: Final = {"cpu": "192", "memory": "1536Gi", "pods": "110", "ephemeral-storage": "4Ti"}
_ZONES: Final = 4


def fake_node(name: str, number: int, *, resource: str, count: int, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return a node with ``count`` of the extended ``resource``."""
    capacity = _CAPACITY | ({resource: str(count)} if count else {})
    own = {
        "type": "kwok",
        "kubernetes.io/hostname": name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "arm64" if resource.startswith("huawei.com/") else "amd64",
        "topology.kubernetes.io/zone": f"zone-{number % _ZONES}",
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": own | dict(labels)},
        "status": {"capacity": capacity, "allocatable": capacity},
    }


def ready(api: Api) -> set[str]:
    """Return the names of the fake nodes that are Ready."""
    return {
        node["metadata"]["name"]
        for node in api.get(NODES, labelSelector=FAKE)["items"]
        for condition in node["status"].get("conditions", ())
        if (condition["type"], condition["status"]) == ("Ready", "True")
    }


def set_lost(api: Api, name: str, *, lost: bool) -> None:
    """Make a node and its pods stop answering, or return. KWOK's stages of a pod cannot read the node, so each pod is
    annotated too.
    """
    value = "true" if lost else None
    api.patch(f"{NODES}/{name}", {"metadata": {"annotations": {_NOT_READY: value}}})
    for pod in api.get(_PODS, fieldSelector=f"spec.nodeName={name}")["items"]:
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
        api.patch(path, {"metadata": {"annotations": {_LOST: value}}})
