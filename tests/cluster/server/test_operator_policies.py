"""Pods that a policy of the cluster changes as they are created, on a cluster of its own that has such policies."""

from collections.abc import Iterator
from pathlib import Path

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
LABEL = "asyncflow.dev/index"


@pytest.fixture(scope="module")
def policed() -> Iterator[ControlPlane]:
    """A plane on which a policy gives every pod the label of another one, and a sidecar."""
    with ControlPlane(apiserver_flags=FLAGS, audited=True) as plane:
        plane.install_crds(CRDS)
        plane.api.create("/api/v1/namespaces", {"metadata": {"name": "changed"}})
        rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
        sidecar = "Object.spec{containers: [Object.spec.containers{name: 'proxy', image: 'proxy'}]}"
        change = f"Object{{metadata: Object.metadata{{labels: {{'{LABEL}': '7'}}}}, spec: {sidecar}}}"
        policy = {
            "matchConstraints": {"resourceRules": [rule]},
            "reinvocationPolicy": "Never",
            "mutations": [{"patchType": "ApplyConfiguration", "applyConfiguration": {"expression": change}}],
        }
        plane.api.create(f"{POLICIES}ies", {"metadata": {"name": "changes"}, "spec": policy})
        plane.api.create(f"{POLICIES}ybindings", {"metadata": {"name": "changes"}, "spec": {"policyName": "changes"}})
        pod = {"metadata": {"name": "any"}, "spec": {"containers": [{"name": "any", "image": "any"}]}}
        plane.wait_until(
            lambda: "labels" in plane.api.create(PODS, pod, query=DRY_RUN)["metadata"], "the policy to be in force"
        )
        yield plane


def test_a_pod_whose_labels_are_changed_is_refused_by_name_and_no_hot_loop(policed: ControlPlane) -> None:
    operator_rights.grant(policed, "changed")
    account = operator_rights.account(policed, "policed")
    operator = OperatorProcess(policed, "policed", kubeconfig=account, namespace="changed", namespaces="changed")
    operator.start()
    operator.lead()
    policed.rely_on(operator.process)
    job = OneJob(policed, "changed", "changed", Driver()).create()
    job.until_says("WhyPending", "Denied", "Pod/changed-driver-0", f"changed its label {LABEL}")
    assert not job.pods()
    policed.api.delete(f"{POLICIES}ybindings/changes")
    job.until(lambda: job.pods("driver"), "the driver, now that nothing changes it")
    made = [each for each in operator_rights.of(policed, "policed") if (each.verb, each.kind) == ("create", "pods")]
    assert len(made) < 10, "each refusal doubles the pause"
    operator.process.end()
