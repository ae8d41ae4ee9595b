"""Small jobs and pods to decide about."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from asyncflow.api.job import RLJob
from asyncflow_operator.desired import Desired, DesiredSettings, Registry
from asyncflow_operator.observed import PodView, Ref

START = 1_800_000_000.0
JOB = Ref("RLJob", "demo")
QUEUE = Ref("TransferQueue", "demo")
SYNC = Ref("WeightSync", "demo")
DESIRED = Desired(DesiredSettings(registry=Registry(prefix="registry.example", tag="1"), master=b"m" * 32))


def job_of(**spec: Any) -> RLJob:
    """Make a small job; the keywords are parts of its spec."""
    usual: dict[str, Any] = {
        "model": {"source": "tiny://reverse-digits"},
        "data": {"train": {"source": "tiny://reverse-digits"}},
        "reward": {"function": "task"},
        "algorithm": {"steps": 10},
        "sampling": {"maxTokens": 16},
        "rollout": {"replicas": 2, "minReplicas": 0, "maxReplicas": 16},
        "transferQueue": {"storageUnits": 2},
        "failurePolicy": {
            role: {"maxRestarts": 1000, "windowSeconds": 1_000_000, "backoffSeconds": 1}
            for role in ("driver", "controller", "storage", "rollout", "trainer")
        },
    }
    metadata = {"name": JOB.name, "namespace": "team", "uid": "uid-job"}
    return RLJob.model_validate({"metadata": metadata, "spec": usual | spec})


def pod_view(role: str, index: int = 0, *, attempt: int = 0, **changes: Any) -> PodView:
    """Return a pod that runs and is ready; the keywords change it."""
    usual: dict[str, Any] = {"phase": "Running", "ready": True, "started": START, "node": "node-1", "scheduled": True}
    name = f"{JOB.name}-{role}-{index}"
    return PodView(name=name, uid=f"uid-{name}-{attempt}", role=role, index=index, attempt=attempt, **(usual | changes))


def pending(role: str, index: int = 0, **changes: Any) -> PodView:
    """Return a pod that has not begun."""
    waits = {"phase": "Pending", "ready": False, "started": None, "node": "", "scheduled": False}
    return pod_view(role, index, **(waits | changes))


def dead(role: str, index: int = 0, *, code: int = 1, at: float = START + 5, **changes: Any) -> PodView:
    """Return a pod that ended with ``code``."""
    phase = "Succeeded" if code == 0 else "Failed"
    return pod_view(role, index, **({"phase": phase, "ready": False, "exit_code": code, "finished": at} | changes))


def failed(pod: PodView) -> bool:
    """Return whether a pod ended by its own failure, and not because it was taken away."""
    return pod.phase == "Failed" and not pod.disrupted and not pod.deleting and pod.exit_code not in (0, 2)


def names(pods: Iterable[PodView]) -> list[str]:
    """Return the names of pods without the job's, sorted."""
    return sorted(pod.name.removeprefix(f"{JOB.name}-") for pod in pods)
