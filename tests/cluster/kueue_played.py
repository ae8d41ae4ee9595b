"""Kueue's part, played on its real definitions: what it writes on a Workload, and what it puts on a pod."""

from typing import Any

from kube.plane import ControlPlane

NEWEST, OLDER = "/apis/kueue.x-k8s.io/v1beta2", "/apis/kueue.x-k8s.io/v1beta1"
FLAVOR = "big"
BIG = {"nodeLabels": {"type": "kwok"}, "tolerations": [{"key": "big", "operator": "Exists", "effect": "NoSchedule"}]}
GATES = {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}, {"name": "kueue.x-k8s.io/topology"}]}
RESERVED = {"QuotaReserved": ("True", "Quota is reserved"), "Admitted": ("True", "The workload is admitted")}
_AT = "2026-11-21T10:00:00Z"


def kueues(kind: str, name: str, *, version: str = NEWEST, **content: Any) -> dict[str, Any]:
    """Return the manifest of an object of Kueue."""
    return {"apiVersion": version.removeprefix("/apis/"), "kind": kind, "metadata": {"name": name}} | content


def say(plane: ControlPlane, path: str, **stated: tuple[str, str]) -> None:
    """Write some of a Workload's conditions, by type, status and message. Quota is of the only flavor."""
    asked = plane.api.get(path)
    kept = [each for each in asked.get("status", {}).get("conditions", ()) if each["type"] not in stated]
    said = [
        {"type": kind, "status": status, "message": words, "reason": words.split(" ")[0]} | {"lastTransitionTime": _AT}
        for kind, (status, words) in stated.items()
    ]
    status: dict[str, Any] = {"conditions": [*kept, *said]}
    if stated.get("QuotaReserved") == RESERVED["QuotaReserved"]:
        assignments = [
            {"name": each["name"], "count": each["count"], "flavors": {"cpu": FLAVOR, "memory": FLAVOR}}
            for each in asked["spec"]["podSets"]
        ]
        status["admission"] = {"clusterQueue": "all", "podSetAssignments": assignments}
    plane.api.patch(f"{path}/status", {"status": status})
