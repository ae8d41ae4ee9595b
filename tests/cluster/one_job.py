"""One RLJob among others in a namespace, as its user sees it, and its driver, as the test wants it."""

import base64
from typing import Any

from scripted_driver import Driver
from world import OURS, World, quickstart

from kube.plane import ControlPlane

QUICK = {"backoffSeconds": 0}
ROLES = ("driver", "controller", "storage", "rollout", "trainer")


class OneJob(World):
    """The quickstart under another name; its processes are replaced at once."""

    def __init__(self, plane: ControlPlane, namespace: str, name: str, driver: Driver, **spec: Any) -> None:
        super().__init__(plane, namespace)
        self.name = name
        self.driver = driver
        self._spec = spec

    @property
    def path(self) -> str:
        return f"{OURS}/namespaces/{self.namespace}/rljobs/{self.name}"

    def manifest(self) -> dict[str, Any]:
        manifest = quickstart(self.namespace, self.name)
        manifest["spec"]["failurePolicy"] = dict.fromkeys(ROLES, QUICK)
        merge(manifest["spec"], self._spec)
        return manifest

    def create(self) -> "OneJob":
        self.plane.api.create(f"{OURS}/namespaces/{self.namespace}/rljobs", self.manifest())
        return self

    def delete(self) -> None:
        self.plane.api.delete(self.path)

    def job(self, name: str = "") -> dict[str, Any]:
        return self.plane.api.get(self.path)

    def status(self) -> dict[str, Any]:
        return dict(self.job().get("status", {}))

    def child(self, plural: str) -> dict[str, Any]:
        """Return the job's own queue or versions."""
        return self.plane.api.get(f"{OURS}/namespaces/{self.namespace}/{plural}/{self.name}")

    def exists(self, name: str = "") -> bool:
        return self.plane.api.exists(self.path)

    def edit(self, **spec: Any) -> None:
        self.plane.api.patch(self.path, {"spec": spec})

    def scale(self, replicas: int) -> None:
        """As kubectl scale and an HPA do."""
        self.plane.api.patch(f"{self.path}/scale", {"spec": {"replicas": replicas}}, query={"fieldManager": "kubectl"})

    def pods(self, role: str = "") -> dict[str, dict[str, Any]]:
        """Return the pods by what follows the job's name: ``rollout-1``."""
        labels = f"asyncflow.dev/job={self.name}" + (f",asyncflow.dev/role={role}" if role else "")
        found = self.plane.api.get(f"/api/v1/namespaces/{self.namespace}/pods", labelSelector=labels)["items"]
        return {pod["metadata"]["name"].removeprefix(f"{self.name}-"): pod for pod in found}

    def uids(self, role: str = "") -> dict[str, str]:
        return {seat: pod["metadata"]["uid"] for seat, pod in self.pods(role).items()}

    def annotate(self, pod: str, **annotations: str | None) -> None:
        super().annotate(f"{self.name}-{pod}", **annotations)

    def set_status(self, pod: str, **status: Any) -> None:
        """Say of a pod what its kubelet would."""
        path = f"/api/v1/namespaces/{self.namespace}/pods/{self.name}-{pod}/status"
        self.plane.api.patch(path, {"status": status})

    def until_phase(self, phase: str) -> None:
        self.until(lambda: self.phase() == phase, f"{self.name} to be {phase}: {self.status().get('conditions')}")

    def until_says(self, kind: str, reason: str, *words: str) -> str:
        """Wait until a condition has this reason and these words; give its whole message."""

        def said() -> bool:
            condition = self.condition(kind)
            return condition.get("reason") == reason and all(word in condition.get("message", "") for word in words)

        self.until(said, f"{self.name} to say {kind} {reason} {words}")
        return self.condition(kind)["message"]

    def secret(self, part: str) -> dict[str, bytes]:
        """Return what is in a Secret of the job, by the name of its part in the job's status."""
        name = self.status()["secrets"][part]["name"]
        found = self.plane.api.get(f"/api/v1/namespaces/{self.namespace}/secrets/{name}")
        return {key: base64.b64decode(value) for key, value in found["data"].items()}


def merge(into: dict[str, Any], what: dict[str, Any]) -> None:
    """Change a spec part by part."""
    for key, value in what.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            into[key] = dict(into[key])
            merge(into[key], value)
        else:
            into[key] = value
