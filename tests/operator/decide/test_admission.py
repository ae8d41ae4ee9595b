"""The gang scheduler's object: its state, and the decisions that follow from it."""

from dataclasses import replace
from typing import Any

import pytest
from model_samples import DESIRED, START, job_of, pod_view

from asyncflow.api.names import DIGEST
from asyncflow.api.records import RoleRecord
from asyncflow.api.status import JobStatus
from asyncflow_operator.actions import Release, Report
from asyncflow_operator.cluster.views import object_view
from asyncflow_operator.decide import decide_job
from asyncflow_operator.decide.admission import (
    admitted,
    changeable,
    delete_gang,
    evicted,
    pods_ready,
    release_pods,
    requeue,
    waits_for,
)
from asyncflow_operator.decide.times import to_rfc3339
from asyncflow_operator.observed import JobState, ObjectView, Owner, Ref, ReferredObject

WORKLOAD = Ref("Workload", "demo")
OWNER = Owner(kind="RLJob", namespace="team", name="demo", uid="uid-job")
BEFORE = "2026-11-21T10:00:00Z"
ADMISSION = {"podSetAssignments": [{"name": "trainer", "flavors": {"cpu": "big", "memory": "big"}}]}
KUEUE = job_of(scheduling={"gang": "kueue"})


def workload(admission: Any = None, **conditions: tuple[str, str]) -> dict[Ref, ObjectView]:
    """As Kueue leaves it: by type, status and message; the reason is the message's first word."""
    stated = [
        {"type": kind, "status": status, "message": said, "reason": said.split(" ")[0], "lastTransitionTime": BEFORE}
        for kind, (status, said) in conditions.items()
    ]
    meta = {"name": "demo", "uid": "u", "resourceVersion": "7"}
    status = {"conditions": stated} | ({"admission": admission} if admission else {})
    return {WORKLOAD: object_view({"metadata": meta, "status": status}, kind="Workload")}


def state(objects: dict[Ref, ObjectView], *, job=KUEUE, **found: ReferredObject) -> JobState:
    flavors = {Ref("ResourceFlavor", name): each for name, each in found.items()}
    return JobState(owner=OWNER, job=job, objects=objects, found=flavors)


def after(report: Report) -> dict[str, tuple[str, str]]:
    return {each["type"]: (each["status"], each["reason"]) for each in report.status["conditions"]}


@pytest.mark.parametrize(
    ("objects", "may", "must"),
    [
        ({}, False, False),
        (workload(), False, False),
        (workload(QuotaReserved=("True", "")), False, False),
        (workload(QuotaReserved=("True", ""), Admitted=("True", "")), True, False),
        (workload(QuotaReserved=("True", ""), Admitted=("True", ""), Evicted=("True", "preempted")), False, True),
        (workload(ADMISSION, Evicted=("True", "preempted")), False, True),
        (workload(QuotaReserved=("False", ""), Admitted=("False", ""), Evicted=("True", "gone")), False, False),
        (workload(Admitted=("True", ""), Evicted=("False", "")), True, False),
        (workload(Admitted=("True", ""), Finished=("True", "")), False, False),
    ],
)
def test_pods_are_made_while_a_workload_is_admitted_and_no_longer(objects, may, must):
    assert admitted(state(objects)) is may
    assert evicted(state(objects)) is must
    assert admitted(state({}, job=job_of(scheduling={"gang": "volcano"})))


def test_pods_are_made_once_it_is_known_where_their_flavors_are():
    placed = workload(ADMISSION, QuotaReserved=("True", ""), Admitted=("True", ""))
    assert not admitted(state(placed))
    assert waits_for(state(placed)) == "", "it is being read"
    refused = ReferredObject(problem="resourceflavors.kueue.x-k8s.io is forbidden")
    assert not admitted(state(placed, big=refused))
    said = "ResourceFlavor big cannot be read: resourceflavors.kueue.x-k8s.io is forbidden"
    assert waits_for(state(placed, big=refused)) == said
    assert admitted(state(placed, big=ReferredObject(content={"spec": {}})))


def test_the_reason_why_a_workload_waits_is_kueues():
    said = waits_for(state(workload(QuotaReserved=("False", "8 more cpu needed"))))
    assert said == "Kueue has not admitted the job's Workload: 8 more cpu needed"
    assert waits_for(state({})).endswith("it has not reported a reason yet")


def test_a_gang_object_is_deleted_once():
    group = Ref("PodGroup", "demo")
    service = Ref("Service", "demo")
    objects = {ref: ObjectView(ref=ref, uid=ref.kind) for ref in (WORKLOAD, group, service)}
    assert [(each.ref, each.uid) for each in delete_gang(objects, why="")] == [
        (WORKLOAD, "Workload"),
        (group, "PodGroup"),
    ]
    assert delete_gang({group: ObjectView(ref=group, uid="u", deleting=True)}, why="") == ()


@pytest.mark.parametrize(("why", "at_once"), [("Preempted by a", "True"), ("PodsReadyTimeout is over", "False")])
def test_an_evicted_workload_waits_again_where_it_was_in_its_queue(why, at_once):
    placed = {"QuotaReserved": ("True", "Reserved"), "Admitted": ("True", "Admitted"), "PodsReady": ("True", "Started")}
    (report,) = requeue(workload(ADMISSION, **placed, Evicted=("True", why)), now=START)
    assert (report.ref, report.version, report.status["admission"]) == (WORKLOAD, "7", None)
    reason = why.split(" ")[0]
    assert after(report) == {
        "Evicted": ("True", reason),
        "Requeued": (at_once, reason),
        "QuotaReserved": ("False", "Pending"),
        "Admitted": ("False", "NoReservation"),
        "PodsReady": ("False", "WaitForStart"),
    }
    times = {each["type"]: each["lastTransitionTime"] for each in report.status["conditions"]}
    assert times == dict.fromkeys(times, to_rfc3339(START)) | {"Evicted": BEFORE}
    assert requeue(workload(ADMISSION, **placed), now=START) == ()


def test_readiness_of_all_pods_is_reported_to_kueue_once():
    placed = {"QuotaReserved": ("True", "Reserved"), "Admitted": ("True", "Admitted")}

    def told(lacks: list[str], **ready: tuple[str, str]) -> tuple[str, str] | None:
        reports = pods_ready(workload(ADMISSION, **placed, **ready), lacks=lacks, now=START)
        return after(reports[0])["PodsReady"] if reports else None

    some = ["trainer 1/2"]
    assert told(some) == ("False", "WaitForStart")
    assert told(some, PodsReady=("False", "WaitForStart")) is None
    assert told([], PodsReady=("False", "WaitForStart")) == ("True", "Started")
    assert told([], PodsReady=("True", "Started")) is None
    assert told(some, PodsReady=("True", "Started")) == ("False", "WaitForRecovery")
    assert told(some, PodsReady=("False", "WaitForRecovery")) is None
    assert told([], PodsReady=("False", "WaitForRecovery")) == ("True", "Recovered")
    assert told([], PodsReady=("True", "Recovered")) is None
    assert pods_ready(workload(QuotaReserved=("False", "")), lacks=some, now=START) == ()


def test_gates_of_kueue_are_removed_from_core_pods_and_from_no_others():
    job = job_of(scheduling={"gang": "kueue"}, rollout={"replicas": 2, "minReplicas": 1})
    held = {
        "gates": ("kueue.x-k8s.io/admission", "example.com/mine", "kueue.x-k8s.io/topology"),
        "finalizers": ("kueue.x-k8s.io/managed",),
    }
    pods = tuple(pod_view("rollout", index, **held) for index in (0, 1))
    (release,) = release_pods(replace(state({}, job=job), pods=pods))
    assert (release.ref.name, release.uid) == (pods[0].name, pods[0].uid)
    assert (release.gates, release.finalizers) == (("example.com/mine",), ())
    (release,) = release_pods(replace(state({}, job=job), pods=(replace(pods[0], finalizers=()),)))
    assert release.finalizers is None
    assert release_pods(replace(state({}, job=job), pods=(pod_view("rollout", gates=("example.com/mine",)),))) == ()
    plain = job_of(rollout={"replicas": 2, "minReplicas": 1})
    assert release_pods(replace(state({}, job=plain), pods=pods)) == ()


def test_before_it_is_admitted_a_job_has_neither_pods_nor_secrets():
    waits = decide_job(state(workload(QuotaReserved=("False", ""))), now=START, desired=DESIRED)
    kinds = {action.ref.kind for stage in waits.stages for action in stage}
    assert not kinds & {"Pod", "Secret"}
    assert {"ConfigMap", "TransferQueue"} <= kinds


@pytest.mark.parametrize("phase", ["Running", "Suspending", "Succeeded"])
def test_pods_of_a_job_that_runs_or_ends_are_freed_of_it(phase: str):
    held = pod_view("trainer", finalizers=("kueue.x-k8s.io/managed",), deleting=True)
    ends = replace(state({}), pods=(held,), status=JobStatus(phase=phase, start_time=to_rfc3339(START)))
    actions = [action for stage in decide_job(ends, now=START, desired=DESIRED).stages for action in stage]
    assert [action.finalizers for action in actions if isinstance(action, Release)] == [()]


def test_a_job_whose_place_is_wanted_is_suspended_and_then_waits_for_another():
    begun = JobStatus(phase="Starting", start_time=to_rfc3339(START))
    objects = workload(ADMISSION, Evicted=("True", "Preempted by a"))
    runs = replace(state(objects), pods=(pod_view("rollout"),), status=begun)
    plan = decide_job(runs, now=START, desired=DESIRED)
    assert plan.status["phase"] == "Suspending"
    (delete,) = (action for stage in plan.stages for action in stage)
    assert (delete.ref.name, delete.why) == (
        "demo-rollout-0",
        "Kueue has evicted the job's Workload",
    )
    gone = replace(runs, pods=(), status=JobStatus.model_validate(plan.status, by_name=False))
    plan = decide_job(gone, now=START, desired=DESIRED)
    assert plan.status["phase"] == "Suspended"
    assert [type(action) for stage in plan.stages for action in stage] == [Report]


def test_a_job_that_has_not_begun_and_is_refused_releases_its_quota():
    refused = replace(state(workload(QuotaReserved=("False", "")), job=None), problem="wrong", problem_reason="Invalid")
    (stage,) = decide_job(refused, now=START, desired=DESIRED).stages
    assert [action.ref for action in stage] == [WORKLOAD]
    attempted = JobStatus(failures={"trainer": RoleRecord(attempt=1)})
    assert decide_job(replace(refused, status=attempted), now=START, desired=DESIRED).stages == ()


def test_a_job_that_outgrows_its_admitted_workload_has_a_message():
    placed = workload(ADMISSION, QuotaReserved=("True", ""), Admitted=("True", ""))
    (wanted,) = (each for each in DESIRED.supporting(state({})) if each["kind"] == "Workload")
    same = replace(placed[WORKLOAD], digest=wanted["metadata"]["annotations"][DIGEST])
    for view, words in ((same, ""), (replace(same, digest="another"), "not counted until the job is suspended")):
        known = state({WORKLOAD: view}, big=ReferredObject(content={"spec": {}}))
        plan = decide_job(known, now=START, desired=DESIRED)
        (accepted,) = (each for each in plan.status["conditions"] if each["type"] == "Accepted")
        assert accepted["status"] == "True"
        assert words in accepted.get("message", "")
        assert bool(words) == bool(accepted.get("message"))


def test_a_workload_that_holds_quota_is_not_changed():
    asked = state({})
    manifests = DESIRED.supporting(asked)
    (wanted,) = (each for each in manifests if each["kind"] == "Workload")
    assert changeable(wanted, {})
    assert changeable(wanted, workload(QuotaReserved=("False", "")))
    for placed in ({"QuotaReserved": ("True", "")}, {"QuotaReserved": ("True", ""), "Admitted": ("True", "")}):
        assert not changeable(wanted, workload(**placed))
    assert all(changeable(each, workload(Admitted=("True", ""))) for each in manifests if each is not wanted)
