"""A job that cannot work says why and what to do, costs next to nothing while it cannot, and works once mended."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from one_job import OneJob
from scripted_driver import ScriptedDrivers
from world import OURS

from kube.plane import ControlPlane, KubectlError
from kube.rest import DRY_RUN, Refused
from operator_process import OperatorProcess

HELD = {"annotations": {"kwok.test/hold": "true"}}
WINDOW_S = 9.0
WINDOWS = 5
SIZE, MODES = {"storage": "1Gi"}, ["ReadWriteOnce"]
MOST_A_MINUTE = 10
"""Reconciles of one broken object."""
SOON_S, MOST_SOON = 2.0, 4
"""Reconciles of one object that was just found to be broken."""

JOBS: dict[str, dict[str, Any]] = {
    "misspelt": {"template": {"podSpec": {"nodeSelectr": {"disk": "fast"}}}},
    "unimportant": {"template": {"podSpec": {"priorityClassName": "no-such-class"}}},
    "unpulled": {"template": HELD | {"podSpec": {"imagePullSecrets": [{"name": "no-such-secret"}]}}},
    "secretless": {"template": HELD},
    "claimless": {"storage": {"ledger": {"claim": {"name": "no-such-claim"}}}},
    "greedy": {"trainer": {"resources": {"cpu": "600"}}},
    "configured": {},
    "served": {},
    "queued": {},
    "accounted": {},
}
SAYS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "misspelt": ("WhyPending", "Denied", ('unknown field "spec.nodeSelectr". Correct podSpec',)),
    "unimportant": ("WhyPending", "Denied", ("no PriorityClass with name no-such-class", "Create it")),
    "unpulled": ("WhyPending", "ImagePull", ("unpulled-driver-0", "ImagePullBackOff", "imagePullSecrets")),
    "secretless": ("WhyPending", "ContainerConfig", ('secret "no-such" not found', "Create the missing object")),
    "claimless": (
        "WhyPending",
        "ClaimMissing",
        ("claimless-controller-0", "no-such-claim", "Create it, or"),
    ),
    "greedy": ("WhyPending", "Unschedulable", ("greedy-trainer-0 needs 600 CPU on one node; the largest free is 19",)),
    "configured": ("WhyPending", "Denied", ('configmaps "configured" already exists', "choose another name")),
    "served": ("WhyPending", "Denied", ('services "served-driver" already exists', "choose another name")),
    "queued": ("WhyPending", "Denied", ('"queued" already exists', "delete it")),
    "accounted": ("WhyPending", "Denied", ('serviceaccounts "accounted" already exists', "delete it")),
}
FOREIGN: dict[str, tuple[str, dict[str, Any]]] = {
    "/api/v1/namespaces/jobs/configmaps": ("configured", {"data": {"theirs": "1"}}),
    "/api/v1/namespaces/jobs/services": ("served-driver", {"spec": {"ports": [{"port": 80}]}}),
    "/api/v1/namespaces/jobs/serviceaccounts": ("accounted", {}),
    f"{OURS}/namespaces/jobs/transferqueues": (
        "queued",
        {"apiVersion": "asyncflow.dev/v1alpha1", "kind": "TransferQueue", "spec": {"storageUnits": 1}},
    ),
}
"""What somebody else has made under names that our jobs need."""


@pytest.fixture(scope="module")
def foreign(kwok_plane: ControlPlane, shared_operator: OperatorProcess) -> dict[str, str]:
    """Their objects as they were, by path."""
    for collection, (name, body) in FOREIGN.items():
        kwok_plane.api.create(collection, {"metadata": {"name": name}} | body)
    paths = [f"{collection}/{name}" for collection, (name, _) in FOREIGN.items()]
    return {path: identity(kwok_plane, path) for path in paths}


def identity(plane: ControlPlane, path: str) -> str:
    """Return what of an object another manager could have changed; its status is its own controller's."""
    raw = plane.api.get(path)
    meta = {key: raw["metadata"].get(key) for key in ("uid", "labels", "annotations", "ownerReferences", "generation")}
    return json.dumps(meta | {key: raw[key] for key in ("spec", "data") if key in raw}, sort_keys=True)


def _placed(pods: dict[str, Any]) -> bool:
    return bool(pods) and all(pod["spec"].get("nodeName") for pod in pods.values())


@pytest.fixture(scope="module")
def jobs(
    kwok_plane: ControlPlane, shared_operator: OperatorProcess, drivers: ScriptedDrivers, foreign: dict[str, str]
) -> Iterator[dict[str, OneJob]]:
    """All broken jobs, begun together."""
    begun = {
        name: OneJob(kwok_plane, "jobs", name, drivers.of("jobs", name), **spec).create() for name, spec in JOBS.items()
    }
    pulled, configured = begun["unpulled"], begun["secretless"]
    for job, waiting in (
        (pulled, {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "asyncflow/runtime-cpu:0.1.0"'}),
        (configured, {"reason": "CreateContainerConfigError", "message": 'secret "no-such" not found'}),
    ):
        job.until(lambda job=job: _placed(job.pods("driver")), "the driver to have a node")
        state = {"name": "asyncflow", "image": "x", "imageID": "", "ready": False, "restartCount": 0}
        job.set_status("driver-0", containerStatuses=[state | {"state": {"waiting": waiting}}])
    yield begun
    for job in begun.values():
        job.delete()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda spec: spec.update(trainr={}), 'unknown field "spec.trainr"'),
        (lambda spec: spec["algorithm"].update(steps="many"), "spec.algorithm.steps"),
        (lambda spec: spec["rollout"].update(replicas=9, maxReplicas=4), "spec.rollout"),
        (lambda spec: spec["trainer"].update(accelerator={"profile": "ascend-a3", "count": 3}), "spec.trainer"),
    ],
    ids=["unknown field", "wrong type", "impossible", "illegal count"],
)
def test_what_the_api_server_can_tell_is_refused_at_once(
    kwok_plane: ControlPlane, drivers: ScriptedDrivers, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    manifest = OneJob(kwok_plane, "default", "never", drivers.of("default", "never")).manifest()
    change(manifest["spec"])
    with pytest.raises(KubectlError) as refused:
        kwok_plane.kubectl("apply", "-f", "-", manifest=manifest)
    assert said in refused.value.said


@pytest.mark.parametrize("name", JOBS)
def test_what_cannot_work_says_why_and_what_to_do(jobs: dict[str, OneJob], name: str) -> None:
    kind, reason, words = SAYS[name]
    jobs[name].until_says(kind, reason, *words)


def test_what_is_broken_is_soon_hardly_looked_at(jobs: dict[str, OneJob], shared_operator: OperatorProcess) -> None:
    """The pauses between looks begin at a second and double, so that there are more of them at first."""

    def looks() -> float:
        return shared_operator.total("asyncflow_operator_reconciles_total")

    seen = []
    while not seen or seen[-1] > MOST_A_MINUTE * WINDOW_S / 60 * len(jobs):
        assert len(seen) < WINDOWS, f"looks in {WINDOW_S} s, window after window: {seen}"
        before = looks()
        time.sleep(WINDOW_S)
        seen.append(looks() - before)


def test_what_others_have_made_is_not_changed(
    jobs: dict[str, OneJob], kwok_plane: ControlPlane, foreign: dict[str, str]
) -> None:
    assert {path: identity(kwok_plane, path) for path in foreign} == foreign


@pytest.mark.timeout(400)
def test_each_runs_once_it_is_mended(
    jobs: dict[str, OneJob], kwok_plane: ControlPlane, foreign: dict[str, str]
) -> None:
    for path in foreign:
        kwok_plane.api.delete(path)
    for name in ("configured", "served", "queued", "accounted"):
        jobs[name].edit(rollout={"maxReplicas": 5})
    for name in ("misspelt", "unimportant"):
        jobs[name].edit(template={"podSpec": None})
    for name in ("unpulled", "secretless"):
        jobs[name].edit(template={"annotations": None})
    make_claim(kwok_plane, "no-such-claim")
    jobs["greedy"].edit(trainer={"resources": None})
    for job in jobs.values():
        job.until(job.is_whole, f"{job.name} to be whole")
        job.until_phase("Running")
        job.until_says("WhyPending", "NothingPending")


def make_volume(plane: ControlPlane, claim: str) -> None:
    """Make a volume for a claim of this name."""
    spec = {"capacity": SIZE, "accessModes": MODES, "hostPath": {"path": "/tmp"}}
    spec["claimRef"] = {"namespace": "jobs", "name": claim}
    plane.api.create("/api/v1/persistentvolumes", {"metadata": {"name": claim}, "spec": spec})


def make_claim(plane: ControlPlane, name: str) -> None:
    make_volume(plane, name)
    claim = {"resources": {"requests": SIZE}, "accessModes": MODES, "volumeName": name, "storageClassName": ""}
    plane.api.create("/api/v1/namespaces/jobs/persistentvolumeclaims", {"metadata": {"name": name}, "spec": claim})


def forbid(
    plane: ControlPlane, rule: dict[str, Any], validation: dict[str, str], *, attempt: Callable[[], object]
) -> Callable[[], None]:
    """Have a policy refuse requests until what is returned is called; ``attempt`` is one of them."""
    policies = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolic"
    policy = {"matchConstraints": {"resourceRules": [rule]}, "validations": [validation]}
    binding = {"policyName": "forbids", "validationActions": ["Deny"]}
    made = {"ies": policy, "ybindings": binding}
    for part, spec in made.items():
        plane.api.create(f"{policies}{part}", {"metadata": {"name": "forbids"}, "spec": spec})

    def is_refused() -> bool:
        try:
            attempt()
        except Refused:
            return True
        return False

    def end() -> None:
        for part in made:
            plane.api.delete(f"{policies}{part}/forbids")

    plane.wait_until(is_refused, "the policy to be in force")
    return end


def test_a_change_that_is_refused_stops_no_lost_pod_from_being_replaced(
    kwok_plane: ControlPlane, shared_operator: OperatorProcess, drivers: ScriptedDrivers
) -> None:
    make_volume(kwok_plane, "shrunk-ledger")
    claim = {"size": "1Gi"}
    job = OneJob(kwok_plane, "jobs", "shrunk", drivers.of("jobs", "shrunk"), storage={"ledger": {"claim": claim}})
    job.create()
    job.until_says("Ready", "Ready")
    job.edit(storage={"ledger": {"claim": claim | {"size": "1Mi"}}})
    said = job.until_says("WhyPending", "Denied", "PersistentVolumeClaim/shrunk-ledger")
    before = job.uids()
    for pod in before:
        job.annotate(pod, exit="1")

    def replaced() -> bool:
        after = job.uids()
        return job.is_whole() and after.keys() == before.keys() and not set(after.values()) & set(before.values())

    job.until(replaced, "every pod to be replaced")
    events = kwok_plane.api.get("/api/v1/namespaces/jobs/events", fieldSelector="involvedObject.name=shrunk")["items"]
    assert any(event["reason"] == "Denied" and event["message"] == said for event in events)
    assert "Running pods are not affected" in said
    job.until_says("WhyPending", "Denied", "PersistentVolumeClaim/shrunk-ledger")
    job.edit(storage={"ledger": {"claim": claim}})
    job.until_says("WhyPending", "NothingPending")
    job.delete()


def test_a_deletion_that_is_refused_is_said_to_be_one(
    kwok_plane: ControlPlane, shared_operator: OperatorProcess, drivers: ScriptedDrivers
) -> None:
    job = OneJob(kwok_plane, "jobs", "kept", drivers.of("jobs", "kept")).create()
    job.until(job.is_whole, "all pods")
    pod = f"/api/v1/namespaces/jobs/pods/{job.name}-rollout-0"
    end = forbid(
        kwok_plane,
        {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["DELETE"], "resources": ["pods"]},
        {"expression": "!oldObject.metadata.name.startsWith('kept-')", "message": "no pod of it may be deleted"},
        attempt=lambda: kwok_plane.api.delete(pod, dryRun="All"),
    )
    job.driver.say(phase="Suspended")
    job.edit(suspend=True)
    said = job.until_says("Suspended", "Suspending", "refused the deletion of Pod/kept-", "no pod of it may be deleted")
    assert "Running pods" not in said
    end()
    job.until_phase("Suspended")
    job.delete()


def test_a_status_that_is_refused_is_told_by_an_event(
    kwok_plane: ControlPlane, shared_operator: OperatorProcess, drivers: ScriptedDrivers
) -> None:
    job = OneJob(kwok_plane, "jobs", "mute", drivers.of("jobs", "mute"))
    status = {"apiGroups": ["asyncflow.dev"], "apiVersions": ["*"], "operations": ["*"], "resources": ["rljobs/status"]}
    other = OneJob(kwok_plane, "jobs", "mute-other", drivers.of("jobs", "mute-other")).create()
    other.until(lambda: other.phase() == "Running", "a job whose status is written")
    end = forbid(
        kwok_plane,
        status,
        {"expression": "!object.metadata.name.startsWith('mute')", "message": "no status of it may be written"},
        attempt=lambda: kwok_plane.api.patch(f"{other.path}/status", {"status": {}}, query=DRY_RUN),
    )
    job.create()

    def said() -> bool:
        events = job.kubectl("get", "events", f"--field-selector=involvedObject.name={job.name},reason=Denied")
        return "RLJob/mute" in events and "no status of it may be written" in events

    job.until(said, "an event")
    end()
    job.until_phase("Running")
    for each in (job, other):
        each.delete()


def test_a_job_that_this_version_does_not_do_says_so(
    kwok_plane: ControlPlane, shared_operator: OperatorProcess, drivers: ScriptedDrivers
) -> None:
    job = OneJob(kwok_plane, "jobs", "external", drivers.of("jobs", "external"), trainer={"external": True}).create()
    assert "spec.trainer.external" in job.until_says("Accepted", "NotYet")
    assert job.condition("Accepted")["status"] == "False"
    assert not job.pods()
    job.delete()


def test_a_secret_of_somebody_else_is_neither_taken_nor_deleted_with_the_job(
    kwok_plane: ControlPlane, shared_operator: OperatorProcess, drivers: ScriptedDrivers
) -> None:
    secrets = "/api/v1/namespaces/jobs/secrets"
    theirs = kwok_plane.api.create(secrets, {"metadata": {"name": "secretive-keys"}, "data": {"password": "aHVudGVy"}})
    job = OneJob(kwok_plane, "jobs", "secretive", drivers.of("jobs", "secretive")).create()
    job.until_says("Ready", "Ready")
    assert kwok_plane.api.get(f"{secrets}/secretive-keys") == theirs
    job.delete()
    ours = {"labelSelector": "asyncflow.dev/job=secretive"}
    job.until(lambda: not job.pods() and not kwok_plane.api.get(secrets, **ours)["items"], "all of the job to go")
    assert kwok_plane.api.get(f"{secrets}/secretive-keys") == theirs


def test_a_quota_that_runs_out_is_said_and_is_no_hot_loop_until_there_is_room_or_nobody_asks_any_more(
    kwok_plane: ControlPlane, shared_operator: OperatorProcess, drivers: ScriptedDrivers
) -> None:
    def failed() -> float:
        return shared_operator.total("asyncflow_operator_reconciles_total", outcome="failed")

    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "pods"}, "spec": {"hard": {"pods": "5"}}}
    path = "/api/v1/namespaces/jobs-quota/resourcequotas"
    kwok_plane.api.create(path, quota)
    kwok_plane.wait_until(lambda: kwok_plane.api.get(f"{path}/pods")["status"].get("used"), "the quota to be counted")
    job = OneJob(kwok_plane, "jobs-quota", "tight", drivers.of("jobs-quota", "tight"), rollout={"minReplicas": 0})
    job.create()
    job.until_says("WhyPending", "Denied", "exceeded quota: pods", "Raise the quota or request less")
    before = failed()
    time.sleep(SOON_S)
    assert failed() - before <= MOST_SOON
    kwok_plane.api.patch(f"{path}/pods", {"spec": {"hard": {"pods": "7"}}})
    job.until(job.is_whole, "all pods")
    job.until_says("WhyPending", "NothingPending")
    job.scale(3)
    job.until_says("WhyPending", "Denied", "exceeded quota: pods")
    job.scale(2)
    job.until_says("WhyPending", "NothingPending")
    job.scale(3)
    job.until_says("WhyPending", "Denied", "exceeded quota: pods")
    kwok_plane.api.delete(f"{path}/pods")
    job.until(lambda: len(job.pods()) == 8, "all pods, now that nothing bounds them")
    job.delete()


def test_what_ran_on_a_node_that_vanishes_comes_again_elsewhere_and_nobody_helps(
    kwok_plane: ControlPlane, shared_operator: OperatorProcess, drivers: ScriptedDrivers
) -> None:
    limits = {"limits": {"nodeLostSeconds": 6}}
    job = OneJob(kwok_plane, "jobs", "stranded", drivers.of("jobs", "stranded"), **limits).create()
    job.until_phase("Running")
    job.until(job.is_whole, "all pods")
    before = {seat: pod["spec"]["nodeName"] for seat, pod in job.pods().items()}
    lost = {before["trainer-0"], before["rollout-0"]}
    stranded = {seat for seat, node in before.items() if node in lost}

    def made_again() -> set[str]:
        return {seat for seat, attempt in job.attempts().items() if attempt == "1"}

    for node in lost:
        kwok_plane.lose_node(node)
    try:
        job.until_says("WhyPending", "NodeLost", "does not answer", "is replaced on another node")
        job.until(lambda: stranded <= made_again(), "what was on the lost nodes to be made again")
        job.until(job.is_whole, "all pods")
        after = job.pods()
        assert made_again() == stranded
        assert not {pod["spec"]["nodeName"] for pod in after.values()} & lost
        assert job.restarts() == {}
        assert "NodeLost" in job.kubectl("get", "events", f"--field-selector=involvedObject.name={job.name}")
    finally:
        for node in lost:
            kwok_plane.return_node(node)
    job.until(lambda: job.condition("Ready")["status"] == "True", "the job to be whole again")
    job.delete()


def test_a_namespace_that_is_deleted_goes_with_all_its_jobs(
    kwok_plane: ControlPlane, shared_operator: OperatorProcess, drivers: ScriptedDrivers
) -> None:
    names = [f"doomed-{number}" for number in range(3)]
    jobs = [OneJob(kwok_plane, "jobs-doomed", name, drivers.of("jobs-doomed", name)).create() for name in names]
    jobs[0].until(jobs[0].is_whole, "the first to be whole")
    before = shared_operator.total("asyncflow_operator_reconciles_total", outcome="failed")
    kwok_plane.api.delete("/api/v1/namespaces/jobs-doomed")
    kwok_plane.wait_until(lambda: not kwok_plane.api.exists("/api/v1/namespaces/jobs-doomed"), "the namespace to go")
    failed = shared_operator.total("asyncflow_operator_reconciles_total", outcome="failed") - before
    assert failed <= MOST_A_MINUTE * len(jobs)


def test_a_deleted_jobs_queue_is_not_taken_for_one_that_stands_alone(
    kwok_plane: ControlPlane, shared_operator: OperatorProcess, drivers: ScriptedDrivers
) -> None:
    job = OneJob(kwok_plane, "jobs", "deleted", drivers.of("jobs", "deleted")).create()
    job.until(job.is_whole, "all pods")
    job.delete()
    job.until(lambda: not job.pods(), "the pods to go")
    applied = [line for line in shared_operator.log.splitlines() if "TransferQueue/jobs/deleted" in line]
    assert not [line for line in applied if '"target": "Pod' not in line and '"what": "apply"' in line]
    assert not kwok_plane.api.exists("/api/v1/namespaces/jobs/services/deleted-controller")
    assert "Traceback" not in shared_operator.log
