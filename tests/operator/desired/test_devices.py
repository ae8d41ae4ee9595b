"""Pods with devices: their variables, and the paths of the host that they see."""

from collections.abc import Callable
from itertools import combinations

import pytest

from asyncflow.api.placement import PORT_SLOTS, PROFILES, host_paths, ports
from asyncflow_operator.desired import Desired
from asyncflow_operator.observed import JobState, Manifest

JobStates = Callable[..., JobState]
ASCEND = ("ascend-a2", "ascend-a3", "ascend-a5")
A3 = {"profile": "ascend-a3", "count": 16}


def environment(pod: Manifest) -> dict[str, str]:
    """Values, and the paths of the fields that are referred to."""
    said = {}
    for each in pod["spec"]["containers"][0]["env"]:
        said[each["name"]] = each["value"] if "value" in each else each["valueFrom"]["fieldRef"]["fieldPath"]
    return said


def range_of(written: str) -> set[int]:
    first, last = map(int, written.split("-"))
    return set(range(first, last + 1))


def test_no_two_slots_of_a_job_share_a_port_and_all_ports_exist():
    facts = PROFILES["ascend-a3"]
    taken = [ports(facts, slot, host_network=False) for slot in range(PORT_SLOTS)]
    ranges = [range_of(written) for told in taken for written in told.values()]
    assert all(not one & other for one, other in combinations(ranges, 2))
    assert max(map(max, ranges)) <= 65535


@pytest.mark.parametrize(("slot", "host_network"), [(0, True), (PORT_SLOTS, False)])
def test_where_slots_say_nothing_the_operating_system_chooses(slot, host_network):
    assert set(ports(PROFILES["ascend-a2"], slot, host_network=host_network).values()) == {"auto"}


def test_ranks_and_rollouts_of_a_job_have_ports_of_their_own(desired: Desired, job_state: JobStates):
    rollout = {"replicas": 8, "engine": {"name": "vllm"}, "accelerator": A3}
    state = job_state(trainer={"replicas": 4, "accelerator": A3}, rollout=rollout)
    pods = [desired.pod(state, "trainer", rank, 0) for rank in range(4)]
    pods += [desired.pod(state, "rollout", index, 0) for index in range(8)]
    ranges = [range_of(environment(pod)["HCCL_HOST_SOCKET_PORT_RANGE"]) for pod in pods]
    assert all(not one & other for one, other in combinations(ranges, 2))


@pytest.mark.parametrize("profile", ASCEND)
def test_the_pods_interface_is_named_on_its_own_network_and_the_hosts_address_on_the_hosts(
    desired: Desired, job_state: JobStates, profile
):
    accelerator = {"profile": profile, "count": 8}
    own = environment(desired.pod(job_state(trainer={"accelerator": accelerator}), "trainer", 0, 0))
    assert own["HCCL_SOCKET_IFNAME"] == own["GLOO_SOCKET_IFNAME"] == "eth0"
    assert "HCCL_IF_IP" not in own
    template = {"podSpec": {"hostNetwork": True}}
    host = environment(desired.pod(job_state(trainer={"accelerator": accelerator}, template=template), "trainer", 0, 0))
    assert host["HCCL_IF_IP"] == "status.hostIP"
    assert "HCCL_SOCKET_IFNAME" not in host
    assert host["HCCL_NPU_SOCKET_PORT_RANGE"] == "auto"


def test_ranks_meet_at_rank_0_by_the_name_of_its_pod(desired: Desired, job_state: JobStates):
    pod = desired.pod(job_state(trainer={"replicas": 2}), "trainer", 1, 0)
    said = environment(pod)
    assert (pod["spec"]["hostname"], pod["spec"]["subdomain"]) == ("math-trainer-1", "math-trainer")
    assert {name: said[name] for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")} == {
        "MASTER_ADDR": "math-trainer-0.math-trainer.team-a.svc",
        "MASTER_PORT": "29571",
        "WORLD_SIZE": "2",
        "RANK": "1",
    }
    assert "MASTER_ADDR" not in environment(desired.pod(job_state(), "trainer", 0, 0))


def test_the_ranks_of_one_pod_are_counted_and_talk_through_its_shared_memory(desired: Desired, job_state: JobStates):
    state = job_state(trainer={"replicas": 2, "accelerator": A3, "threads": 4})
    pod = desired.pod(state, "trainer", 1, 0)
    said = environment(pod)
    ranks = ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")
    assert [said[name] for name in ranks] == ["32", "16", "16", "0", "1"]
    assert said["ASCEND_RT_VISIBLE_DEVICES"] == ",".join(map(str, range(16)))
    container = pod["spec"]["containers"][0]
    asked = container["resources"]["requests"]
    assert (asked["cpu"], asked["huawei.com/Ascend910"]) == ("64000m", "16")
    (shm,) = (volume for volume in pod["spec"]["volumes"] if volume["name"] == "shm")
    assert shm == {"name": "shm", "emptyDir": {"medium": "Memory"}}
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert "shm" not in str(desired.pod(job_state(trainer={"replicas": 2}), "trainer", 0, 0)["spec"]["volumes"])


def test_a_gang_in_one_pod_meets_there_and_needs_no_name(desired: Desired, job_state: JobStates):
    state = job_state(trainer={"accelerator": {"profile": "nvidia", "count": 8}})
    pod = desired.pod(state, "trainer", 0, 0)
    assert environment(pod)["MASTER_ADDR"] == "127.0.0.1"
    assert environment(pod)["WORLD_SIZE"] == "8"
    assert "subdomain" not in pod["spec"]
    assert "math-trainer" not in [each["metadata"]["name"] for each in desired.supporting(state)]


def test_devices_are_those_that_the_schedulers_plug_in_chose(desired: Desired, job_state: JobStates):
    trainer = {"accelerator": {"profile": "ascend-a2", "count": 2}}
    plain = environment(desired.pod(job_state(trainer=trainer), "trainer", 0, 0))
    assert plain["ASCEND_RT_VISIBLE_DEVICES"] == "0,1"
    assert "ASCEND_VISIBLE_DEVICES" not in plain
    reward = {"function": "reward_model", "config": {"model": "judge"}, "role": trainer}
    state = job_state(trainer=trainer, reward=reward, scheduling={"gang": "volcano"})
    chosen = "metadata.annotations['huawei.com/Ascend910']"
    assert environment(desired.pod(state, "trainer", 0, 0))["ASCEND_VISIBLE_DEVICES"] == chosen
    judging = desired.pod(state, "reward", 0, 0)
    (scores,) = judging["spec"]["initContainers"]
    assert environment({"spec": {"containers": [scores]}})["ASCEND_VISIBLE_DEVICES"] == chosen
    assert "ASCEND_VISIBLE_DEVICES" not in environment(judging), "its devices are those of the container that scores"


def test_a_template_wins_over_the_facts(desired: Desired, job_state: JobStates):
    env = [{"name": "HCCL_CONNECT_TIMEOUT", "value": "5400"}, {"name": "HCCL_IF_IP", "value": "10.0.0.1"}]
    template = {"env": env, "podSpec": {"hostNetwork": True}}
    said = environment(desired.pod(job_state(trainer={"accelerator": A3}, template=template), "trainer", 0, 0))
    assert (said["HCCL_CONNECT_TIMEOUT"], said["HCCL_IF_IP"]) == ("5400", "10.0.0.1")


def test_nodes_of_the_right_kind_are_demanded_and_their_taint_tolerated(desired: Desired, job_state: JobStates):
    spec = desired.pod(job_state(trainer={"accelerator": A3}), "trainer", 0, 0)["spec"]
    assert spec["nodeSelector"] == {"accelerator": "huawei-Ascend910"}
    (term,) = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    (kind,) = term["matchExpressions"]
    assert (kind["key"], "module-a3-16" in kind["values"]) == ("accelerator-type", True)
    (devices,) = (each for each in spec["tolerations"] if each["effect"] == "NoSchedule")
    assert devices == {"key": "huawei.com/Ascend910", "operator": "Exists", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("profile", "runtime", "gang", "expected"),
    [
        ("cpu", True, True, ()),
        ("nvidia", True, True, ()),
        ("ascend-a2", True, False, ()),
        ("ascend-a2", True, True, ("/etc/hccn.conf",)),
        ("ascend-a5", True, False, ("/usr/local/Ascend/driver",)),
        (
            "ascend-a3",
            False,
            False,
            (
                "/usr/local/Ascend/driver",
                "/usr/local/dcmi",
                "/usr/local/bin/npu-smi",
                "/etc/ascend_install.info",
            ),
        ),
    ],
)
def test_only_paths_that_no_runtime_brings_are_mounted_from_the_host(profile, runtime, gang, expected):
    assert host_paths(PROFILES[profile], runtime=runtime, gang=gang) == expected


@pytest.mark.parametrize("profile", ["nvidia", *ASCEND])
@pytest.mark.parametrize("asked", [{}, {"runtimeClassName": "vendor"}])
def test_a_runtime_class_is_set_only_where_it_is_asked_for(desired: Desired, job_state: JobStates, profile, asked):
    """Most nodes have the vendor's runtime as their usual one; a class that a cluster has not would stop every pod."""
    accelerator = {"profile": profile, "count": 8}
    spec = desired.pod(job_state(trainer={"accelerator": accelerator}, template={"podSpec": asked}), "trainer", 0, 0)[
        "spec"
    ]
    assert spec.get("runtimeClassName") == asked.get("runtimeClassName")
    paths = [volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume]
    assert paths == (["/usr/local/Ascend/driver"] if profile == "ascend-a5" else [])


@pytest.mark.parametrize("nothing", ["", None])
def test_without_the_vendors_runtime_everything_is_mounted_from_the_host(
    desired: Desired, job_state: JobStates, nothing
):
    state = job_state(trainer={"accelerator": A3, "replicas": 2}, template={"podSpec": {"runtimeClassName": nothing}})
    spec = desired.pod(state, "trainer", 0, 0)["spec"]
    assert "runtimeClassName" not in spec
    paths = [volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume]
    assert "/usr/local/Ascend/driver" in paths
    assert "/etc/hccn.conf" in paths
    mounts = {mount["mountPath"]: mount.get("readOnly") for mount in spec["containers"][0]["volumeMounts"]}
    assert all(mounts[path] for path in paths)


def test_claims_are_where_the_runtime_looks_for_them(desired: Desired, job_state: JobStates):
    state = job_state(
        model={"source": "pvc://models/qwen/7b"},
        trainer={"replicas": 2},
        storage={"ledger": {"claim": {"size": "1Gi"}}, "checkpoints": {"claim": {"name": "disk"}}},
    )

    def mounted(role, index: int) -> dict[str, tuple[str, str]]:
        spec = desired.pod(state, role, index, 0)["spec"]
        claims = {
            volume["name"]: volume["persistentVolumeClaim"]["claimName"]
            for volume in spec["volumes"]
            if "persistentVolumeClaim" in volume
        }
        mounts = spec["containers"][0]["volumeMounts"]
        return {
            mount["mountPath"]: (claims[mount["name"]], mount.get("subPath", ""))
            for mount in mounts
            if mount["name"] in claims
        }

    assert mounted("controller", 0) == {"/var/lib/asyncflow": ("math-ledger", "math")}
    assert mounted("trainer", 0) == {"/var/lib/asyncflow": ("disk", "math"), "/mnt/models": ("models", "")}
    assert mounted("trainer", 1) == mounted("rollout", 0) == mounted("driver", 0) == {"/mnt/models": ("models", "")}
    assert mounted("storage", 0) == {}
