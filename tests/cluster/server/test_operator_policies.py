"""Objects whose labels a policy of the cluster changes, on a cluster of its own that has such policies."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from one_job import OneJob
from scripted_driver import Driver

import operator_rights
from kube.plane import ControlPlane
from kube.rest import DRY_RUN
from operator_process import OperatorProcess

CRDS = Path(__file__).parents[3] / "crds"
POLICIES = "/apis/admissionregistration.k8s.io/v1beta1/mutatingadmissionpolic"
FLAGS = (
    "--feature-gates=MutatingAdmissionPolicy=true",
    "--runtime-config=admissionregistration.k8s.io/v1beta1=true",
)
PODS = "/api/v1/namespaces/changed/pods"
SERVICES = "/api/v1/namespaces/changed/services"
INDEX = "asyncflow.dev/index"
JOB = "asyncflow.dev/job"
CHANGES = 20


@pytest.fixture(scope="module")
def policed() -> Iterator[ControlPlane]:
    """A plane that has such policies."""
    with ControlPlane(apiserver_flags=FLAGS, audited=True) as plane:
        plane.install_crds(CRDS)
        plane.api.create("/api/v1/namespaces", {"metadata": {"name": "changed"}})
        operator_rights.grant(plane, "changed")
        account = operator_rights.account(plane, "policed")
        operator = OperatorProcess(plane, "policed", kubeconfig=account, namespace="changed", namespaces="changed")
        operator.start()
        operator.lead()
        plane.rely_on(operator.process)
        yield plane
        operator.process.end()


def enforce(
    plane: ControlPlane, resource: str, mutation: dict[str, Any], is_in_force: Callable[[], bool]
) -> Callable[[], None]:
    """Have a policy change the objects of a resource; return what ends it."""
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"], "resources": [resource]}
    policy = {
        "matchConstraints": {"resourceRules": [rule]},
        "reinvocationPolicy": "Never",
        "mutations": [mutation],
    }
    plane.api.create(f"{POLICIES}ies", {"metadata": {"name": resource}, "spec": policy})
    plane.api.create(f"{POLICIES}ybindings", {"metadata": {"name": resource}, "spec": {"policyName": resource}})
    plane.wait_until(is_in_force, "the policy to be in force")
    return lambda: plane.api.delete(f"{POLICIES}ybindings/{resource}") and None


def written(plane: ControlPlane, resource: str) -> int:
    """Return how often the operator has written an object of a resource."""
    requests = operator_rights.of(plane, "policed")
    return sum(each.kind == resource and each.verb in ("create", "patch") for each in requests)


def test_a_pod_whose_labels_are_changed_is_refused_by_name_and_no_hot_loop(policed: ControlPlane) -> None:
    sidecar = "Object.spec{containers: [Object.spec.containers{name: 'proxy', image: 'proxy'}]}"
    change = f"Object{{metadata: Object.metadata{{labels: {{'{INDEX}': '7'}}}}, spec: {sidecar}}}"
    mutation = {"patchType": "ApplyConfiguration", "applyConfiguration": {"expression": change}}
    pod = {"metadata": {"name": "any"}, "spec": {"containers": [{"name": "any", "image": "any"}]}}
    end = enforce(
        policed, "pods", mutation, lambda: "labels" in policed.api.create(PODS, pod, query=DRY_RUN)["metadata"]
    )
    job = OneJob(policed, "changed", "changed", Driver()).create()
    job.until_says("WhyPending", "Denied", "Pod/changed-driver-0", f"changed its label {INDEX}")
    assert not job.pods()
    end()
    job.until(lambda: job.pods("driver"), "the driver, now that nothing changes it")
    assert written(policed, "pods") < 10, "each refusal doubles the pause"
    job.delete()


def test_a_service_whose_label_is_removed_is_named_and_no_hot_loop(policed: ControlPlane) -> None:
    path = f'"/metadata/labels/" + jsonpatch.escapeKey("{JOB}")'
    has = f'has(object.metadata.labels) && "{JOB}" in object.metadata.labels'
    removal = f'{has} ? [JSONPatch{{op: "remove", path: {path}}}] : []'
    service = {"metadata": {"name": "any", "labels": {JOB: "any"}}, "spec": {"ports": [{"port": 80}]}}

    def is_in_force() -> bool:
        return JOB not in policed.api.create(SERVICES, service, query=DRY_RUN)["metadata"].get("labels", {})

    end = enforce(policed, "services", {"patchType": "JSONPatch", "jsonPatch": {"expression": removal}}, is_in_force)
    before = written(policed, "services")
    job = OneJob(policed, "changed", "stripped", Driver()).create()
    job.until_says("WhyPending", "Denied", "Service/stripped-", f"changed its label {JOB}")
    assert job.pods("driver"), "a pod needs no Service"
    for number in range(CHANGES):
        job.annotate("driver-0", number=str(number))
    end()
    job.until(lambda: "Service/" not in job.condition("WhyPending").get("message", ""), "the Services to be written")
    assert written(policed, "services") - before < CHANGES, "each refusal doubles the pause"
    job.delete()
