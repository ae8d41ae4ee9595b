"""A real API server accepts all that is made for any owner of pods, in a namespace with the restricted standard."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncflow.api.job import RLJob
from asyncflow.api.names import FIELD_MANAGER, RoleName
from asyncflow.api.queue import TransferQueue
from asyncflow.api.weights import WeightSync
from asyncflow_operator.cluster.kinds import BY_NAME
from asyncflow_operator.desired import Desired, DesiredSettings, Registry
from asyncflow_operator.desired.secrets import SecretPart
from asyncflow_operator.observed import JobState, Manifest, Owner, Ref, ReferredObject, SyncState, TransferQueueState
from kube import foreign
from kube.plane import ControlPlane
from kube.rest import APPLY, DRY_RUN, STRICT, Refused

DESIRED = Desired(
    DesiredSettings(
        registry=Registry(prefix="registry.example/asyncflow", tag="1.2.3"),
        master=b"m" * 32,
        watchers=("asyncflow-system",),
    )
)
PLURALS = {
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "Secret": "/api/v1/namespaces/{}/secrets",
    "Service": "/api/v1/namespaces/{}/services",
    "PersistentVolumeClaim": "/api/v1/namespaces/{}/persistentvolumeclaims",
    "Pod": "/api/v1/namespaces/{}/pods",
    "PodDisruptionBudget": "/apis/policy/v1/namespaces/{}/poddisruptionbudgets",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "TransferQueue": "/apis/asyncflow.dev/v1alpha1/namespaces/{}/transferqueues",
    "WeightSync": "/apis/asyncflow.dev/v1alpha1/namespaces/{}/weightsyncs",
    "PodGroup": "/apis/scheduling.volcano.sh/v1beta1/namespaces/{}/podgroups",
    "Workload": "/apis/kueue.x-k8s.io/v1beta1/namespaces/{}/workloads",
}
ROOT = Path(__file__).parents[2]
V1BETA1 = "kueue.x-k8s.io/v1beta1"
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


def job_state(namespace: str, **spec: Any) -> JobState:
    usual: dict[str, Any] = {
        "model": {"source": "tiny://reverse-digits"},
        "data": {"train": {"source": "tiny://reverse-digits"}},
        "reward": {"function": "task"},
        "algorithm": {"steps": 10},
        "sampling": {"maxTokens": 16},
        "rollout": {"replicas": 4, "minReplicas": 1},
        "transferQueue": {"storageUnits": 2},
    }
    job = RLJob.model_validate({"metadata": {"name": "math", "namespace": namespace}, "spec": usual | spec})
    return JobState(owner=Owner(kind="RLJob", namespace=namespace, name="math", uid="a-uid"), job=job)


def apply(server: ControlPlane, manifests: Iterable[Manifest], *, dry: bool) -> list[Manifest]:
    query = (DRY_RUN if dry else STRICT) | {"fieldManager": FIELD_MANAGER, "force": "true"}
    answers = []
    for each in map(as_older, manifests):
        path = PLURALS[each["kind"]].format(each["metadata"]["namespace"])
        answers.append(server.api.patch(f"{path}/{each['metadata']['name']}", each, form=APPLY, query=query))
    return answers


def as_older(manifest: Manifest) -> Manifest:
    """Return a manifest as it is written where Kueue is an older one."""
    return BY_NAME["Workload"].at(V1BETA1).written(manifest) if manifest["kind"] == "Workload" else manifest


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


@pytest.mark.parametrize("kind", ["PriorityClass", "WorkloadPriorityClass"])
def test_a_workload_with_a_priority(server: ControlPlane, kwok_plane: ControlPlane, restricted: str, kind: str):
    """Of an older Kueue and of the newest."""
    template = {"template": {"podSpec": {"priorityClassName": "high"}}} if kind == "PriorityClass" else {}
    state = job_state(restricted, scheduling={"gang": "kueue"}, **template)
    labels = {"kueue.x-k8s.io/priority-class": "high"} if kind == "WorkloadPriorityClass" else {}
    found = {Ref(kind, "high"): ReferredObject(content={"value": 1000})}
    state = replace(state, owner=replace(state.owner, labels=labels), found=found)
    (workload,) = (each for each in DESIRED.supporting(state) if each["kind"] == "Workload")
    (stored,) = apply(server, [workload], dry=True)
    assert (stored["spec"]["priorityClassName"], stored["spec"]["priority"]) == ("high", 1000)
    foreign.install(kwok_plane)
    path = f"/apis/{workload['apiVersion']}/namespaces/default/workloads/math"
    here = workload | {"metadata": workload["metadata"] | {"namespace": "default"}}
    stored = kwok_plane.api.patch(path, here, form=APPLY, query=DRY_RUN | {"fieldManager": FIELD_MANAGER})
    assert stored["spec"]["priorityClassRef"]["name"] == "high"


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


def test_the_budget_lets_one_pod_of_the_core_go_at_a_time(kwok_plane: ControlPlane, kwok_namespace: str):
    """With owners that have a scale of their own: the rollouts' is not that of the core."""
    api, jobs = kwok_plane.api, f"/apis/asyncflow.dev/v1alpha1/namespaces/{kwok_namespace}/rljobs"
    state = job_state(kwok_namespace, trainer={"replicas": 3})
    assert state.job is not None
    body = state.job.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude_none=True)
    stored = api.create(jobs, body | {"apiVersion": "asyncflow.dev/v1alpha1", "kind": "RLJob"})
    state = replace(state, owner=replace(state.owner, uid=stored["metadata"]["uid"]))
    apply(kwok_plane, DESIRED.supporting(state), dry=False)
    core = [("driver", 1), ("controller", 1), ("storage", 2), ("trainer", 3), ("rollout", 4)]
    apply(kwok_plane, [DESIRED.pod(state, role, index, 0) for role, count in core for index in range(count)], dry=False)
    budget = f"{PLURALS['PodDisruptionBudget'].format(kwok_namespace)}/math"

    def seen() -> tuple[int, int, int]:
        status = api.get(budget).get("status", {})
        return tuple(status.get(name, 0) for name in ("expectedPods", "currentHealthy", "disruptionsAllowed"))

    kwok_plane.wait_until(lambda: seen() == (7, 7, 1), f"one of 7 pods to be allowed to go, not {seen()}", timeout_s=30)


def test_the_autoscaler_of_the_examples_is_accepted(plane: ControlPlane) -> None:
    hpa = yaml.safe_load((ROOT / "examples/kubernetes/hpa.yaml").read_text())
    path = "/apis/autoscaling/v2/namespaces/default/horizontalpodautoscalers"
    made = plane.api.create(path, hpa, query=DRY_RUN)
    assert made["spec"]["metrics"] == hpa["spec"]["metrics"]
    wrong = {**hpa, "spec": {**hpa["spec"], "targets": {}}}
    with pytest.raises(Refused, match="targets"):
        plane.api.create(path, wrong, query=DRY_RUN)
