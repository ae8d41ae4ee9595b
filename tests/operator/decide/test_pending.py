"""WhyPending: one sentence with the arithmetic, for every way in which something can fail to run."""

from dataclasses import replace

import pytest
from model_samples import START, job_of, pending, pod_view

from asyncflow.plan import plan
from asyncflow_operator.decide.pending import ATTACH_S, IGNORED_S, why_lacking, why_pending
from asyncflow_operator.decide.times import Alarm
from asyncflow_operator.observed import Denial, JobState, NodeFree, ObjectView, Owner, Ref

NPU = "huawei.com/Ascend910"
SCHEDULER = "0/3 nodes are available: 3 Insufficient huawei.com/Ascend910."
NODES = (
    NodeFree(name="node-7", free={NPU: 12.0, "cpu": 60.0, "memory": 2.0**38}),
    NodeFree(name="node-8", free={NPU: 4.0, "cpu": 90.5, "memory": 2.0**36}),
)


def why(*pods, nodes=NODES, objects=None, denied=(), ending=False, gang="none", **spec):
    usual = {"trainer": {"accelerator": {"profile": "ascend-a3", "count": 16}}, "scheduling": {"gang": gang}}
    job = job_of(**(usual | spec))
    state = JobState(
        owner=Owner(kind="RLJob", namespace="team", name="demo", uid="uid-job"),
        job=job,
        pods=tuple(pods),
        objects=objects or {},
        nodes=nodes,
        denied=tuple(denied),
        namespace_ending=ending,
    )
    return why_pending(plan(job).roles, state)


def test_nothing_waits():
    assert why(pod_view("trainer"), pending("rollout")) is None


def test_devices_with_the_arithmetic():
    found = why(pending("trainer", unschedulable=SCHEDULER))
    assert found.reason == "Unschedulable"
    assert found.message == f"demo-trainer-0 needs 16 {NPU} on one node; the largest free is 12 on node-7"


def test_how_many_more_wait():
    waiting = [pending("trainer", index, unschedulable=SCHEDULER) for index in range(3)]
    assert why(*waiting).message.endswith("(2 more pods wait)")
    assert why(*waiting[:2]).message.endswith("(1 more pod waits)")


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ({"cpu": "100"}, "needs 100 CPU on one node; the largest free is 90.5 on node-8"),
        ({"memory": "1024Gi"}, "needs 1024Gi memory on one node; the largest free is 256Gi on node-7"),
    ],
)
def test_cores_and_memory(resources, message):
    pod = pending("rollout", unschedulable="0/2 nodes are available: 2 Insufficient.")
    assert message in why(pod, rollout={"resources": resources}).message


def test_less_than_a_gibibyte_is_said_in_mebibytes():
    pod = pending("rollout", unschedulable="0/1 nodes are available: 1 Insufficient memory.")
    small = (NodeFree(name="n", free={"cpu": 4.0, "memory": 512.0 * 2**20}),)
    found = why(pod, nodes=small, rollout={"resources": {"memory": "1Gi"}})
    assert found.message == "demo-rollout-0 needs 1Gi memory on one node; the largest free is 512Mi on n"


def test_none_at_all():
    bare = (NodeFree(name="node-1", free={"cpu": 4.0}),)
    assert "none is free" in why(pending("trainer", unschedulable=SCHEDULER), nodes=bare).message


def test_where_arithmetic_says_nothing_the_scheduler_does():
    words = "0/2 nodes are available: 2 node(s) had untolerated taint(s)."
    for nodes in (None, ()):
        found = why(pending("rollout", unschedulable=words), nodes=nodes)
        assert found.message == f"demo-rollout-0 finds no node: {words.rstrip('.')}"


@pytest.mark.parametrize(
    ("pod", "reason", "said"),
    [
        (
            pending("rollout", waiting="ImagePullBackOff", waiting_message='Back-off pulling "x"'),
            "ImagePull",
            'Back-off pulling "x"',
        ),
        (
            pending("rollout", waiting="CreateContainerConfigError", waiting_message='secret "s" not found'),
            "ContainerConfig",
            'secret "s" not found',
        ),
        (pending("rollout", waiting="ErrImagePull"), "ImagePull", "cannot pull its image: ErrImagePull. "),
        (pending("rollout", waiting_message="too slow."), "Waiting", "waits: Pending: too slow"),
        (pending("rollout", gated=True, gates=("mine.io/hold",)), "Gated", "scheduling gate mine.io/hold"),
        (
            pending("rollout", waiting="ContainerCreating", waiting_message="MountVolume failed"),
            "Waiting",
            "MountVolume failed",
        ),
    ],
)
def test_every_other_reason_why_a_pod_waits(pod, reason, said):
    found = why(pod)
    assert found.reason == reason
    assert said in found.message
    assert found.message.startswith("demo-rollout-0")


def test_a_claim_without_a_volume():
    refs = [Ref("PersistentVolumeClaim", f"demo-{volume}") for volume in ("checkpoints", "ledger")]
    claims = {each: ObjectView(ref=each, uid="u", phase="Pending") for each in (*refs, Ref("PodGroup", "demo"))}
    words = "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims."
    found = why(pending("controller", unschedulable=words, claims=("demo-ledger",)), objects=claims)
    assert found.reason == "ClaimPending"
    assert found.message.endswith("no volume is bound to demo-ledger. `kubectl describe pvc` says why")
    other = why(pending("trainer", unschedulable=words, claims=("models",)), objects=claims, nodes=())
    assert other.message.startswith("demo-trainer-0 finds no node")


def test_a_waiting_gang_names_its_scheduler():
    assert "Kueue" in why(pending("rollout", gated=True), gang="kueue").message
    words = "pod group is not ready, 3 Pending in gang"
    found = why(pending("rollout", unschedulable=words), gang="volcano", nodes=NODES)
    assert found.reason == "Gang"
    assert "Volcano" in found.message


def lacking(pod, *, now=START + 100):
    return why_lacking([f"{pod.role} 0/1"], [pod], ran=True, alarm=Alarm(now))


def test_a_node_that_does_not_answer_is_named():
    found = lacking(pod_view("trainer", ready=False, unreachable=True))
    assert found.reason == "NodeLost"
    assert "trainer 0/1 ready: node-1 does not answer" in found.message
    assert "limits.nodeLostSeconds" in found.message
    leaving = lacking(pod_view("trainer", ready=False, deleting=True, ends_by=START + 120))
    assert leaving.reason == "Terminating"
    assert "demo-trainer-0 is being deleted on node-1" in leaving.message
    assert "--force" not in found.message + leaving.message
    other = pod_view("rollout", ready=False, unreachable=True)
    assert why_lacking(["trainer 0/1"], [other], ran=True, alarm=Alarm(START)).reason == "Starting"


def test_a_pod_that_a_finalizer_keeps_is_named_even_if_enough_others_run():
    kept = {"ready": False, "deleting": True, "forced": True, "finalizers": ("example.com/hold",)}
    found = why(pod_view("trainer"), pod_view("rollout"), pod_view("rollout", 1, **kept))
    assert found.reason == "Terminating"
    assert found.message.startswith("demo-rollout-1 is deleted, but the finalizer example.com/hold keeps its name")
    assert why(pod_view("rollout", 1, **kept | {"forced": False})) is None


def test_a_process_that_starts_is_not_yet_said_to_be_unready():
    pod = pod_view("trainer", ready=False)
    assert lacking(pod).reason == "NotReady"
    assert why_lacking(["trainer 0/1"], [pod], ran=False, alarm=Alarm(START)).reason == "Starting"


def test_a_scheduler_that_says_nothing_is_named():
    pod = pending("trainer", scheduler="volcano", created=START)
    found = lacking(pod)
    assert found.reason == "NoScheduler"
    assert "the scheduler volcano has reported nothing about demo-trainer-0 for 1m" in found.message
    alarm = Alarm(START + 10)
    assert why_lacking(["trainer 0/1"], [pod], ran=False, alarm=alarm).reason == "Starting"
    assert alarm.again_in_s == IGNORED_S - 10
    assert lacking(replace(pod, deleting=True)).reason == "Starting"


def test_a_volume_that_is_still_attached_elsewhere_is_named():
    begins = {"node": "node-2", "scheduled": True, "waiting": "ContainerCreating", "created": START}
    mounts = pending("trainer", claims=("demo-checkpoints",), **begins)
    found = lacking(mounts)
    assert found.reason == "VolumeAttach"
    assert "demo-trainer-0 on node-2" in found.message
    assert "demo-checkpoints" in found.message
    assert "node.kubernetes.io/out-of-service" in found.message
    alarm = Alarm(START + 10)
    assert why_lacking(["trainer 0/1"], [mounts], ran=True, alarm=alarm).reason == "Starting"
    assert alarm.again_in_s == ATTACH_S - 10
    assert lacking(pending("trainer", **begins)).reason == "Starting"


def test_the_obstacle_that_stops_everything_comes_first():
    waiting = pending("trainer", unschedulable=SCHEDULER)
    denied = why(waiting, denied=[Denial(Ref("Pod", "demo-rollout-1"), "exceeded quota: pods=10", missing=True)])
    assert denied.reason == "Denied"
    assert "exceeded quota: pods=10. Raise the quota" in denied.message
    unstated = 'pods "demo-rollout-1" is forbidden: failed quota: q: must specify limits.cpu for: asyncflow'
    denied = why(denied=[Denial(Ref("Pod", "demo-rollout-1"), unstated, missing=True)])
    assert denied.message.endswith("for: asyncflow. Set it in podSpec, or create a LimitRange with defaults")
    denied = why(denied=[Denial(Ref("PodGroup", "demo"), "404 page not found", missing=True)])
    assert denied.message.endswith("Install the definition of that kind, or remove it from spec.scheduling")
    right = 'services "demo" is forbidden: User "the-operator" cannot patch resource "services" in API group "" in ...'
    denied = why(denied=[Denial(Ref("Service", "demo"), right, missing=True)])
    assert denied.message.endswith("The operator lacks this right: upgrade its roles, which belong to its chart")
    workload = Denial(Ref("Workload", "demo"), "exceeded quota: workloads", missing=True)
    assert [why(gang="kueue").reason, why(denied=[workload], gang="kueue").reason] == ["Gang", "Denied"]
    assert (
        why(waiting, denied=[Denial(Ref("Pod", "x"), "x", missing=True)], ending=True).reason == "NamespaceTerminating"
    )


def test_that_the_server_failed_is_not_said_to_be_a_refusal_and_comes_after_one():
    webhook = 'Internal error occurred: failed calling webhook "quota.example.com": connection refused'
    failed = Denial(Ref("Pod", "demo-driver-0"), webhook, missing=True, failed=True)
    said = why(denied=[failed])
    assert said.reason == "ApiFailed"
    assert f"failed at Pod/demo-driver-0: {webhook}. It is retried; if it persists" in said.message
    assert "Change the spec" not in said.message
    refused = Denial(Ref("Pod", "demo-rollout-1"), "exceeded quota: pods=10", missing=True)
    assert why(denied=[failed, refused]).message.startswith("The API server refused Pod/demo-rollout-1")


def test_words_of_others_are_cut():
    assert len(why(pending("rollout", unschedulable="very " * 1000)).message) < 600
    assert why(replace(pending("rollout", unschedulable="x"), deleting=True)) is None
