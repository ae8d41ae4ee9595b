"""The objects that the operator makes for a job, and a request to take it as the operator makes it."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from asyncflow.api.job import RLJob
from asyncflow.api.names import FIELD_MANAGER
from asyncflow_operator.cluster.kinds import BY_NAME
from asyncflow_operator.desired import Desired, DesiredSettings, Registry
from asyncflow_operator.observed import JobState, Manifest, Owner, Ref, ReferredObject
from kube.plane import ControlPlane
from kube.rest import APPLY, DRY_RUN, STRICT

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
V1BETA1 = "kueue.x-k8s.io/v1beta1"


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


def workload_with(namespace: str, kind: str) -> Manifest:
    """Return the Workload of a job that has its priority from a class of this kind."""
    template = {"template": {"podSpec": {"priorityClassName": "high"}}} if kind == "PriorityClass" else {}
    state = job_state(namespace, scheduling={"gang": "kueue"}, **template)
    labels = {"kueue.x-k8s.io/priority-class": "high"} if kind == "WorkloadPriorityClass" else {}
    found = {Ref(kind, "high"): ReferredObject(content={"value": 1000})}
    state = replace(state, owner=replace(state.owner, labels=labels), found=found)
    (workload,) = (each for each in DESIRED.supporting(state) if each["kind"] == "Workload")
    return workload


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
