"""The core as a gang, and the rollouts above it each on its own."""

from collections.abc import Callable

import pytest

from asyncflow_operator.desired import Desired
from asyncflow_operator.observed import JobState, Manifest

JobStates = Callable[..., JobState]
GROUP = "scheduling.k8s.io/group-name"
VOLCANO_QUEUE = "scheduling.volcano.sh/queue-name"
KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"


def state_of(job_state: JobStates, gang: str, queue: str | None = "rl", **spec) -> JobState:
    scheduling = {"gang": gang} | ({"queue": queue} if queue else {})
    accelerator = {"accelerator": {"profile": "ascend-a3", "count": 16}}
    rollout = {"replicas": 4, "minReplicas": 2, "maxReplicas": 6, **accelerator}
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
    assert (spec["active"], spec["queueName"]) == (True, "rl")
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


def test_a_suspended_job_gives_its_quota_back(desired: Desired, job_state: JobStates):
    assert gang_of(desired, state_of(job_state, "kueue", suspend=True))["spec"]["active"] is False


def test_kueue_admits_a_rollout_above_the_minimum_by_itself(desired: Desired, job_state: JobStates):
    state = state_of(job_state, "kueue", queue=None)
    assert desired.pod(state, "rollout", 2, 0)["metadata"]["labels"][KUEUE_QUEUE] == "default"
    assert KUEUE_QUEUE not in desired.pod(state, "rollout", 1, 0)["metadata"]["labels"]


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
