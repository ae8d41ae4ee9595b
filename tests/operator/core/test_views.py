import copy
from pathlib import Path
from typing import Any

import pytest

from asyncflow.api.document import parse
from asyncflow_operator.cluster.owners import custom_resource
from asyncflow_operator.cluster.views import controller_of, object_view, scalers
from asyncflow_operator.cluster.views import pod_view as view_at
from asyncflow_operator.decide.failure import PodEnd, end_of
from asyncflow_operator.observed import Assigned, PodView

NOW = 1_800_000_000.0
CREATED = 1_795_255_200.0
POD: dict[str, Any] = {
    "metadata": {
        "name": "j-rollout-2",
        "namespace": "ns",
        "uid": "u",
        "resourceVersion": "7",
        "creationTimestamp": "2026-11-21T10:00:00Z",
        "labels": {"asyncflow.dev/role": "rollout", "asyncflow.dev/index": "2", "asyncflow.dev/attempt": "3"},
        "annotations": {"asyncflow.dev/digest": "abc"},
        "ownerReferences": [{"kind": "RLJob", "name": "j", "uid": "uj", "controller": True}],
    },
    "spec": {"nodeName": "node-1", "containers": [{"name": "asyncflow"}]},
    "status": {
        "phase": "Running",
        "podIP": "10.0.0.7",
        "conditions": [{"type": "Ready", "status": "True"}, {"type": "PodScheduled", "status": "True"}],
        "containerStatuses": [
            {"name": "other", "state": {"waiting": {"reason": "CrashLoopBackOff"}}},
            {"name": "asyncflow", "state": {"running": {"startedAt": "2026-11-21T10:00:05Z"}}},
        ],
    },
}


def pod_view(raw: dict[str, Any]) -> PodView:
    return view_at(raw, now=NOW)


def pod(**status: Any) -> dict[str, Any]:
    raw = copy.deepcopy(POD)
    raw["status"] = status
    return raw


def ended(code: int, **more: Any) -> dict[str, Any]:
    state = {
        "terminated": {"exitCode": code, "startedAt": "2026-11-21T10:00:05Z", "finishedAt": "2026-11-21T10:01:00Z"}
    }
    state["terminated"] |= more
    return {"name": "asyncflow", "state": state}


def test_a_running_pod() -> None:
    view = pod_view(POD)
    assert (view.role, view.index, view.attempt, view.digest) == ("rollout", 2, 3, "abc")
    assert (view.phase, view.ready, view.scheduled, view.node, view.ip) == ("Running", True, True, "node-1", "10.0.0.7")
    assert view.started == view.created + 5
    assert controller_of(POD) == ("RLJob", "j", "uj")


def test_a_kubelet_with_a_fast_clock_puts_nothing_into_the_future() -> None:
    begun = view_at(POD, now=CREATED + 3)
    assert begun.started == CREATED + 3
    over = pod(phase="Failed", containerStatuses=[ended(0)])
    seen = view_at(over, begun, now=CREATED + 30)
    assert (seen.started, seen.finished) == (CREATED + 3, CREATED + 30)
    later = view_at(over, seen, now=CREATED + 300)
    assert (later.started, later.finished) == (seen.started, seen.finished)


def test_how_a_pod_ended_is_that_of_the_roles_container() -> None:
    view = pod_view(pod(phase="Failed", containerStatuses=[ended(137, reason="OOMKilled", message="x" * 5000)]))
    assert (view.exit_code, view.exit_reason, view.disrupted) == (137, "OOMKilled", False)
    assert len(view.last_words) == 4096
    assert view.finished == view.created + 60


@pytest.mark.parametrize(
    "status",
    [
        {"phase": "Failed", "reason": "Evicted", "message": "Pod was rejected: the node had [MemoryPressure]"},
        {"phase": "Failed", "conditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"phase": "Failed", "reason": "OutOfcpu"},
        {"phase": "Failed", "reason": "OutOfnvidia.com/gpu"},
        {"phase": "Failed", "reason": "OutOfephemeral-storage"},
        {"phase": "Failed", "reason": "TopologyAffinityError"},
        {"phase": "Failed", "reason": "TaintToleration"},
        {"phase": "Failed", "reason": "NodePorts"},
        {"phase": "Failed", "reason": "VolumeAttachmentLimitExceeded"},
    ],
)
def test_a_pod_that_the_cluster_took_away_counts_as_no_failure(status: dict[str, Any]) -> None:
    view = pod_view(pod(**status))
    assert view.disrupted
    assert view.exit_code is None


def test_a_pod_that_its_kubelet_evicts_beyond_its_own_limit_has_failed() -> None:
    words = 'Usage of EmptyDir volume "tmp" exceeds the limit "1Gi". '
    evicted = {"phase": "Failed", "reason": "Evicted", "message": words, "containerStatuses": [ended(0)]}
    view = pod_view(pod(**evicted))
    assert (end_of(view), view.exit_reason, view.last_words) == (PodEnd.FAILED, "Evicted", words)
    why = "The node was low on resource: memory."
    node_is_short = {"conditions": [{"type": "DisruptionTarget", "status": "True", "message": why}]}
    view = pod_view(pod(**evicted | node_is_short))
    assert (end_of(view), view.disruption) == (PodEnd.EVICTED, why)


UNSEEN = {
    "terminated": {
        "exitCode": 137,
        "reason": "ContainerStatusUnknown",
        "message": "The container could not be located when the pod was terminated",
        "startedAt": None,
        "finishedAt": None,
    }
}


@pytest.mark.parametrize(
    "states", [{"state": UNSEEN}, {"state": {"waiting": {"reason": "ContainerCreating"}}, "lastState": UNSEEN}]
)
def test_a_process_whose_end_no_kubelet_saw_counts_as_no_failure(states: dict[str, Any]) -> None:
    view = pod_view(pod(phase="Failed", containerStatuses=[{"name": "asyncflow", **states}]))
    assert (end_of(view), view.exit_reason) == (PodEnd.EVICTED, "ContainerStatusUnknown")
    seen = {"terminated": UNSEEN["terminated"] | {"reason": "OOMKilled"}}
    ours, other = {"name": "asyncflow", "state": seen}, {"name": "other", "state": UNSEEN}
    assert end_of(pod_view(pod(phase="Failed", containerStatuses=[ours, other]))) is PodEnd.FAILED


def test_an_init_container_that_failed_is_named() -> None:
    """Its exit code is none of a role: 2 does not mean that the input was refused."""
    fetched = {"exitCode": 2, "reason": "Error", "message": "404 Not Found"}
    states = [
        {"name": "first", "state": {"terminated": {"exitCode": 0}}},
        {"name": "fetch", "state": {"terminated": fetched}},
    ]
    begins = {"name": "asyncflow", "state": {"waiting": {"reason": "PodInitializing"}}}
    view = pod_view(pod(phase="Failed", initContainerStatuses=states, containerStatuses=[begins]))
    assert (view.exit_code, end_of(view)) == (None, PodEnd.FAILED)
    assert view.exit_reason == "init container fetch: exit code 2"
    assert view.last_words == "404 Not Found"
    over = pod_view(pod(phase="Failed", initContainerStatuses=states, containerStatuses=[ended(1, reason="Error")]))
    assert (over.exit_code, over.exit_reason, over.last_words) == (1, "Error", "")


def test_why_a_pod_waits() -> None:
    words = "0/3 nodes are available: 3 Insufficient cpu."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
    assert pod_view(pod(phase="Pending", conditions=[condition])).unschedulable == words
    waiting = [{"name": "asyncflow", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}]
    view = pod_view(pod(phase="Pending", containerStatuses=waiting))
    assert (view.waiting, view.waiting_message) == ("ImagePullBackOff", "no such image")
    gate = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
    assert pod_view(pod(phase="Pending", conditions=[gate])).gated


@pytest.mark.parametrize(("code", "phase"), [(0, "Succeeded"), (1, "Failed")])
def test_a_sidecar_that_runs_on_does_not_hide_the_end_of_our_container(code: int, phase: str) -> None:
    sidecar = {"name": "istio-proxy", "state": {"running": {"startedAt": "2026-11-21T10:00:01Z"}}}
    view = pod_view(pod(phase="Running", containerStatuses=[sidecar, ended(code)]))
    assert (view.phase, view.exit_code, view.leftover) == (phase, code, True)
    assert not pod_view(pod(phase=phase, containerStatuses=[ended(code)])).leftover
    beside = pod(phase="Running", containerStatuses=[ended(code)], initContainerStatuses=[sidecar])
    view = pod_view(beside)
    assert (view.phase, view.leftover) == (phase, False), "a kubelet ends what was started before our container"
    assert not pod_view(POD).leftover


def conditions(**statuses: str) -> list[dict[str, str]]:
    return [{"type": kind, "status": status} for kind, status in statuses.items()]


def test_a_pod_on_a_silent_node_differs_from_one_that_is_not_ready() -> None:
    """The node controller takes Ready away and nothing else; a kubelet says the same of both conditions."""
    assert pod_view(pod(phase="Running", conditions=conditions(Ready="False", ContainersReady="True"))).unreachable
    for kept in (conditions(Ready="True", ContainersReady="True"), conditions(Ready="False", ContainersReady="False")):
        assert not pod_view(pod(phase="Running", conditions=kept)).unreachable
    gated = pod(phase="Running", conditions=conditions(Ready="False", ContainersReady="True"))
    gated["spec"] = gated["spec"] | {"readinessGates": [{"conditionType": "example.com/gate"}]}
    assert not pod_view(gated).unreachable


def test_until_when_a_pod_that_is_deleted_may_stay() -> None:
    raw = copy.deepcopy(POD)
    raw["metadata"] |= {"deletionTimestamp": "2026-11-21T10:00:35Z", "deletionGracePeriodSeconds": 30}
    view = pod_view(raw)
    assert (view.deleting, view.ends_by, view.forced) == (True, NOW + 30, False), "by the clock of the one who waits"
    later = view_at(raw, view, now=NOW + 20)
    assert later.ends_by == NOW + 30
    raw["metadata"]["deletionGracePeriodSeconds"] = 5
    assert view_at(raw, later, now=NOW + 21).ends_by == NOW + 26, "somebody has shortened it"
    raw["metadata"]["deletionGracePeriodSeconds"] = 0
    assert pod_view(raw).forced
    assert (pod_view(POD).ends_by, pod_view(POD).forced) == (None, False)


def test_the_claims_of_a_pod() -> None:
    raw = copy.deepcopy(POD)
    raw["spec"]["volumes"] = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "ledger", "persistentVolumeClaim": {"claimName": "j-ledger"}},
    ]
    assert pod_view(raw).claims == ("j-ledger",)
    assert pod_view(POD).claims == ()


@pytest.mark.parametrize("lacking", ["spec", "status"])
def test_a_pod_without_a_part_has_a_view(lacking: str) -> None:
    raw = copy.deepcopy(POD)
    del raw[lacking]
    assert pod_view(raw).name == "j-rollout-2"
    raw["metadata"] = {"name": "x"}
    assert pod_view(raw).index == 0


@pytest.mark.parametrize("index", ["999999999", "1" * 63, "-1", "first", ""])
def test_an_index_that_no_operator_has_written_counts_as_none(index: str) -> None:
    raw = copy.deepcopy(POD)
    raw["metadata"]["labels"]["asyncflow.dev/index"] = index
    assert pod_view(raw).index == 0


def test_an_attempt_that_follows_the_highest_of_a_driver_is_read_back() -> None:
    raw = copy.deepcopy(POD)
    raw["metadata"]["labels"]["asyncflow.dev/attempt"] = "1000000001"
    assert pod_view(raw).attempt == 1_000_000_001


def test_an_object_of_which_only_the_metadata_is_known() -> None:
    view = object_view({"metadata": POD["metadata"] | {"deletionTimestamp": "2026-11-21T10:00:00Z"}}, kind="Service")
    assert (view.ref.kind, view.ref.name, view.digest, view.deleting) == ("Service", "j-rollout-2", "abc", True)


def test_scalers_are_the_managers_that_wrote_through_the_scale_subresource() -> None:
    replicas = {"f:spec": {"f:rollout": {"f:replicas": {}}}}
    fields = [
        {"manager": "kubectl", "operation": "Update", "fieldsV1": replicas},
        {"manager": "hpa", "operation": "Update", "subresource": "scale", "fieldsV1": replicas},
        {"manager": "asyncflow-operator", "subresource": "status", "fieldsV1": {"f:status": {}}},
    ]
    assert scalers({"metadata": {"managedFields": fields}}, ("spec", "rollout", "replicas")) == ("hpa",)


def job(*, generation: int = 1, labels: dict[str, str] | None = None, **status: Any) -> dict[str, Any]:
    file = Path(__file__).parents[3] / "examples/quickstart.yaml"
    manifest = parse(file.read_text(), source=file.name).data
    manifest["metadata"] |= {
        "namespace": "ns",
        "uid": "uj",
        "resourceVersion": "1",
        "generation": generation,
        "labels": labels or {},
        "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "x" * 10_000},
    }
    return manifest | {"status": status}


def test_a_job_is_parsed_once_per_generation_and_labels() -> None:
    first = custom_resource("RLJob", job(), None)
    assert first.model is not None, first.problem
    assert first.model.metadata.uid == "uj"
    again = custom_resource("RLJob", job(phase="Running"), first)
    assert again.model is first.model
    assert again.status.phase == "Running"
    assert custom_resource("RLJob", job(phase="Running"), again).status is again.status
    assert custom_resource("RLJob", job(generation=2), again).model is not first.model
    assert custom_resource("RLJob", job(labels={"team": "a"}), again).model.metadata.labels == {"team": "a"}


def test_a_job_that_needs_what_is_not_there_yet_says_so() -> None:
    raw = job()
    raw["spec"]["trainer"] |= {"external": True}
    view = custom_resource("RLJob", raw, None)
    assert view.model is None
    assert view.problem_reason == "NotYet"
    assert "spec.trainer.external" in view.problem


def test_a_job_that_the_contract_refuses_says_what_to_do() -> None:
    raw = job()
    raw["spec"]["algorithm"]["steps"] = 0
    view = custom_resource("RLJob", raw, None)
    assert (view.model, view.problem_reason) == (None, "Invalid")
    assert "spec.algorithm.steps" in view.problem
    assert "Set a value of at least 1" in view.problem


def test_a_status_that_nobody_understands_starts_again() -> None:
    assert custom_resource("RLJob", job(phase=7, somethingNew=1), None).status.phase == "Pending"


def test_fields_that_only_a_newer_version_knows_are_ignored() -> None:
    newer = job(phase="Succeeded", newest="x", failures={"trainer": {"attempt": 3, "newest": 1}})
    newer["spec"]["newest"] = "x"
    newer["spec"]["rollout"]["newest"] = {"a": 1}
    seen = custom_resource("RLJob", newer, None)
    assert seen.model is not None
    assert (seen.problem, seen.status.phase, seen.status.failures["trainer"].attempt) == ("", "Succeeded", 3)


def test_settings_that_kueue_assigned_are_read_from_a_workload() -> None:
    update = {"name": "trainer", "nodeSelector": {"zone": "b"}}
    status = {
        "conditions": [{"type": "QuotaReserved", "status": "True", "message": "reserved"}],
        "admission": {
            "podSetAssignments": [
                {"name": "trainer", "flavors": {"cpu": "big", "memory": "big", "npu": "a3"}},
                {"name": "driver", "count": 1},
            ]
        },
        "admissionChecks": [{"name": "p", "podSetUpdates": [update]}],
    }
    meta = {"name": "demo", "uid": "u", "resourceVersion": "7"}
    view = object_view({"metadata": meta, "status": status}, kind="Workload")
    assert (view.phase, view.said, view.version) == ("Reserved", "reserved", "7")
    assert view.assigned == {"trainer": Assigned(flavors=("a3", "big"), more=(update,)), "driver": Assigned()}
    assert object_view({"metadata": {"name": "demo"}}, kind="Workload").phase == "Pending"


@pytest.mark.parametrize(
    ("holding", "admission", "phase", "said"),
    [
        ([], False, "Pending", "of QuotaReserved"),
        (["QuotaReserved"], True, "Reserved", "of QuotaReserved"),
        (["QuotaReserved", "Admitted"], True, "Admitted", "of Admitted"),
        (["QuotaReserved", "Admitted", "Evicted"], False, "Evicted", "of Evicted"),
        (["Admitted", "Evicted"], True, "Evicted", "of Evicted"),
        (["Evicted"], False, "Pending", "of QuotaReserved"),
        (["QuotaReserved", "Admitted", "Finished"], True, "Finished", "of Finished"),
    ],
)
def test_the_stage_of_a_workload_is_the_latest_and_an_eviction_lasts_until_its_quota_is_returned(
    holding: list[str], admission: bool, phase: str, said: str
) -> None:
    conditions = [
        {"type": kind, "status": str(kind in holding), "message": f"of {kind}"}
        for kind in ("QuotaReserved", "Admitted", "Evicted", "Finished")
    ]
    status = {"conditions": conditions} | ({"admission": {"clusterQueue": "all"}} if admission else {})
    view = object_view({"metadata": {"name": "demo"}, "status": status}, kind="Workload")
    assert (view.phase, view.said) == (phase, said)


@pytest.mark.parametrize("reason", ["Unschedulable", "SchedulingGated"])
def test_a_pod_that_has_no_place_and_one_that_may_not_look_for_one_are_told_apart(reason: str) -> None:
    waits = {"type": "PodScheduled", "status": "False", "reason": reason, "message": "why"}
    view = pod_view(pod(phase="Pending", conditions=[waits]))
    assert (view.gated, view.unschedulable) == ((False, "why") if reason == "Unschedulable" else (True, ""))


def test_a_deletion_without_a_grace_period_ends_at_once() -> None:
    raw = copy.deepcopy(POD)
    raw["metadata"]["deletionTimestamp"] = "2026-11-21T10:00:00Z"
    view = pod_view(raw)
    assert (view.deleting, view.ends_by, view.forced) == (True, NOW, False)


def test_the_phase_of_any_other_object_is_the_one_of_its_status() -> None:
    assert (
        object_view({"metadata": {"name": "d"}, "status": {"phase": "Bound"}}, kind="PersistentVolumeClaim").phase
        == "Bound"
    )


def test_gates_and_finalizers_of_a_pod_are_read() -> None:
    raw = copy.deepcopy(POD)
    raw["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    raw["metadata"]["finalizers"] = ["kueue.x-k8s.io/managed"]
    view = pod_view(raw)
    assert (view.gates, view.finalizers) == (("kueue.x-k8s.io/admission",), ("kueue.x-k8s.io/managed",))
