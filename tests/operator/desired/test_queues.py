"""A queue that stands alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from asyncflow.api.load import load
from asyncflow.api.names import CONFIG_DIR, STORE_PASSWORD_FILE
from asyncflow.api.queue import TransferQueue
from asyncflow_operator.cluster.store import ObjectGroup, group_of
from asyncflow_operator.desired import Desired, queue_roles
from asyncflow_operator.observed import TransferQueueState

QueueStates = Callable[..., TransferQueueState]


def test_its_controller_is_the_address_that_units_dial(desired: Desired, queue_state: QueueStates):
    state = queue_state(storageUnits=3)
    dialled = {}
    for role in ("controller", "storage"):
        command = desired.queue_pod(state, role, 0, 0)["spec"]["containers"][0]["command"]
        dialled[role] = command[command.index("--driver") + 1]
    assert dialled == {"controller": "tcp://*:5571", "storage": "tcp://shared-controller.team-a.svc:5571"}
    service = next(each for each in desired.queue_supporting(state) if each["kind"] == "Service")
    assert service["metadata"]["name"] == "shared-controller"
    labels = {"asyncflow.dev/queue": "shared", "asyncflow.dev/role": "controller", "asyncflow.dev/index": "0"}
    assert service["spec"]["selector"] == labels


def test_its_further_controllers_dial_the_first_and_share_its_claim(desired: Desired, queue_state: QueueStates):
    state = queue_state(controllers=3, ledger={"claim": {"size": "2Gi"}})
    assert state.queue is not None
    assert queue_roles(state.queue)[0].replicas == 3
    (container,) = desired.queue_pod(state, "controller", 2, 0)["spec"]["containers"]
    command = container["command"]
    assert command[command.index("--driver") + 1] == "tcp://shared-controller.team-a.svc:5571"
    assert "ledger" in [mount["name"] for mount in container["volumeMounts"]]
    claim = next(each for each in desired.queue_supporting(state) if each["kind"] == "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_its_roles_read_its_manifest(desired: Desired, queue_state: QueueStates, tmp_path: Path):
    state = queue_state(storageUnits=3, bytesPerUnit="1Gi", ledger={"sync": "always"})
    config = next(each for each in desired.queue_supporting(state) if each["kind"] == "ConfigMap")
    file = tmp_path / "job.yaml"
    file.write_text(config["data"]["job.yaml"])
    queue = load(file)
    assert isinstance(queue, TransferQueue)
    assert state.queue is not None
    assert queue.spec == state.queue.spec


def test_a_unit_has_room_for_its_cells_and_itself(queue_state: QueueStates):
    queue = queue_state(bytesPerUnit="1Gi", resources={"cpu": "250m"}).queue
    assert queue is not None
    controller, storage = queue_roles(queue)
    assert storage.resources.memory == (1 << 30) + (256 << 20)
    assert (controller.resources.cpu, storage.resources.cpu) == (0.25, 0.25)
    assert (controller.after, storage.after) == ((), ("controller",))


def test_the_ledger_lies_on_its_claim(desired: Desired, queue_state: QueueStates):
    state = queue_state(ledger={"claim": {"size": "2Gi"}})
    kinds = [each["kind"] for each in desired.queue_supporting(state)]
    assert "PersistentVolumeClaim" in kinds
    mounts = desired.queue_pod(state, "controller", 0, 0)["spec"]["containers"][0]["volumeMounts"]
    (ledger,) = (mount for mount in mounts if mount["name"] == "ledger")
    assert (ledger["mountPath"], ledger["subPath"]) == ("/var/lib/asyncflow", "shared")


def test_any_pod_of_its_namespace_may_dial_it(desired: Desired, queue_state: QueueStates):
    policy = next(each for each in desired.queue_supporting(queue_state()) if each["kind"] == "NetworkPolicy")
    own = {"podSelector": {"matchLabels": {"asyncflow.dev/queue": "shared"}}}
    inside, outside, *_ = policy["spec"]["ingress"]
    assert inside == {"from": [own]}
    assert outside["from"] == [{"podSelector": {}}]
    assert [port["port"] for port in outside["ports"]] == ["rpc", "http"], "not the data ports of a unit's store client"


def test_only_its_own_pods_may_dial_its_store(desired: Desired, queue_state: QueueStates):
    made = desired.queue_supporting(queue_state(backend="mooncake"))
    policies = {each["metadata"]["name"]: each["spec"] for each in made if each["kind"] == "NetworkPolicy"}
    (open_to,), (stores,) = (policies[name]["podSelector"]["matchExpressions"] for name in ("shared", "shared.store"))
    assert (open_to["operator"], open_to["values"]) == ("NotIn", ["driver", "master", "holder"])
    assert (stores["operator"], stores["values"]) == ("In", ["master", "holder"])
    own = {"podSelector": {"matchLabels": {"asyncflow.dev/queue": "shared"}}}
    assert policies["shared.store"]["ingress"][0] == {"from": [own]}


def test_a_jobs_queue_makes_no_supporting_objects_of_its_own(desired: Desired, queue_state: QueueStates, job_state):
    state = TransferQueueState(owner=queue_state().owner, queue=None, job=job_state())
    assert desired.queue_supporting(state) == ()


def test_a_queue_has_no_trainer(desired: Desired, queue_state: QueueStates):
    with pytest.raises(KeyError):
        desired.queue_pod(queue_state(), "trainer", 0, 0)


def test_its_pods_keep_their_digest_over_versions_and_scalings(
    desired: Desired, newer: Desired, queue_state: QueueStates
):
    before, after = queue_state(storageUnits=1), queue_state(storageUnits=9)
    digests = {
        builders.queue_pod(state, "storage", 0, 0)["metadata"]["annotations"]["asyncflow.dev/digest"]
        for builders in (desired, newer)
        for state in (before, after)
    }
    assert len(digests) == 1


def test_only_units_see_the_password_of_a_store_that_others_run(desired: Desired, queue_state: QueueStates):
    store = {"address": "redis.data.svc:6379", "password": {"name": "redis", "key": "token"}}
    state = queue_state(backend="redis", store=store)
    assert state.queue is not None
    assert [role.name for role in queue_roles(state.queue)] == ["controller", "storage"]
    pods = {role: desired.queue_pod(state, role, 0, 0) for role in ("controller", "storage")}
    sources = {role: pod["spec"]["volumes"][0]["projected"]["sources"] for role, pod in pods.items()}
    entry = {"secret": {"name": "redis", "items": [{"key": "token", "path": "store-password"}]}}
    assert entry in sources["storage"]
    assert entry not in sources["controller"]
    unlocked = desired.queue_pod(queue_state(backend="redis", store={"address": "redis:6379"}), "storage", 0, 0)
    seen = unlocked["spec"]["volumes"][0]["projected"]["sources"]
    assert seen == [source for source in sources["storage"] if source != entry]
    assert f"{CONFIG_DIR}/store-password" == STORE_PASSWORD_FILE


def test_its_bytes_have_holders_where_they_do_not_lie_with_the_units(desired: Desired, queue_state: QueueStates):
    state = queue_state(backend="mooncake", storageUnits=2, bytesPerUnit="1Gi")
    assert state.queue is not None
    roles = queue_roles(state.queue)
    assert [(role.name, role.replicas) for role in roles] == [
        ("controller", 1),
        ("master", 1),
        ("holder", 2),
        ("storage", 2),
    ]
    assert [role.after for role in roles] == [(), ("controller",), ("master",), ("controller", "holder")]
    holder = desired.queue_pod(state, "holder", 1, 0)["spec"]["containers"][0]
    assert int(holder["resources"]["limits"]["memory"]) > 1 << 30
    assert holder["command"][3:5] == ["role", "holder"]
    budget = next(each for each in desired.queue_supporting(state) if each["kind"] == "PodDisruptionBudget")
    assert budget["spec"]["minAvailable"] == 5


def test_a_label_of_asyncflow_on_a_queue_makes_its_objects_those_of_nobody_else(
    desired: Desired, queue_state: QueueStates
):
    """A person notes with which job a queue is used: neither its pods nor its policies become those of that job."""
    state = queue_state()
    owner = replace(state.owner, labels={"team": "a", "asyncflow.dev/job": "math", "asyncflow.dev/follows": "math"})
    state = replace(state, owner=owner)
    for made in (*desired.queue_supporting(state), desired.queue_pod(state, "storage", 0, 0)):
        meta = made["metadata"]
        assert group_of(made["kind"], made) == ObjectGroup(owner.namespace, "TransferQueue", "shared")
        assert meta["labels"]["team"] == "a"
        assert "asyncflow.dev/follows" not in meta["labels"]
