"""Kills and scalings of one job's rollouts, drawn from a seed, on a control plane of ``kube`` where pods live.

A rollout is killed (137, out of memory), deleted by a person, or loses its node, whose pods are then taken away and come
back with it; the job is scaled by its scale subresource, as kubectl and an HPA do. Invariant: nothing but rollouts is
ever touched, so whatever else begins anew is the operator's doing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

from kube.plane import ControlPlane

_JOBS: Final = "/apis/asyncflow.dev/v1alpha1/namespaces/{}/rljobs"
_ROLE: Final = "asyncflow.dev/role"
SETTLE_S: Final = 120.0

Json = dict[str, Any]


class Storm:
    """One storm. most: rollouts at a time; events: what happened, in order, and ``scalings``: from and to how many."""

    def __init__(self, plane: ControlPlane, namespace: str, name: str, *, seed: int, most: int) -> None:
        self._plane = plane
        self._namespace = namespace
        self._name = name
        self._most = most
        self._dice = random.Random(seed)
        self.path = f"{_JOBS.format(namespace)}/{name}"
        self.events: list[str] = []
        self.scalings: list[tuple[int, int]] = []

    def run(self, count: int) -> None:
        """Have ``count`` things happen; before each scaling wait until the job is settled, so that its time is its own."""
        kinds: list[Callable[[], None]] = [
            self._kill,
            self._delete,
            self._lose_node,
            self._scale,
            self._scale,
            self._scale,
        ]
        while len(self.events) < count:
            self._dice.choice(kinds)()
        self.settle()

    def settle(self) -> None:
        """Wait until exactly the wanted rollouts run."""
        self._plane.wait_until(self._is_settled, "the rollouts to be as many as wanted", timeout_s=SETTLE_S)

    def others(self) -> dict[str, tuple[str, str]]:
        """Give UID and attempt of every pod that is no rollout, by name."""
        pods = [pod for pod in self._pods() if pod["metadata"]["labels"][_ROLE] != "rollout"]
        return {
            pod["metadata"]["name"]: (pod["metadata"]["uid"], pod["metadata"]["labels"]["asyncflow.dev/attempt"])
            for pod in pods
        }

    def job(self) -> Json:
        """Give the job."""
        return self._plane.api.get(self.path)

    def _kill(self) -> None:
        if pod := self._victim():
            self._annotate(pod, exit="137", exit_reason="OOMKilled")
            self.events.append("kill")

    def _delete(self) -> None:
        if pod := self._victim():
            self._plane.api.delete(f"/api/v1/namespaces/{self._namespace}/pods/{pod['metadata']['name']}")
            self.events.append("delete")

    def _lose_node(self) -> None:
        """Lose the node of a rollout that has no other pod of the job; its pod is evicted and goes when it is back."""
        pods = self._pods()
        core = {pod["spec"].get("nodeName") for pod in pods if pod["metadata"]["labels"][_ROLE] != "rollout"}
        pod = self._victim()
        if pod is None or pod["spec"]["nodeName"] in core:
            return
        node = pod["spec"]["nodeName"]
        self._plane.lose_node(node)
        for each in pods:
            if each["spec"].get("nodeName") == node:
                self._plane.api.delete(f"/api/v1/namespaces/{self._namespace}/pods/{each['metadata']['name']}")
        self._plane.return_node(node)
        self.events.append("lose node")

    def _scale(self) -> None:
        self.settle()
        before = self.job()["spec"]["rollout"]["replicas"]
        after = self._dice.choice([count for count in range(1, self._most + 1) if count != before])
        self.scalings.append((before, after))
        self._plane.api.patch(f"{self.path}/scale", {"spec": {"replicas": after}})
        self.events.append(f"scale {before} to {after}")

    def _victim(self) -> Json | None:
        running = [pod for pod in self._rollouts() if _runs(pod)]
        return self._dice.choice(sorted(running, key=lambda pod: str(pod["metadata"]["name"]))) if running else None

    def _is_settled(self) -> bool:
        rollouts = self._rollouts()
        return len(rollouts) == self.job()["spec"]["rollout"]["replicas"] and all(map(_runs, rollouts))

    def _annotate(self, pod: Json, **annotations: str) -> None:
        named = {f"kwok.test/{key.replace('_', '-')}": value for key, value in annotations.items()}
        path = f"/api/v1/namespaces/{self._namespace}/pods/{pod['metadata']['name']}"
        self._plane.api.patch(path, {"metadata": {"annotations": named}})

    def _rollouts(self) -> list[Json]:
        return [pod for pod in self._pods() if pod["metadata"]["labels"][_ROLE] == "rollout"]

    def _pods(self) -> list[Json]:
        label = f"asyncflow.dev/job={self._name}"
        pods: list[Json] = self._plane.api.get(f"/api/v1/namespaces/{self._namespace}/pods", labelSelector=label)[
            "items"
        ]
        return pods


def _runs(pod: Json) -> bool:
    leaves = "deletionTimestamp" in pod["metadata"] or "kwok.test/exit" in pod["metadata"].get("annotations", {})
    return pod["status"].get("phase") == "Running" and not leaves
