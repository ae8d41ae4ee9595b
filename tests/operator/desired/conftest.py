"""A job and a queue of every kind, as the operator sees them."""

from collections.abc import Callable
from typing import Any

import pytest

from asyncflow.api.job import RLJob
from asyncflow.api.queue import TransferQueue
from asyncflow_operator.desired import Desired, DesiredSettings, Registry
from asyncflow_operator.observed import JobState, Owner, TransferQueueState

NAMESPACE = "team-a"


@pytest.fixture(scope="session")
def desired() -> Desired:
    registry = Registry(prefix="registry.example/asyncflow", tag="1.2.3")
    return Desired(DesiredSettings(registry=registry, master=b"m" * 32, watchers=("asyncflow-system", "monitoring")))


@pytest.fixture(scope="session")
def newer() -> Desired:
    """An operator of another version."""
    registry = Registry(prefix="registry.example/asyncflow", tag="1.3.0")
    return Desired(DesiredSettings(registry=registry, master=b"m" * 32, watchers=("asyncflow-system", "monitoring")))


@pytest.fixture(scope="session")
def job_state() -> Callable[..., JobState]:
    """Return the state of a job called ``math``; the keywords are parts of its spec."""

    def state(*, uid: str = "uid-1", labels: dict[str, str] | None = None, **spec: Any) -> JobState:
        usual: dict[str, Any] = {
            "model": {"source": "tiny://reverse-digits"},
            "data": {"train": {"source": "tiny://reverse-digits"}},
            "reward": {"function": "task"},
            "algorithm": {"steps": 10},
            "sampling": {"maxTokens": 16},
            "rollout": {"replicas": 3, "minReplicas": 1, "maxReplicas": 8},
            "transferQueue": {"storageUnits": 2},
        }
        metadata = {"name": "math", "namespace": NAMESPACE, "uid": uid, "labels": labels or {}}
        job = RLJob.model_validate({"metadata": metadata, "spec": usual | spec})
        owner = Owner(kind="RLJob", namespace=NAMESPACE, name="math", uid=uid, labels=labels or {})
        return JobState(owner=owner, job=job)

    return state


@pytest.fixture(scope="session")
def queue_state() -> Callable[..., TransferQueueState]:
    """Return the state of a queue called ``shared`` that stands alone; the keywords are parts of its spec."""

    def state(**spec: Any) -> TransferQueueState:
        queue = TransferQueue.model_validate({"metadata": {"name": "shared", "namespace": NAMESPACE}, "spec": spec})
        owner = Owner(kind="TransferQueue", namespace=NAMESPACE, name="shared", uid="uid-q")
        return TransferQueueState(owner=owner, queue=queue)

    return state
