"""The core as a gang, and the rollouts above it each on its own."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from asyncflow_operator.cluster.kinds import BY_NAME
from asyncflow_operator.desired import Desired
from asyncflow_operator.desired.gang import refers_to
from asyncflow_operator.observed import Assigned, JobState, Manifest, ObjectView, Ref, ReferredObject

JobStates = Callable[..., JobState]
GROUP = "scheduling.k8s.io/group-name"
VOLCANO_QUEUE = "scheduling.volcano.sh/queue-name"
KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"


def state_of(job_state: JobStates, gang: str, queue: str | None = "rl", **spec) -> JobState:
    scheduling = {"gang": gang} | ({"queue": queue} if queue else {})
    accelerator = {"accelerator": {"profile": "ascend-a3", "count": 16}}
    rollout = {"replicas": 4, "minReplicas": 2, "maxReplicas": 6, "engine": {"name": "vllm"}, **accelerator}
    trainer = {"replicas": 2, "resources": {"cpu": "500m"}, **accelerator}
    return job_state(scheduling=scheduling, rollout=rollout, trainer=trainer, **spec)


def gang_of(desired: Desired, state: JobState) -> Manifest:
    (gang,) = (each for each in desired.supporting(state) if each["kind"] in ("PodGroup", "Workload"))
    return gang


def test_volcano_places_the_core_as_one_group(desired: Desired, job_state: JobStates):
    spec = gang_of(desired, state_of(job_state, "volcano"))["spec"]
    assert (spec["minMember"], spec["queue"]) == (1 + 1 + 2 + 2 + 2, "rl")
    assert spec["minResources"]["huawei.com/Ascend910"] == str(16 * 4)
    assert spec["minResources"]["cpu"] == f"{1000 * (1 + 1 + 2 + 1 + 2) + 2 * 100}m", "each rollout scores, too"


@pytest.mark.parametrize(
    ("role", "index", "core"), [("driver", 0, True), ("trainer", 1, True), ("rollout", 1, True), ("rollout", 2, False)]
)
def test_a_pod_of_the_core_is_in_the_group_and_another_is_not(
    desired: Desired, job_state: JobStates, role, index, core
):
    pod = desired.pod(state_of(job_state, "volcano"), role, index, 0)
    assert pod["spec"]["schedulerName"] == "volcano"
    assert pod["metadata"]["annotations"].get(GROUP) == ("math" if core else None)
    assert pod["metadata"]["annotations"][VOLCANO_QUEUE] == "rl"


def test_kueue_admits_the_core_as_one_workload(desired: Desired, job_state: JobStates):
    spec = gang_of(desired, state_of(job_state, "kueue"))["spec"]
    assert spec["queueName"] == "rl"
    assert "active" not in spec, "whoever stops a Workload by that field decides"
    assert {each["name"]: each["count"] for each in spec["podSets"]} == {
        "driver": 1,
        "controller": 1,
        "storage": 2,
        "trainer": 2,
        "rollout": 2,
    }
    trainer = next(each["template"]["spec"] for each in spec["podSets"] if each["name"] == "trainer")
    assert trainer["containers"][0]["resources"]["limits"] == {"huawei.com/Ascend910": "16"}
    assert trainer["nodeSelector"] == {"accelerator": "huawei-Ascend910"}
    assert "command" not in trainer["containers"][0]


def test_kueue_admits_a_rollout_above_the_minimum_by_itself(desired: Desired, job_state: JobStates):
    state = state_of(job_state, "kueue", queue=None)
    assert desired.pod(state, "rollout", 2, 0)["metadata"]["labels"][KUEUE_QUEUE] == "default"
    assert KUEUE_QUEUE not in desired.pod(state, "rollout", 1, 0)["metadata"]["labels"]
    named = desired.pod(state_of(job_state, "kueue", queue="rl"), "rollout", 2, 0)
    assert named["metadata"]["labels"][KUEUE_QUEUE] == "rl"
    assert KUEUE_QUEUE not in desired.pod(job_state(), "rollout", 2, 0)["metadata"]["labels"], "nobody asked for Kueue"


@pytest.mark.parametrize("gang", ["volcano", "kueue"])
def test_scaling_rollouts_changes_nothing_of_the_group(desired: Desired, job_state: JobStates, gang):
    def scaled(replicas: int) -> JobState:
        return job_state(scheduling={"gang": gang}, rollout={"replicas": replicas, "minReplicas": 2, "maxReplicas": 9})

    assert gang_of(desired, scaled(2)) == gang_of(desired, scaled(9))


def test_a_role_without_a_place_in_the_core_is_not_asked_for(desired: Desired, job_state: JobStates):
    state = job_state(scheduling={"gang": "kueue"}, rollout={"replicas": 0, "minReplicas": 0, "maxReplicas": 4})
    assert "rollout" not in [each["name"] for each in gang_of(desired, state)["spec"]["podSets"]]


def test_odd_quantities_of_a_user_are_for_the_api_server_to_judge(desired: Desired, job_state: JobStates):
    side = {"name": "side", "image": "side:1", "resources": {"requests": {"cpu": "1e3", "memory": "lots"}}}
    state = job_state(scheduling={"gang": "volcano"}, template={"podSpec": {"containers": [side]}})
    assert gang_of(desired, state)["spec"]["minResources"]["cpu"] == f"{1000 * (1 + 1 + 2 + 1 + 1) + 100}m"


def placed(state: JobState, *, phase: str = "Admitted", **assigned: Assigned) -> JobState:
    ref = Ref("Workload", "math")
    return replace(state, objects={ref: ObjectView(ref=ref, uid="w", phase=phase, assigned=assigned)})


BIG = {"nodeLabels": {"pool": "big"}, "tolerations": [{"key": "big", "operator": "Exists"}]}
CHECKED = {
    "name": "trainer",
    "labels": {"reserved": "yes"},
    "annotations": {"autoscaling.x-k8s.io/consume-provisioning-request": "p"},
    "nodeSelector": {"zone": "b"},
}


def test_pods_of_the_core_have_the_settings_of_their_flavors_and_admission_checks(
    desired: Desired, job_state: JobStates
):
    asked = state_of(job_state, "kueue", template={"podSpec": {"nodeSelector": {"zone": "a", "disk": "ssd"}}})
    state = placed(asked, trainer=Assigned(flavors=("big",), more=(CHECKED,)), rollout=Assigned(flavors=("big",)))
    state = replace(state, found={Ref("ResourceFlavor", "big"): ReferredObject(content={"spec": BIG})})
    trainer = desired.pod(state, "trainer", 0, 0)
    assert trainer["spec"]["nodeSelector"].items() >= {"zone": "b", "disk": "ssd", "pool": "big"}.items()
    assert {"key": "big", "operator": "Exists"} in trainer["spec"]["tolerations"]
    assert trainer["metadata"]["labels"]["reserved"] == "yes"
    assert trainer["metadata"]["annotations"].items() >= CHECKED["annotations"].items()
    for other in (desired.pod(state, "driver", 0, 0), desired.pod(state, "rollout", 2, 0)):
        assert "pool" not in other["spec"].get("nodeSelector", {})
    assert desired.pod(state, "rollout", 1, 0)["spec"]["nodeSelector"]["pool"] == "big"
    assert gang_of(desired, state) == gang_of(desired, asked), "what was given is not what is asked for"
    waits = placed(asked, phase="Evicted", trainer=Assigned(flavors=("big",)))
    assert "pool" not in desired.pod(waits, "trainer", 0, 0)["spec"]["nodeSelector"]


def test_pods_of_the_core_say_that_they_are_no_workloads_of_their_own(desired: Desired, job_state: JobStates):
    state = state_of(job_state, "kueue")
    parent = "kueue.x-k8s.io/pod-suspending-parent"
    assert desired.pod(state, "rollout", 1, 0)["metadata"]["annotations"][parent] == "rljob.asyncflow.dev"
    assert parent not in desired.pod(state, "rollout", 2, 0)["metadata"]["annotations"]
    assert parent not in desired.pod(state_of(job_state, "volcano"), "driver", 0, 0)["metadata"]["annotations"]


def test_labels_of_kueue_are_not_copied_to_the_objects_of_a_job(desired: Desired, job_state: JobStates):
    """Kueue would take every pod that has the name of a queue for a Workload of its own."""
    theirs = {"team": "a", KUEUE_QUEUE: "rl", "kueue.x-k8s.io/priority-class": "high"}
    state = job_state(labels=theirs)
    pods = [desired.pod(state, role, 0, 0) for role in ("driver", "storage", "trainer", "rollout")]
    for each in (*pods, *desired.supporting(state), *desired.children(state)):
        assert each["metadata"]["labels"]["team"] == "a"
        assert not [key for key in each["metadata"]["labels"] if key.startswith("kueue.x-k8s.io/")]


def test_a_workload_has_the_priority_of_its_pods_or_of_the_jobs_label(desired: Desired, job_state: JobStates):
    pods = {"template": {"podSpec": {"priorityClassName": "research"}}}
    of_pods, of_job = Ref("PriorityClass", "research"), Ref("WorkloadPriorityClass", "high")
    for labels, ref, group in (
        ({}, of_pods, "scheduling.k8s.io"),
        ({"kueue.x-k8s.io/priority-class": "high"}, of_job, "kueue.x-k8s.io"),
    ):
        state = state_of(job_state, "kueue", labels=labels, **pods)
        assert state.job is not None
        assert refers_to(state.job, state.owner, {}) == (ref,)
        kinds = [each["kind"] for each in desired.supporting(state)]
        assert "Workload" not in kinds, "its priority is not known yet"
        known = gang_of(desired, replace(state, found={ref: ReferredObject(content={"value": 1000})}))
        assert known["spec"]["priority"] == 1000
        assert known["spec"]["priorityClassRef"] == {"group": group, "kind": ref.kind, "name": ref.name}
        older = BY_NAME["Workload"].at("kueue.x-k8s.io/v1beta1").written(known)
        source = f"{group}/{ref.kind.lower()}"
        assert "priorityClassRef" not in older["spec"]
        assert older["apiVersion"] == "kueue.x-k8s.io/v1beta1"
        assert (older["spec"]["priorityClassName"], older["spec"]["priorityClassSource"]) == (ref.name, source)
        assert older["spec"]["priority"] == 1000
    none = gang_of(desired, state_of(job_state, "kueue"))
    assert not {"priority", "priorityClassRef"} & none["spec"].keys()


@pytest.mark.parametrize("name", ["../../api/v1/secrets", "a/b", "", 7, None])
def test_a_class_of_which_the_name_is_none_is_for_the_api_server_to_refuse(
    desired: Desired, job_state: JobStates, name
):
    state = state_of(job_state, "kueue", template={"podSpec": {"priorityClassName": name}})
    assert state.job is not None
    assert [ref.name for ref in refers_to(state.job, state.owner, {})] == (["7"] if name == 7 else [])


def test_the_objects_read_for_a_job_are_its_flavors_and_its_priority(job_state: JobStates):
    state = placed(state_of(job_state, "kueue"), trainer=Assigned(flavors=("big",)), rollout=Assigned(flavors=("a",)))
    assert state.job is not None
    flavors = (Ref("ResourceFlavor", "a"), Ref("ResourceFlavor", "big"))
    assert refers_to(state.job, state.owner, state.objects) == flavors
    other = state_of(job_state, "volcano")
    assert other.job is not None
    assert refers_to(other.job, other.owner, {}) == ()
