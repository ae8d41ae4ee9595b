"""A real API server accepts all that is made for any owner of pods, in a namespace with the restricted standard."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from accepted import DESIRED, apply, job_state, workload_with

from asyncflow.api.names import RoleName
from asyncflow.api.queue import TransferQueue
from asyncflow.api.weights import WeightSync
from asyncflow_operator.desired.secrets import SecretPart
from asyncflow_operator.observed import JobState, Manifest, Owner, SyncState, TransferQueueState
from kube import foreign
from kube.plane import ControlPlane
from kube.rest import DRY_RUN, Refused

ROOT = Path(__file__).parents[3]
SEATS: dict[RoleName, tuple[int, ...]] = {
    "driver": (0,),
    "controller": (0,),
    "storage": (0, 1),
    "trainer": (0, 1),
    "rollout": (0, 3),
}
CLAIMS = {"ledger": {"claim": {"size": "1Gi"}}, "checkpoints": {"claim": {"size": "1Gi"}}}
A3 = {"accelerator": {"profile": "ascend-a3", "count": 16}}
JOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {
        "model": {"source": "pvc://models/qwen"},
        "storage": CLAIMS,
        "weightSync": {"dtype": "bfloat16"},
        "template": {
            "labels": {"tier": "gold"},
            "annotations": {"note": "x"},
            "env": [{"name": "HF_HUB_OFFLINE", "value": "1"}],
            "podSpec": {
                "nodeSelector": {"pool": "any"},
                "tolerations": [{"key": "spot", "operator": "Exists"}],
                "imagePullSecrets": [{"name": "pull"}],
                "containers": [{"name": "asyncflow", "imagePullPolicy": "IfNotPresent"}],
            },
        },
        "trainer": {"replicas": 2, "resources": {"cpu": "1500m", "memory": "2Gi", "sharedMemory": "1Gi"}},
        "transferQueue": {
            "backend": "redis",
            "store": {"address": "redis.data.svc:6379", "password": {"name": "redis"}},
            "storageUnits": 2,
        },
    },
    "nvidia": {"trainer": {"replicas": 2, "accelerator": {"profile": "nvidia", "count": 8}}},
    "one-pod-gang": {"trainer": {"accelerator": {"profile": "nvidia", "count": 8}}},
    "ascend-alone": {"rollout": {"replicas": 4, "engine": {"name": "vllm"}, **A3}, "trainer": A3},
}
OF_THE_HOST: dict[str, dict[str, Any]] = {
    "ascend-gang": {"trainer": {"replicas": 2, **A3}},
    "ascend-a5": {"trainer": {"accelerator": {"profile": "ascend-a5", "count": 8}}},
    "host-network": {"trainer": {"replicas": 2, **A3}, "template": {"podSpec": {"hostNetwork": True}}},
    "no-runtime-class": {"trainer": A3, "template": {"podSpec": {"runtimeClassName": ""}}},
}


@pytest.fixture(scope="module")
def server(plane: ControlPlane) -> ControlPlane:
    """The plane with what clusters with devices and gang schedulers have."""
    for name in ("nvidia", "ascend"):
        body = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": name}, "handler": name}
        if not plane.api.exists(f"/apis/node.k8s.io/v1/runtimeclasses/{name}"):
            plane.api.create("/apis/node.k8s.io/v1/runtimeclasses", body)
    foreign.install(plane, kueue=foreign.OLDER)
    return plane


@pytest.fixture
def restricted(server: ControlPlane, namespace: str) -> str:
    return secured(server, namespace, "restricted")


def secured(server: ControlPlane, namespace: str, level: str) -> str:
    labels = {"pod-security.kubernetes.io/enforce": level, "pod-security.kubernetes.io/enforce-version": "latest"}
    server.api.patch(f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": labels}})
    return namespace


def pods_of(state: JobState) -> list[Manifest]:
    assert state.job is not None
    ranks = state.job.spec.trainer.replicas
    seats = [(role, index) for role, indices in SEATS.items() for index in indices]
    return [DESIRED.pod(state, role, index, 3) for role, index in seats if role != "trainer" or index < ranks]


def with_account(server: ControlPlane, state: JobState) -> None:
    """Pods are refused where their ServiceAccount is not."""
    apply(server, [each for each in DESIRED.supporting(state) if each["kind"] == "ServiceAccount"], dry=False)


@pytest.mark.parametrize("gang", ["none", "volcano", "kueue"])
@pytest.mark.parametrize("name", JOBS)
def test_a_job(server: ControlPlane, restricted: str, name: str, gang: str):
    state = job_state(restricted, **JOBS[name], scheduling={"gang": gang})
    with_account(server, state)
    apply(server, (*DESIRED.supporting(state), *DESIRED.children(state), *pods_of(state)), dry=True)


def test_the_followers_of_the_examples(server: ControlPlane, restricted: str):
    fleet = yaml.safe_load((ROOT / "examples" / "kubernetes" / "follow.yaml").read_text())
    template = fleet["spec"]["template"]
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": restricted}}
    apply(server, [account], dry=False)
    metadata = {"name": "follower", "namespace": restricted, **template["metadata"]}
    apply(server, [{"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}], dry=True)


@pytest.mark.parametrize("kind", ["PriorityClass", "WorkloadPriorityClass"])
def test_a_workload_of_an_older_kueue_with_a_priority(server: ControlPlane, restricted: str, kind: str):
    (stored,) = apply(server, [workload_with(restricted, kind)], dry=True)
    assert (stored["spec"]["priorityClassName"], stored["spec"]["priority"]) == ("high", 1000)


@pytest.mark.parametrize("name", OF_THE_HOST)
def test_what_needs_paths_of_its_host_is_accepted_where_that_is_allowed_and_only_there(
    server: ControlPlane, restricted: str, name: str
):
    state = job_state(restricted, **OF_THE_HOST[name])
    with_account(server, state)
    trainer = DESIRED.pod(state, "trainer", 0, 0)
    with pytest.raises(Refused, match="violates PodSecurity"):
        apply(server, [trainer], dry=True)
    secured(server, restricted, "privileged")
    apply(server, pods_of(state), dry=True)


def test_a_queue_that_stands_alone(server: ControlPlane, restricted: str):
    queue = TransferQueue.model_validate(
        {
            "metadata": {"name": "shared", "namespace": restricted},
            "spec": {"storageUnits": 2, "ledger": CLAIMS["ledger"], "resources": {"sharedMemory": "1Gi"}},
        }
    )
    owner = Owner(kind="TransferQueue", namespace=restricted, name="shared", uid="a-uid")
    state = TransferQueueState(owner=owner, queue=queue)
    supporting = DESIRED.queue_supporting(state)
    apply(server, supporting[:1], dry=False)
    pods = [DESIRED.queue_pod(state, role, 0, 0) for role in ("controller", "storage")]
    apply(server, (*supporting, *pods), dry=True)


def test_a_publisher(server: ControlPlane, restricted: str):
    spec = {"source": {"model": "pvc://exports/math", "watch": True}, "publisher": {"resources": {"memory": "8Gi"}}}
    sync = WeightSync.model_validate({"metadata": {"name": "fleet", "namespace": restricted}, "spec": spec})
    owner = Owner(kind="WeightSync", namespace=restricted, name="fleet", uid="a-uid")
    state = SyncState(owner=owner, sync=sync)
    supporting = DESIRED.sync_supporting(state)
    secrets = [DESIRED.secret(owner, SecretPart(role=role, leaves=1)) for role in ("publisher", "follower")]
    apply(server, supporting[:1], dry=False)
    apply(server, (*supporting, *secrets, DESIRED.sync_pod(state, 0)), dry=True)


def test_what_is_applied_again_is_not_written_again(server: ControlPlane, restricted: str):
    """From the second time on: the server itself completes a claim when it is applied once more."""
    state = job_state(restricted, **JOBS["full"])
    made = (*DESIRED.supporting(state), *DESIRED.children(state), *pods_of(state))
    apply(server, made, dry=False)
    settled = apply(server, made, dry=False)
    again = apply(server, made, dry=False)
    versions = [[each["metadata"]["resourceVersion"] for each in answers] for answers in (settled, again)]
    assert versions[0] == versions[1]


def test_what_was_asked_for_is_what_was_stored(server: ControlPlane, restricted: str):
    """Strict validation refuses fields that are unknown; this finds values that were changed or dropped."""
    state = job_state(restricted, **JOBS["full"])
    with_account(server, state)
    for asked, stored in zip(pods_of(state), apply(server, pods_of(state), dry=True), strict=True):
        wrong = list(differences(asked, stored, ""))
        assert not wrong, json.dumps(wrong, indent=1)


def differences(asked: Any, stored: Any, path: str) -> Iterable[str]:
    if isinstance(asked, dict) and isinstance(stored, dict):
        for key, value in asked.items():
            yield from differences(value, stored.get(key), f"{path}.{key}")
    elif isinstance(asked, list) and isinstance(stored, list) and len(asked) <= len(stored):
        for number, (one, other) in enumerate(zip(asked, stored, strict=False)):
            yield from differences(one, other, f"{path}[{number}]")
    elif asked != stored and not path.endswith((".cpu", ".memory", ".sizeLimit")):
        yield f"{path}: {asked!r} became {stored!r}"


def test_the_autoscaler_of_the_examples_is_accepted(plane: ControlPlane) -> None:
    hpa = yaml.safe_load((ROOT / "examples/kubernetes/hpa.yaml").read_text())
    path = "/apis/autoscaling/v2/namespaces/default/horizontalpodautoscalers"
    made = plane.api.create(path, hpa, query=DRY_RUN)
    assert made["spec"]["metrics"] == hpa["spec"]["metrics"]
    wrong = {**hpa, "spec": {**hpa["spec"], "targets": {}}}
    with pytest.raises(Refused, match="targets"):
        plane.api.create(path, wrong, query=DRY_RUN)
