"""Pods of the roles that a manifest adds: the reference model, and a user's tasks."""

from collections.abc import Callable
from typing import Any

import pytest

from asyncflow.api.names import DIGEST
from asyncflow.plan import plan
from asyncflow_operator.desired import Desired
from asyncflow_operator.observed import JobState, Manifest

JobStates = Callable[..., JobState]
TASK: dict[str, Any] = {
    "name": "measure",
    "function": "measures:length",
    "reads": ["response_ids"],
    "writes": [{"name": "length", "dtype": "int32", "most": 1}],
    "replicas": 2,
    "drainSeconds": 7,
}
SPEC: dict[str, Any] = {
    "algorithm": {"steps": 10, "kl": {"coefficient": 0.1}},
    "reference": {
        "accelerator": {"profile": "nvidia", "count": 1},
        "resources": {"cpu": "2", "memory": "8Gi"},
        "template": {"labels": {"tier": "gold"}},
    },
    "tasks": [TASK],
    "model": {"source": "pvc://models/base"},
}


def container(pod: Manifest) -> Manifest:
    return next(each for each in pod["spec"]["containers"] if each["name"] == "asyncflow")


def test_a_task_is_a_pod_with_its_own_certificate_which_the_policies_let_in(
    desired: Desired, job_state: JobStates
) -> None:
    state = job_state(**SPEC)
    pod = desired.pod(state, "task-measure", 1, 3)
    assert pod["metadata"]["name"] == "math-task-measure-1"
    assert pod["metadata"]["labels"]["asyncflow.dev/role"] == "task-measure"
    assert container(pod)["command"][:5] == ["python", "-m", "asyncflow", "role", "task-measure"]
    secret = next(
        source["secret"] for source in pod["spec"]["volumes"][0]["projected"]["sources"] if "secret" in source
    )
    assert secret["name"] == desired.secrets(state.owner).name("task-measure")
    assert [item["key"] for item in secret["items"]] == ["ca.crt", "1.crt", "1.key"]
    assert pod["spec"]["terminationGracePeriodSeconds"] == 12
    policies = [each for each in desired.supporting(state) if each["kind"] == "NetworkPolicy"]
    family = next(each for each in policies if each["metadata"]["name"] == "math")
    assert family["spec"]["podSelector"]["matchExpressions"] == [
        {"key": "asyncflow.dev/role", "operator": "NotIn", "values": ["driver"]}
    ]


def test_the_reference_has_its_devices_and_sees_the_model(desired: Desired, job_state: JobStates) -> None:
    pod = desired.pod(job_state(**SPEC), "reference", 0, 0)
    resources = container(pod)["resources"]
    assert resources["limits"] == {"memory": str(8 << 30), "nvidia.com/gpu": "1"}
    assert resources["requests"]["cpu"] == "2000m"
    assert container(pod)["image"].endswith("runtime-cuda:1.2.3")
    assert pod["metadata"]["labels"]["tier"] == "gold"
    assert {"name": "model", "mountPath": "/mnt/models", "readOnly": True} in container(pod)["volumeMounts"]
    gone = {
        each["key"]: each["tolerationSeconds"] for each in pod["spec"]["tolerations"] if "tolerationSeconds" in each
    }
    assert gone["node.kubernetes.io/unreachable"] == 0, "others have its rows as soon as its leases end"


def test_they_belong_to_the_core_and_stand_before_the_rollouts(desired: Desired, job_state: JobStates) -> None:
    state = job_state(**SPEC, scheduling={"gang": "volcano"})
    assert state.job is not None
    assert [role.name for role in plan(state.job).roles][-3:] == ["reference", "task-measure", "rollout"]
    group = next(each for each in desired.supporting(state) if each["kind"] == "PodGroup")
    assert group["spec"]["minMember"] == 9, "driver, controller, 2 units, trainer, reference, 2 of the task, 1 rollout"


def test_only_what_shapes_a_pod_changes_its_digest(desired: Desired, job_state: JobStates) -> None:
    def digest(role: str, **changes: Any) -> str:
        state = job_state(**{**SPEC, "tasks": [TASK | changes]})
        return str(desired.pod(state, role, 0, 0)["metadata"]["annotations"][DIGEST])

    same = digest("task-measure")
    assert digest("task-measure", replicas=3, batch=4, retries=0) == same
    assert digest("task-measure", resources={"cpu": "3"}) != same
    assert digest("reference", resources={"cpu": "3"}) == digest("reference")
    with pytest.raises(KeyError):
        desired.pod(job_state(), "task-measure", 0, 0)
