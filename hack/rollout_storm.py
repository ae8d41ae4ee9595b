"""Random kills and scalings of one job's rollouts, from a seed, on a control plane of ``kube`` that simulates pods.

A rollout is killed (137, out of memory), deleted by a user, or deleted by the cluster because its node does not answer,
so that the deletion never completes by itself. The job is scaled by its scale subresource, as kubectl and an HPA do.
Invariant: only rollouts are disturbed, so the restart of any other process is caused by the operator.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

from kube.plane import ControlPlane
from kube.rest import Refused

_JOBS: Final = "/apis/asyncflow.dev/v1alpha1/namespaces/{}/rljobs"
_ROLE: Final = "asyncflow.dev/role"
_GONE: Final = 404
"""The chosen pod was removed in the meantime."""
SETTLE_S: Final = 120.0

Json = dict[str, Any]


class Storm:
    """One series of kills and scalings.

    most: the largest number of rollouts; events: the actions, in order; scalings: the numbers of rollouts before and
    after each scaling.
    """

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
        """Perform ``count`` actions. Each scaling starts from a settled job, so that its duration can be measured."""
        kinds: list[Callable[[], None]] = [self._kill, self._delete, self._lose_node, self._scale]
        while len(self.events) < count:
            try:
                self._dice.choices(kinds, weights=(1, 1, 1, 3))[0]()
            except Refused as refused:
                if refused.status != _GONE:
                    raise
        self.settle()

    def settle(self) -> None:
        """Wait until exactly the wanted number of rollouts runs."""
        self._plane.wait_until(self._is_settled, "the rollouts to be as many as wanted", timeout_s=SETTLE_S)

    def others(self) -> dict[str, tuple[str, str]]:
        """Return UID and attempt of every pod that is not a rollout, by name."""
        pods = [pod for pod in self._pods() if pod["metadata"]["labels"][_ROLE] != "rollout"]
        return {
            pod["metadata"]["name"]: (pod["metadata"]["uid"], pod["metadata"]["labels"]["asyncflow.dev/attempt"])
            for pod in pods
        }

    def job(self) -> Json:
        """Return the job."""
        return self._plane.api.get(self.path)

    def _kill(self) -> None:
        if pod := self._victim():
            self._annotate(pod, exit="137", exit_reason="OOMKilled")
            self.events.append("kill")

    def _delete(self) -> None:
        if pod := self._victim():
            self._plane.api.delete(self._path(pod))
            self.events.append("delete")

    def _lose_node(self) -> None:
        """Delete a pod whose node does not answer."""
        if pod := self._victim():
            self._annotate(pod, lost="true")
            self._plane.api.delete(self._path(pod))
            self.events.append("lose")

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

    def _annotate(self, pod: Json, **annotations: str | None) -> None:
        named = {f"kwok.test/{key.replace('_', '-')}": value for key, value in annotations.items()}
        self._plane.api.patch(self._path(pod), {"metadata": {"annotations": named}})

    def _path(self, pod: Json) -> str:
        return f"/api/v1/namespaces/{self._namespace}/pods/{pod['metadata']['name']}"

    def _rollouts(self) -> list[Json]:
        return [pod for pod in self._pods() if pod["metadata"]["labels"][_ROLE] == "rollout"]

    def _pods(self) -> list[Json]:
        path, label = f"/api/v1/namespaces/{self._namespace}/pods", f"asyncflow.dev/job={self._name}"
        return list(self._plane.api.get(path, labelSelector=label)["items"])


def _runs(pod: Json) -> bool:
    leaves = "deletionTimestamp" in pod["metadata"] or "kwok.test/exit" in pod["metadata"].get("annotations", {})
    return pod["status"].get("phase") == "Running" and not leaves
