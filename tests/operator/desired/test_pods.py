"""The pod of every role."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.api.load import load_environment, load_reward
from asyncflow.api.names import DIGEST
from asyncflow.api.placement import PROFILES
from asyncflow.api.status import JobStatus
from asyncflow.rewards.process import Scorer
from asyncflow_operator.desired import Desired
from asyncflow_operator.observed import JobState, Manifest, Owner, TransferQueueState

JobStates = Callable[..., JobState]
ROLES = ("driver", "controller", "storage", "trainer", "rollout")
LEADER = "tcp://math-driver.team-a.svc:5571"


def container(pod: Manifest) -> Manifest:
    return next(each for each in pod["spec"]["containers"] if each["name"] == "asyncflow")


def argument(pod: Manifest, option: str) -> str:
    command = container(pod)["command"]
    return str(command[command.index(f"--{option}") + 1])


@pytest.mark.parametrize("role", ROLES)
def test_a_pod_runs_the_command_of_the_plan_under_the_name_of_its_replica(desired: Desired, job_state: JobStates, role):
    pod = desired.pod(job_state(), role, 2, 7)
    assert pod["metadata"]["name"] == f"math-{role}-2"
    assert pod["spec"]["restartPolicy"] == "Never"
    assert container(pod)["command"][:5] == ["python", "-m", "asyncflow", "role", role]
    said = {name: argument(pod, name) for name in ("job", "index", "attempt", "workdir", "http-port")}
    assert said == {
        "job": "/etc/asyncflow/job.yaml",
        "index": "2",
        "attempt": "7",
        "workdir": "/var/lib/asyncflow",
        "http-port": "9571",
    }


@pytest.mark.parametrize("asked", ["Always", "OnFailure", None])
def test_no_template_has_a_pod_start_again_by_itself(desired: Desired, job_state: JobStates, asked: str | None):
    state = job_state(template={"podSpec": {"restartPolicy": asked}})
    said = {role: desired.pod(state, role, 0, 0)["spec"].get("restartPolicy") for role in ROLES}
    assert said == dict.fromkeys(ROLES, "Never"), "it would start again as the same attempt, and nobody would count it"


def test_the_secrets_of_sinks_are_in_the_environment_of_the_driver_alone(desired: Desired, job_state: JobStates):
    sinks = [{"kind": "wandb", "secret": "keys"}, {"kind": "mlflow", "secret": "keys"}, {"kind": "tensorboard"}]
    state = job_state(telemetry={"sinks": sinks}, driver={"claim": {"name": "disk"}})
    pods = {role: desired.pod(state, role, 0, 0) for role in ROLES}
    seen = {role: container(pod).get("envFrom") for role, pod in pods.items()}
    assert seen == dict.fromkeys(ROLES) | {"driver": [{"secretRef": {"name": "keys"}}]}
    claims = {
        role: [volume["persistentVolumeClaim"]["claimName"] for volume in pod["spec"]["volumes"]
               if "persistentVolumeClaim" in volume]
        for role, pod in pods.items()
    }  # fmt: skip
    assert claims == {role: ["disk"] if role == "driver" else [] for role in ROLES}


def test_units_of_a_job_see_the_password_of_its_store(desired: Desired, job_state: JobStates):
    state = job_state(transferQueue={"backend": "redis", "store": {"address": "redis:6379", "password": {"name": "r"}}})
    secrets = {
        role: [
            source["secret"]["name"]
            for source in desired.pod(state, role, 0, 0)["spec"]["volumes"][0]["projected"]["sources"]
            if "secret" in source
        ]
        for role in ROLES
    }
    name = desired.secrets(state.owner).name
    wanted = {role: [name(role)] for role in ROLES}
    assert secrets == wanted | {
        "driver": [name("driver"), name("keys")],
        "storage": [name("storage"), name("keys"), "r"],
    }
    pods = [desired.pod(asked, "storage", 0, 0) for asked in (state, job_state())]
    assert pods[0]["metadata"]["annotations"][DIGEST] != pods[1]["metadata"]["annotations"][DIGEST]


@pytest.mark.parametrize("role", ROLES)
def test_all_dial_the_driver_and_the_driver_listens(desired: Desired, job_state: JobStates, role):
    expected = "tcp://*:5571" if role == "driver" else LEADER
    pod = desired.pod(job_state(), role, 0, 0)
    assert argument(pod, "driver") == expected
    assert [port["name"] for port in container(pod)["ports"]] == (
        ["rpc", "http", "control"] if role == "driver" else ["http"]
    )


def test_labels_say_whose_pod_it_is_and_no_user_changes_that(desired: Desired, job_state: JobStates):
    theirs = {"team": "a", "app.kubernetes.io/managed-by": "Helm"}
    state = job_state(labels=theirs, template={"labels": {"tier": "gold"}})
    metadata = desired.pod(state, "rollout", 4, 1)["metadata"]
    assert metadata["labels"] == {
        "team": "a",
        "tier": "gold",
        "app.kubernetes.io/managed-by": "asyncflow-operator",
        "app.kubernetes.io/part-of": "asyncflow",
        "asyncflow.dev/job": "math",
        "asyncflow.dev/role": "rollout",
        "asyncflow.dev/index": "4",
        "asyncflow.dev/attempt": "1",
    }
    (owner,) = metadata["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == (
        "RLJob",
        "uid-1",
        True,
        False,
    )


def test_a_pod_is_told_what_its_role_needs_and_no_more(desired: Desired, job_state: JobStates):
    env = {role: container(desired.pod(job_state(), role, 0, 0))["env"] for role in ROLES}
    told = {
        role: {each["name"] for each in said if each["name"].startswith("ASYNCFLOW_")} for role, said in env.items()
    }
    everyone = {"ASYNCFLOW_HOST", "ASYNCFLOW_TLS", "ASYNCFLOW_LAST_WORDS"}
    assert told == dict.fromkeys(ROLES, everyone) | {
        "driver": everyone | {"ASYNCFLOW_TOKEN_FILE"},
        "storage": everyone | {"ASYNCFLOW_LEAVE_SECONDS"},
        "rollout": everyone | {"ASYNCFLOW_NODE", "ASYNCFLOW_REWARD_SOCKET"},
    }
    assert {"name": "ASYNCFLOW_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}} in env["rollout"]


@pytest.mark.parametrize("role", ROLES)
def test_pods_keep_the_restricted_standard(desired: Desired, job_state: JobStates, role):
    spec = desired.pod(job_state(), role, 0, 0)["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False, "no process finds its peers by variables"
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container({"spec": spec})["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    allowed = {"projected", "emptyDir", "configMap"}
    assert {kind for volume in spec["volumes"] for kind in volume} - {"name"} <= allowed


@pytest.mark.parametrize("role", ROLES)
def test_a_pod_can_write_its_run_and_mounts_every_volume_at_one_place(desired: Desired, job_state: JobStates, role):
    claim = {"claim": {"size": "1Gi"}}
    durable = job_state(driver=claim, storage={"ledger": claim, "checkpoints": claim})
    for state, outlives in ((job_state(), ()), (durable, ("driver", "controller", "trainer"))):
        spec = desired.pod(state, role, 0, 0)["spec"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        containers = [*spec.get("initContainers", ()), *spec["containers"]]
        for each in containers:
            paths = [mount["mountPath"] for mount in each["volumeMounts"]]
            assert len(set(paths)) == len(paths)
        mounts = [mount for each in containers for mount in each["volumeMounts"]]
        assert volumes.keys() == {mount["name"] for mount in mounts}
        (run,) = (mount for mount in mounts if mount["mountPath"] == "/var/lib/asyncflow")
        assert not run.get("readOnly")
        assert ("persistentVolumeClaim" in volumes[run["name"]]) == (role in outlives)


def test_a_claim_for_one_writer_is_mounted_by_one_pod_and_is_made_for_as_many_as_write(
    desired: Desired, job_state: JobStates
):
    claim = {"size": "1Gi"}
    for mode, mounted in (("ReadWriteOnce", [True, False]), ("ReadWriteMany", [True, True])):
        many = mode == "ReadWriteMany"
        storage = {"checkpoints": {"claim": claim, "accessMode": mode}, "ledger": {"claim": claim}}
        queue = {"storageUnits": 2, "controllers": 2 if many else 1}
        state = job_state(trainer={"replicas": 2}, storage=storage, transferQueue=queue)
        pods = [desired.pod(state, "trainer", index, 0) for index in (0, 1)]
        assert ["math-checkpoints" in str(pod["spec"]["volumes"]) for pod in pods] == mounted
        claims = (each for each in desired.supporting(state) if each["kind"] == "PersistentVolumeClaim")
        modes = {each["metadata"]["name"]: each["spec"]["accessModes"] for each in claims}
        assert modes == {"math-checkpoints": [mode], "math-ledger": [mode]}
    assert "math-ledger" in str(desired.pod(state, "controller", 1, 0)["spec"]["volumes"])


def test_samples_are_scored_in_a_container_without_any_secret(desired: Desired, job_state: JobStates):
    state = job_state(
        model={"source": "pvc://models/seven"},
        template={"env": [{"name": "PYTHONPATH", "value": "/mnt/code"}, {"name": "HF_TOKEN", "value": "hf"}]},
        reward={"function": "mine:score", "resources": {"cpu": 2, "memory": "1Gi"}},
    )
    spec = desired.pod(state, "rollout", 0, 0)["spec"]
    (scores,) = spec["initContainers"]
    assert scores["restartPolicy"] == "Always", "it runs beside the rollout, and ends after it"
    assert scores["resources"] == {
        "requests": {"cpu": "2000m", "memory": str(1 << 30)},
        "limits": {"memory": str(1 << 30)},
    }
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    seen = {mount["name"]: mount["mountPath"] for mount in scores["volumeMounts"]}
    assert not any("secret" in str(volumes[name]).lower() for name in seen)
    assert seen["model"] == "/mnt/models"
    rollout = container({"spec": spec})
    shared = {mount["name"] for mount in rollout["volumeMounts"]} & set(seen)
    assert shared == {"rewards", "model"}, "a socket, and what both only read"
    variables = {variable["name"]: variable.get("value") for variable in rollout["env"]}
    assert variables["ASYNCFLOW_REWARD_SOCKET"] == scores["command"][-1]
    assert Path(scores["command"][-1]).parent == Path(seen["rewards"])
    told = {variable["name"]: variable["value"] for variable in scores["env"]}
    assert told["PYTHONPATH"] == "/mnt/code"
    assert "HF_TOKEN" not in told
    assert not [name for name in told if name.startswith("ASYNCFLOW_")]
    assert scores["securityContext"] == rollout["securityContext"]


@pytest.mark.parametrize(
    ("profile", "resource", "visible"),
    [
        ("nvidia", "nvidia.com/gpu", "CUDA_VISIBLE_DEVICES"),
        ("ascend-a2", "huawei.com/Ascend910", "ASCEND_RT_VISIBLE_DEVICES"),
    ],
)
def test_devices_of_the_reward_belong_to_the_container_that_scores(
    desired: Desired, job_state: JobStates, tmp_path: Path, profile: str, resource: str, visible: str
) -> None:
    template = {"env": [{"name": "PYTHONPATH", "value": "/mnt/code"}, {"name": "HF_TOKEN", "value": "hf"}]}
    role = {"accelerator": {"profile": profile, "count": 2}, "template": template}
    state = job_state(reward={"function": "reward_model", "config": {"model": "judge"}, "role": role})
    spec = desired.pod(state, "reward", 0, 0)["spec"]
    (scores,) = spec["initContainers"]
    beside = container({"spec": spec})
    assert scores["resources"]["limits"] == {resource: "2"}
    assert resource not in str(beside["resources"])
    told = {variable["name"]: variable.get("value") for variable in scores["env"]}
    assert (told[visible], told["PYTHONPATH"]) == ("0,1", "/mnt/code")
    assert PROFILES[profile].env.items() <= told.items()
    assert "HF_TOKEN" not in told
    assert visible not in {variable["name"] for variable in beside["env"]}
    of_devices = {volume["name"] for volume in spec["volumes"] if "hostPath" in volume} | {"shm"}
    assert of_devices <= {mount["name"] for mount in scores["volumeMounts"]}
    assert of_devices.isdisjoint(mount["name"] for mount in beside["volumeMounts"])
    assert not any("initContainers" in desired.pod(state, name, 0, 0)["spec"] for name in ("rollout", "trainer"))
    config = next(each for each in desired.supporting(state) if each["kind"] == "ConfigMap")
    (tmp_path / "reward.yaml").write_text(config["data"]["reward.yaml"])
    (scorer,) = Scorer.of(load_reward(tmp_path / "reward.yaml"), workdir=tmp_path)
    assert (scorer.accelerator.profile, scorer.accelerator.count) == (profile, 2)


def test_where_the_reward_is_a_role_its_pods_score_and_rollouts_only_answer_turns(
    desired: Desired, job_state: JobStates, tmp_path: Path
):
    role = {"replicas": 2, "resources": {"cpu": 3}, "template": {"env": [{"name": "API_KEY", "value": "a-canary"}]}}
    reward = {"function": "mine:score", "resources": {"cpu": 2}, "role": role}
    state = job_state(reward=reward)
    judging = desired.pod(state, "reward", 1, 0)
    (scores,) = judging["spec"]["initContainers"]
    assert "--environment" not in scores["command"]
    assert scores["resources"]["requests"]["cpu"] == "2000m"
    works = container(judging)
    assert works["resources"]["requests"]["cpu"] == "3000m"
    variables = {variable["name"]: variable.get("value") for variable in works["env"]}
    assert variables["ASYNCFLOW_REWARD_SOCKET"] == scores["command"][-1]
    assert variables["API_KEY"] == "a-canary"
    config = next(each for each in desired.supporting(state) if each["kind"] == "ConfigMap")
    (tmp_path / "reward.yaml").write_text(config["data"]["reward.yaml"])
    assert "a-canary" not in config["data"]["reward.yaml"]
    assert load_reward(tmp_path / "reward.yaml").role is not None
    assert "initContainers" not in desired.pod(state, "rollout", 0, 0)["spec"]
    with_turns = job_state(reward=reward, environment={"function": "calculator"})
    (answers,) = desired.pod(with_turns, "rollout", 0, 0)["spec"]["initContainers"]
    assert "--environment" in answers["command"]
    assert "--environment" not in desired.pod(with_turns, "reward", 0, 0)["spec"]["initContainers"][0]["command"]


def test_a_critic_of_its_own_mounts_the_checkpoints_and_outlives_the_trainer(desired: Desired, job_state: JobStates):
    state = job_state(
        algorithm={"name": "ppo", "steps": 10},
        critic={"role": {"resources": {"cpu": 3}, "template": {"labels": {"team": "values"}}}},
        storage={"checkpoints": {"claim": {"size": "1Gi"}, "accessMode": "ReadWriteMany"}},
    )
    pod, trainer = desired.pod(state, "critic", 0, 0), desired.pod(state, "trainer", 0, 0)
    assert pod["metadata"]["labels"]["team"] == "values"
    assert container(pod)["resources"]["requests"]["cpu"] == "3000m"
    mounts = [
        next(mount for mount in container(each)["volumeMounts"] if mount["name"] == "checkpoints")
        for each in (pod, trainer)
    ]
    assert mounts[0] == mounts[1]
    assert pod["spec"]["terminationGracePeriodSeconds"] >= trainer["spec"]["terminationGracePeriodSeconds"]
    assert "initContainers" not in pod["spec"]


@pytest.mark.parametrize("environment", [None, {"function": "mine:World", "config": {"size": 3}}])
def test_the_container_that_scores_sees_of_the_manifest_its_reward_and_its_environment_only(
    desired: Desired, job_state: JobStates, tmp_path: Path, environment: dict[str, object] | None
):
    state = job_state(
        template={"env": [{"name": "HF_TOKEN", "value": "hf-canary"}]},
        reward={"function": "mine:score", "timeoutSeconds": 3, "files": ["table.json"]},
        environment=environment,
    )
    spec = desired.pod(state, "rollout", 0, 0)["spec"]
    (scores,) = spec["initContainers"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    config = next(each for each in desired.supporting(state) if each["kind"] == "ConfigMap")
    seen: dict[str, str] = {}
    for mount in scores["volumeMounts"]:
        mounted = volumes[mount["name"]].get("configMap")
        if mounted is not None:
            assert mounted["name"] == config["metadata"]["name"]
            seen |= {f"{mount['mountPath']}/{item['path']}": config["data"][item["key"]] for item in mounted["items"]}
    assert "hf-canary" not in str(seen)
    assert "hf-canary" in config["data"]["job.yaml"]
    (tmp_path / "reward.yaml").write_text(seen.pop(scores["command"][scores["command"].index("--reward") + 1]))
    assert state.job is not None
    assert load_reward(tmp_path / "reward.yaml") == state.job.spec.reward
    assert ("--environment" in scores["command"]) == (environment is not None)
    if environment is not None:
        (tmp_path / "environment.yaml").write_text(
            seen.pop(scores["command"][scores["command"].index("--environment") + 1])
        )
        assert load_environment(tmp_path / "environment.yaml") == state.job.spec.environment
    assert seen == {}


@pytest.mark.parametrize("role", sorted(set(ROLES) - {"rollout"}))
def test_nobody_else_scores(desired: Desired, job_state: JobStates, role):
    assert "initContainers" not in desired.pod(job_state(), role, 0, 0)["spec"]


def tolerated(pod: Manifest) -> dict[str, int | None]:
    """For how long a pod stays on a node that is not ready or does not answer."""
    tolerations = [each for each in pod["spec"]["tolerations"] if each.get("effect") == "NoExecute"]
    return {each["key"].removeprefix("node.kubernetes.io/"): each.get("tolerationSeconds") for each in tolerations}


@pytest.mark.parametrize("role", ROLES)
def test_a_rollout_leaves_a_lost_node_at_once_and_others_after_a_while(
    desired: Desired, job_state: JobStates, queue_state: Callable[..., TransferQueueState], role
):
    pod = desired.pod(job_state(limits={"nodeLostSeconds": 45}), role, 0, 0)
    assert tolerated(pod) == {"not-ready": 45, "unreachable": 0 if role == "rollout" else 45}
    assert tolerated(desired.pod(job_state(), "trainer", 0, 0)) == {"not-ready": 120, "unreachable": 120}
    if role in ("controller", "storage"):
        assert tolerated(desired.queue_pod(queue_state(), role, 0, 0)) == {"not-ready": 120, "unreachable": 120}


@pytest.mark.parametrize("key", ["node.kubernetes.io/unreachable", None])
def test_tolerations_of_a_template_for_lost_nodes_count(desired: Desired, job_state: JobStates, key):
    own = {"operator": "Exists", "effect": "NoExecute"} | ({"key": key, "tolerationSeconds": 900} if key else {})
    pod = desired.pod(job_state(template={"podSpec": {"tolerations": [own]}}), "rollout", 0, 0)
    ours = [each for each in pod["spec"]["tolerations"] if each != own]
    assert [each["key"] for each in ours] == (["node.kubernetes.io/not-ready"] if key else [])


@pytest.mark.parametrize("wrong", [7, ["odd"], {"key": "a"}])
def test_a_template_that_is_wrong_about_tolerations_is_for_the_api_server_to_refuse(
    desired: Desired, job_state: JobStates, wrong
):
    said = desired.pod(job_state(template={"podSpec": {"tolerations": wrong}}), "rollout", 0, 0)["spec"]["tolerations"]
    assert said[:1] == wrong if isinstance(wrong, list) else said == wrong


@pytest.mark.parametrize(
    ("role", "grace"), [("driver", 10), ("controller", 10), ("storage", 130), ("trainer", 13), ("rollout", 26)]
)
def test_the_grace_period_is_the_time_that_the_role_needs_to_end_in_order(
    desired: Desired, job_state: JobStates, role, grace
):
    state = job_state(rollout={"drainSeconds": 20.5}, limits={"stopSeconds": 2.5})
    assert desired.pod(state, role, 0, 0)["spec"]["terminationGracePeriodSeconds"] == grace


def test_probes_ask_the_port_on_which_the_role_answers(desired: Desired, job_state: JobStates):
    state = job_state(limits={"startSeconds": 90})
    probed = container(desired.pod(state, "trainer", 0, 0))
    assert probed["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    assert probed["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert probed["startupProbe"]["failureThreshold"] * probed["startupProbe"]["periodSeconds"] == 90


def test_memory_and_devices_are_limits_and_cpu_is_not(desired: Desired, job_state: JobStates):
    state = job_state(
        trainer={
            "accelerator": {"profile": "nvidia", "count": 2},
            "resources": {"cpu": "16.1", "memory": "4Gi", "sharedMemory": "1Gi"},
        }
    )
    pod = desired.pod(state, "trainer", 0, 0)
    hard = {"memory": str(4 << 30), "nvidia.com/gpu": "2"}
    assert container(pod)["resources"] == {"requests": {"cpu": "16100m", **hard}, "limits": hard}
    shm = next(volume for volume in pod["spec"]["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": str(1 << 30)}
    assert container(pod)["image"] == "registry.example/asyncflow/runtime-cuda:1.2.3"
    alone = desired.pod(job_state(trainer={"resources": {"sharedMemory": "1Gi"}}), "trainer", 0, 0)
    assert shm in alone["spec"]["volumes"], "one process may have threads and workers of its own"


def test_the_pods_of_the_jobs_queue_belong_to_the_queue_and_to_the_family(desired: Desired, job_state: JobStates):
    state = job_state()
    owner = Owner(kind="TransferQueue", namespace="team-a", name="math", uid="uid-queue")
    pod = desired.queue_pod(TransferQueueState(owner=owner, queue=None, job=state), "storage", 1, 0)
    assert (
        pod["metadata"]["ownerReferences"][0] | {"kind": "TransferQueue", "uid": "uid-queue"}
        == (pod["metadata"]["ownerReferences"][0])
    )
    assert pod["metadata"]["labels"]["asyncflow.dev/job"] == "math"
    assert pod["metadata"]["labels"]["asyncflow.dev/queue"] == "math"
    assert pod["spec"] == desired.pod(state, "storage", 1, 0)["spec"]


def test_storage_units_spread_over_nodes_and_stay_near_their_readers(desired: Desired, job_state: JobStates):
    spec = desired.pod(job_state(), "storage", 0, 0)["spec"]
    (spread,) = spec["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
    (near,) = spec["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    (readers,) = near["podAffinityTerm"]["labelSelector"]["matchExpressions"]
    assert readers["values"] == ["trainer", "rollout"]


def test_on_the_hosts_network_no_two_processes_of_a_job_share_a_port(desired: Desired, job_state: JobStates):
    state = job_state(template={"podSpec": {"hostNetwork": True}}, trainer={"replicas": 3})
    seats = [("driver", 1), ("controller", 1), ("storage", 2), ("trainer", 3), ("rollout", 8)]
    pods = [desired.pod(state, role, index, 0) for role, count in seats for index in range(count)]
    assert {pod["spec"]["dnsPolicy"] for pod in pods} == {"ClusterFirstWithHostNet"}
    numbers = [argument(pod, "http-port") for pod in pods]
    assert len(set(numbers)) == len(pods)
    http = [port["containerPort"] for pod in pods for port in container(pod)["ports"] if port["name"] == "http"]
    assert list(map(str, http)) == numbers


def test_a_template_of_a_role_wins_over_that_of_the_job(desired: Desired, job_state: JobStates):
    state = job_state(
        template={
            "image": "everywhere:1",
            "annotations": {"a": "job", "b": "job"},
            "env": [{"name": "LEVEL", "value": "1"}, {"name": "HOME", "value": "/home/me"}],
            "podSpec": {"nodeSelector": {"pool": "any"}, "priorityClassName": "low"},
        },
        rollout={
            "template": {
                "image": "rollout:2",
                "annotations": {"b": "rollout"},
                "env": [{"name": "LEVEL", "value": "2"}],
                "podSpec": {
                    "nodeSelector": {"pool": "fast"},
                    "priorityClassName": None,
                    "containers": [{"name": "asyncflow", "resources": {"limits": {"cpu": "3"}}}, {"name": "side"}],
                },
            }
        },
    )
    driver, rollout = desired.pod(state, "driver", 0, 0), desired.pod(state, "rollout", 0, 0)
    assert (container(driver)["image"], container(rollout)["image"]) == ("everywhere:1", "rollout:2")
    assert rollout["metadata"]["annotations"] | {"a": "job", "b": "rollout"} == rollout["metadata"]["annotations"]
    env = {each["name"]: each.get("value") for each in container(rollout)["env"]}
    assert (env["LEVEL"], env["HOME"]) == ("2", "/home/me")
    assert rollout["spec"]["nodeSelector"] == {"pool": "fast"}
    assert (driver["spec"]["priorityClassName"], rollout["spec"].get("priorityClassName")) == ("low", None)
    assert [each["name"] for each in rollout["spec"]["containers"]] == ["asyncflow", "side"]
    assert container(rollout)["resources"] == {"requests": {"cpu": "1000m"}, "limits": {"cpu": "3"}}


def test_another_version_of_the_operator_changes_no_pod_of_a_job_that_has_begun(
    desired: Desired, newer: Desired, job_state: JobStates
):
    begun = job_state()
    assert begun.job is not None
    pinned = replace(begun, status=JobStatus(images=desired.images(begun.job)))
    for role in ROLES:
        assert newer.pod(pinned, role, 0, 0) == desired.pod(begun, role, 0, 0)


def test_a_job_that_began_with_images_that_score_in_the_rollout_stays_so(desired: Desired, job_state: JobStates):
    begun = job_state()
    assert begun.job is not None
    images = {role: image for role, image in desired.images(begun.job).items() if role in ROLES}
    assert "rewards" not in images
    older = desired.pod(replace(begun, status=JobStatus(images=images)), "rollout", 0, 0)
    assert "initContainers" not in older["spec"]
    assert "initContainers" in desired.pod(begun, "rollout", 0, 0)["spec"]


def test_the_digest_follows_the_users_settings_of_the_role_and_nothing_else(
    desired: Desired, newer: Desired, job_state: JobStates
):
    def digest_of(builders: Desired, state: JobState, role, index: int = 0, attempt: int = 0) -> str:
        return str(builders.pod(state, role, index, attempt)["metadata"]["annotations"][DIGEST])

    plain = digest_of(desired, job_state(), "trainer")
    assert digest_of(newer, job_state(), "trainer", 1, 5) == plain
    assert digest_of(desired, job_state(rollout={"threads": 4}, limits={"stopSeconds": 1}), "trainer") == plain
    assert digest_of(desired, job_state(trainer={"threads": 4}), "trainer") != plain
    assert digest_of(desired, job_state(trainer={"replicas": 2}), "trainer") != plain
    assert digest_of(desired, job_state(template={"image": "mine:1"}), "trainer") != plain
    rollout = digest_of(desired, job_state(), "rollout")
    assert digest_of(desired, job_state(trainer={"replicas": 2}), "rollout") == rollout
    more = job_state(rollout={"replicas": 7, "minReplicas": 2, "maxReplicas": 9})
    assert digest_of(desired, more, "rollout") == rollout


@pytest.mark.parametrize(
    ("changed", "spec"),
    [
        ({"driver"}, {"driver": {"resources": {"cpu": 2}}}),
        ({"driver"}, {"driver": {"claim": {"size": "1Gi"}}}),
        ({"driver"}, {"telemetry": {"sinks": [{"kind": "wandb", "secret": "keys"}]}}),
        ({"controller"}, {"storage": {"ledger": {"claim": {"size": "1Gi"}}}}),
        ({"controller", "storage"}, {"transferQueue": {"resources": {"cpu": 2}}}),
        ({"storage"}, {"transferQueue": {"bytesPerUnit": "1Gi"}}),
        ({"trainer"}, {"storage": {"checkpoints": {"claim": {"size": "1Gi"}}}}),
        ({"trainer"}, {"trainer": {"resources": {"memory": "1Gi"}}}),
        ({"rollout"}, {"rollout": {"template": {"labels": {"a": "b"}}}}),
        ({"rollout"}, {"reward": {"function": "task", "resources": {"cpu": 2}}}),
        (set(ROLES), {"template": {"podSpec": {"priorityClassName": "low"}}}),
        (set(ROLES), {"scheduling": {"gang": "volcano"}}),
        (set(), {"rollout": {"replicas": 5}, "sampling": {"maxTokens": 32}, "suspend": True}),
    ],
)
def test_what_shapes_the_pods_of_a_role_changes_its_digest_and_no_other(
    desired: Desired, job_state: JobStates, changed: set[str], spec: dict[str, object]
):
    before, after = (
        {role: desired.pod(state, role, 0, 0)["metadata"]["annotations"][DIGEST] for role in ROLES}
        for state in (job_state(), job_state(**spec))
    )
    assert {role for role in ROLES if before[role] != after[role]} == changed


@given(
    role=st.sampled_from(ROLES),
    index=st.integers(0, 9999),
    attempt=st.integers(0, 10**6),
    profile=st.sampled_from([("cpu", 0), ("nvidia", 1), ("ascend-a2", 8), ("ascend-a3", 16), ("ascend-a5", 8)]),
    gang=st.sampled_from(["none", "volcano", "kueue"]),
    network=st.booleans(),
)
def test_the_same_state_gives_the_same_bytes(desired, job_state, role, index, attempt, profile, gang, network):
    accelerator = {"profile": profile[0], "count": profile[1]}

    def made() -> str:
        state = job_state(
            trainer={"replicas": 2, "accelerator": accelerator},
            rollout={"engine": {"name": "vllm"}, "accelerator": accelerator},
            scheduling={"gang": gang},
            template={"podSpec": {"hostNetwork": network}},
        )
        return json.dumps(desired.pod(state, role, index, attempt))

    assert made() == made()
    names = [each["name"] for each in container(json.loads(made()))["env"]]
    assert len(set(names)) == len(names)
    assert len(json.loads(made())["metadata"]["name"]) <= 63
