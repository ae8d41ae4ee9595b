"""Everything around the pods."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.api.load import load_job
from asyncflow.api.names import DIGEST
from asyncflow.api.queue import TransferQueue
from asyncflow.api.weights import WeightSync
from asyncflow_operator.desired import Desired, digest
from asyncflow_operator.observed import JobState, Manifest

JobStates = Callable[..., JobState]


def by_name(manifests: Iterable[Manifest]) -> dict[str, Manifest]:
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in manifests}


def test_a_small_job_has_the_objects_that_it_needs_and_no_more(desired: Desired, job_state: JobStates):
    assert list(by_name(desired.supporting(job_state()))) == [
        "ServiceAccount/math",
        "ConfigMap/math",
        "NetworkPolicy/math",
        "NetworkPolicy/math.driver",
        "NetworkPolicy/math.rewards",
        "Service/math-driver",
        "PodDisruptionBudget/math",
    ]


def test_a_gang_has_names_and_claims_are_made_where_a_size_is_given(desired: Desired, job_state: JobStates):
    state = job_state(
        trainer={"replicas": 2},
        storage={
            "ledger": {"claim": {"size": "1Gi", "storageClass": "fast"}},
            "checkpoints": {"claim": {"name": "theirs"}},
        },
        driver={"claim": {"size": "2Gi"}},
    )
    made = by_name(desired.supporting(state))
    service = made["Service/math-trainer"]["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert made["PersistentVolumeClaim/math-ledger"]["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Gi"}},
        "storageClassName": "fast",
    }
    assert made["PersistentVolumeClaim/math-driver"]["spec"]["resources"] == {"requests": {"storage": "2Gi"}}
    assert not any(name.startswith("PersistentVolumeClaim/") and "checkpoints" in name for name in made)


def test_the_budget_lets_one_of_the_core_go(desired: Desired, job_state: JobStates):
    made = by_name(desired.supporting(job_state(trainer={"replicas": 4})))
    spec = made["PodDisruptionBudget/math"]["spec"]
    assert spec["minAvailable"] == 1 + 1 + 2 + 4 - 1
    (roles,) = spec["selector"]["matchExpressions"]
    assert roles["values"] == ["driver", "controller", "storage", "trainer"]


FAMILY = [{"podSelector": {"matchLabels": {"asyncflow.dev/job": "math"}}}]
FOLLOWERS = {"podSelector": {"matchLabels": {"asyncflow.dev/follows": "math"}}}


def test_only_the_family_and_followers_talk_to_pods_and_watchers_reach_one_port(desired: Desired, job_state: JobStates):
    spec = by_name(desired.supporting(job_state()))["NetworkPolicy/math"]["spec"]
    family, watchers = spec["ingress"]
    assert family == {"from": [*FAMILY, FOLLOWERS]}
    (namespaces,) = watchers["from"][0]["namespaceSelector"]["matchExpressions"]
    assert namespaces["values"] == ["asyncflow-system", "monitoring"]
    assert watchers["ports"] == [{"protocol": "TCP", "port": "http"}]


def test_orders_reach_the_driver_from_the_operator_alone(desired: Desired, job_state: JobStates):
    made = by_name(desired.supporting(job_state()))
    (but,) = made["NetworkPolicy/math"]["spec"]["podSelector"]["matchExpressions"]
    assert but == {"key": "asyncflow.dev/role", "operator": "NotIn", "values": ["driver"]}
    spec = made["NetworkPolicy/math.driver"]["spec"]
    assert spec["podSelector"] == {"matchLabels": {"asyncflow.dev/job": "math", "asyncflow.dev/role": "driver"}}
    open_to = {port["port"]: each["from"] for each in spec["ingress"] for port in each["ports"]}
    assert open_to["rpc"] == [*FAMILY, FOLLOWERS]
    assert open_to["control"] == [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "asyncflow-system"}},
            "podSelector": {"matchLabels": {"app.kubernetes.io/name": "asyncflow-operator"}},
        }
    ]
    ports = made["Service/math-driver"]["spec"]["ports"]
    assert {port["name"]: port["port"] for port in ports} == {"rpc": 5571, "http": 9571, "control": 7571}
    pod = desired.pod(job_state(), "driver", 0, 0)["spec"]["containers"][0]
    assert {"name": "control", "containerPort": 7571} in pod["ports"]
    assert pod["command"][-2:] == ["--control-port", "7571"]
    assert "--control-port" not in desired.pod(job_state(), "rollout", 0, 0)["spec"]["containers"][0]["command"]


def test_where_samples_are_scored_only_the_family_and_names_can_be_reached(desired: Desired, job_state: JobStates):
    spec = by_name(desired.supporting(job_state()))["NetworkPolicy/math.rewards"]["spec"]
    scoring = {"key": "asyncflow.dev/role", "operator": "In", "values": ["rollout"]}
    assert spec["podSelector"] == {"matchLabels": {"asyncflow.dev/job": "math"}, "matchExpressions": [scoring]}
    assert spec["policyTypes"] == ["Egress"]
    family, names = spec["egress"]
    assert family == {"to": [{"podSelector": {"matchLabels": {"asyncflow.dev/job": "math"}}}]}
    ports = {(port["protocol"], port["port"]) for port in names["ports"]}
    assert ports == {("UDP", 53), ("TCP", 53), ("UDP", 5353), ("TCP", 5353)}
    opened = job_state(reward={"function": "mine:score", "network": True})
    assert by_name(desired.supporting(opened))["NetworkPolicy/math.rewards"]["spec"]["egress"] == [{}]


def test_whatever_pods_score_or_answer_turns_reach_nobody_else(desired: Desired, job_state: JobStates):
    reward = {"function": "task", "role": {}}
    for environment, roles in ((None, ["reward"]), ({"function": "calculator"}, ["reward", "rollout"])):
        state = job_state(reward=reward, environment=environment)
        spec = by_name(desired.supporting(state))["NetworkPolicy/math.rewards"]["spec"]
        assert spec["podSelector"]["matchExpressions"][0]["values"] == roles


def config_of(desired: Desired, state: JobState) -> str:
    text: str = by_name(desired.supporting(state))["ConfigMap/math"]["data"]["job.yaml"]
    return text


def test_roles_read_the_job_that_was_applied(desired: Desired, job_state: JobStates, tmp_path: Path):
    state = job_state(labels={"team": "a"}, scheduling={}, sampling={"maxTokens": 16, "stop": ["</s>", "\u2028\x85☃"]})
    file = tmp_path / "job.yaml"
    file.write_text(config_of(desired, state))
    job = load_job(file)
    assert state.job is not None
    assert job.spec == state.job.spec
    assert (job.name, job.metadata.namespace, job.partition) == ("math", "team-a", "uid-1")


@given(text=st.text(max_size=50))
def test_roles_read_any_text(desired: Desired, job_state: JobStates, tmp_path_factory, text):
    train = {"source": "tiny://reverse-digits", "template": f"{text}{{question}}"}
    state = job_state(data={"train": train})
    file = tmp_path_factory.mktemp("job") / "job.yaml"
    file.write_text(config_of(desired, state), encoding="utf-8", newline="")
    assert load_job(file).spec.data.train.template == train["template"]


def test_fields_of_a_newer_contract_do_not_reach_older_images(desired: Desired, job_state: JobStates):
    """A field with its default value is not written: an older image would refuse a field that it does not know."""
    text = config_of(desired, job_state())
    assert "failurePolicy" not in text
    assert "elasticity" not in text


def test_a_suspended_job_has_the_same_manifest(desired: Desired, job_state: JobStates):
    assert config_of(desired, job_state(suspend=True)) == config_of(desired, job_state())


def test_another_version_of_the_operator_writes_nothing_again(
    desired: Desired, newer: Desired, job_state: JobStates, queue_state
):
    state = job_state(scheduling={})
    assert newer.supporting(state) == desired.supporting(state)
    assert newer.children(state) == desired.children(state)
    assert newer.queue_supporting(queue_state()) == desired.queue_supporting(queue_state())


def test_the_children_have_the_settings_of_the_job(desired: Desired, job_state: JobStates):
    state = job_state(
        transferQueue={"storageUnits": 3, "bytesPerUnit": "1Gi", "resources": {"memory": "2Gi"}},
        storage={"ledger": {"sync": "always", "claim": {"size": "1Gi"}}},
        template={"env": [{"name": "A", "value": "1"}]},
        weightSync={"dtype": "bfloat16"},
    )
    made = by_name(desired.children(state))
    queue = TransferQueue.model_validate(made["TransferQueue/math"] | {"metadata": {"name": "math"}})
    assert state.job is not None
    assert queue.spec.ledger == state.job.spec.storage.ledger
    assert queue.spec.template == state.job.spec.template
    assert queue.spec.model_dump(exclude={"ledger", "template"}) == state.job.spec.transfer_queue.model_dump()
    sync = WeightSync.model_validate(made["WeightSync/math"] | {"metadata": {"name": "math"}})
    assert sync.spec.dtype == "bfloat16"


def test_a_job_that_names_a_weight_sync_makes_none(desired: Desired, job_state: JobStates):
    state = job_state(weightSync={"name": "theirs"})
    assert state.job is not None
    assert list(by_name(desired.children(state))) == ["TransferQueue/math"]
    section = state.job.spec.weight_sync.model_copy(update={"keep": 5})
    job = state.job.model_copy(update={"spec": state.job.spec.model_copy(update={"weight_sync": section})})
    written = json.loads(config_of(desired, replace(state, job=job)))
    assert written["spec"]["weightSync"] == {"keep": 5}, "its fields, for those who cannot look it up"


def test_every_object_is_stamped_and_owned(desired: Desired, job_state: JobStates, queue_state):
    state = job_state(scheduling={"gang": "volcano"}, trainer={"replicas": 2})
    made = (*desired.supporting(state), *desired.children(state), *desired.queue_supporting(queue_state()))
    for each in made:
        metadata = dict(each["metadata"])
        annotations = dict(metadata.pop("annotations"))
        stamp = annotations.pop(DIGEST)
        assert stamp == digest(each | {"metadata": metadata | ({"annotations": annotations} if annotations else {})})
        assert [owner["controller"] for owner in each["metadata"]["ownerReferences"]] == [True]
        assert each["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "asyncflow-operator"


def test_a_state_without_a_legal_job_has_no_objects(desired: Desired, job_state: JobStates):
    broken = JobState(owner=job_state().owner, job=None, problem="spec.model: missing")
    with pytest.raises(ValueError, match="math is not a valid job"):
        desired.supporting(broken)
