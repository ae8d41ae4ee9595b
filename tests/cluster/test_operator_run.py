"""The operator as it is installed, one process or two, on a control plane where pods live."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scripted_driver import ScriptedDrivers
from world import OURS, World

import operator_rights
from kube.plane import ControlPlane
from operator_process import OperatorProcess

Start = Callable[..., OperatorProcess]


@pytest.fixture
def start(kwok_plane: ControlPlane, kwok_namespace: str) -> Iterator[Start]:
    """Starts operators of the test's namespace alone, with the chart's rights; all have ended afterwards."""
    operator_rights.grant(kwok_plane, kwok_namespace)
    begun: list[OperatorProcess] = []

    def begin(name: str = "", *, lead: bool = True, **options: object) -> OperatorProcess:
        own = {"namespaces": kwok_namespace, "namespace": kwok_namespace, "probe_seconds": 1} | options
        name = name or f"operator-{kwok_namespace}"
        operator = OperatorProcess(kwok_plane, name, kubeconfig=operator_rights.account(kwok_plane, name), **own)
        begun.append(operator)
        operator.start()
        if lead:
            operator.lead()
        return operator

    yield begin
    for operator in begun:
        operator.process.end()


@pytest.fixture
def world(kwok_plane: ControlPlane, kwok_namespace: str) -> World:
    return World(kwok_plane, kwok_namespace)


def test_a_job_runs_scales_heals_and_leaves_nothing_behind_but_a_log_of_every_action(
    start: Start, world: World
) -> None:
    operator = start()
    world.apply()
    world.until_whole()
    world.until(lambda: world.job()["status"]["phase"] == "Running", "the job to run")
    done = Counter(line["target"] for line in map(json.loads, operator.log.splitlines()) if line["what"] == "apply")
    secrets = world.plane.api.get(f"/api/v1/namespaces/{world.namespace}/secrets")["items"]
    made = {"Pod/quickstart-driver-0", "ConfigMap/quickstart"}
    assert made | {f"Secret/{each['metadata']['name']}" for each in secrets} <= done.keys()
    assert max(done.values()) == 1
    assert len(secrets) == 8
    trainer = world.pods("trainer")["quickstart-trainer-0"]["metadata"]["uid"]

    world.plane.kubectl("-n", world.namespace, "scale", "rlj/quickstart", "--replicas=4")
    world.until_whole(rollout=4)
    world.annotate("quickstart-rollout-1", exit="1")
    world.until(lambda: world.attempts("rollout").get("quickstart-rollout-1") == "1", "the rollout's next attempt")
    world.plane.kubectl("-n", world.namespace, "scale", "rlj/quickstart", "--replicas=1")
    world.until_whole(rollout=1)
    assert world.pods("trainer")["quickstart-trainer-0"]["metadata"]["uid"] == trainer

    world.annotate("quickstart-trainer-0", exit="137", exit_reason="OOMKilled")
    world.until(lambda: world.attempts("trainer") == {"quickstart-trainer-0": "1"}, "the trainer's next attempt")
    world.until_whole(rollout=1)

    meta = world.job()["metadata"]
    assert "finalizers" not in meta
    assert not any("kopf" in key for key in meta.get("annotations", {}))
    world.plane.kubectl("-n", world.namespace, "delete", "rlj/quickstart")
    world.until(lambda: not world.pods(), "the pods to go")
    assert operator.stop() == 0
    assert all(map(json.loads, operator.log.splitlines()))
    assert not any(value in operator.log for each in secrets for value in each["data"].values())
    assert "Traceback" not in operator.log


def test_the_units_of_a_jobs_queue_are_those_of_the_job_whoever_scales_the_queue(start: Start, world: World) -> None:
    """Scaled below and above by a person, and then by the job's own spec; a driver that is lost comes back."""
    operator = start()
    world.apply()
    world.until_whole()
    ours = f"{OURS}/namespaces/{world.namespace}"

    def units() -> int:
        return int(world.plane.api.get(f"{ours}/transferqueues/quickstart")["spec"]["storageUnits"])

    def storage() -> dict[str, str]:
        return {name: pod["metadata"]["uid"] for name, pod in world.pods("storage").items()}

    before = storage()
    for count in (1, 4):
        world.plane.kubectl("-n", world.namespace, "scale", "tq/quickstart", f"--replicas={count}")
        world.until(lambda: units() == 2, "the queue to be put back")
    world.annotate("quickstart-driver-0", exit="1")
    world.until(lambda: world.attempts("driver") == {"quickstart-driver-0": "1"}, "another driver")
    world.until(lambda: world.condition("Ready")["status"] == "True", "the job to be whole again")
    assert storage() == before
    events = world.plane.kubectl("-n", world.namespace, "describe", "rlj/quickstart")
    assert "TransferQueue/quickstart was changed and is restored, because it follows RLJob quickstart" in events
    for count in (3, 1):
        change = {"spec": {"transferQueue": {"storageUnits": count}}}
        world.plane.api.patch(f"{ours}/rljobs/quickstart", change)
        world.until_whole(storage=count)
        world.until(lambda count=count: units() == count, f"the queue to say {count}")
    assert operator.total("asyncflow_operator_reconciles_total", outcome="failed") == 0


def test_an_operator_that_loses_its_lease_ends_with_its_own_status(start: Start, world: World) -> None:
    operator = start()
    path = f"/apis/coordination.k8s.io/v1/namespaces/{world.namespace}/leases/asyncflow-operator"
    lease = world.plane.api.get(path)
    lease["spec"] |= {"holderIdentity": "somebody-else", "renewTime": "2099-01-01T00:00:00.000000Z"}
    world.plane.api.replace(path, lease)
    assert operator.wait() == 3
    assert world.plane.api.get(path)["spec"]["holderIdentity"] == "somebody-else"


@pytest.mark.timeout(300)
def test_a_running_job_that_is_edited_to_what_cannot_be_done_goes_on_as_it_was_accepted(
    start: Start, world: World, drivers: ScriptedDrivers
) -> None:
    first = start(probe_url=drivers.url)
    driver = drivers.of(world.namespace, "quickstart")
    world.apply(lambda spec: spec["reward"].update(role={}))
    world.until_whole(reward=1)
    world.until(lambda: world.condition("Ready").get("status") == "True", "the job to be ready")
    path = f"{OURS}/namespaces/{world.namespace}/rljobs/quickstart"

    def edit(**spec: Any) -> None:
        world.plane.api.patch(path, {"spec": spec})

    edit(reward={"function": None, "components": [{"name": "a", "function": "task"}], "config": {"b": 1}})
    world.until(lambda: world.condition("Accepted")["reason"] == "Invalid", "the edit to be judged")
    said = world.condition("Accepted")["message"]
    assert said.startswith(
        "Generation 1 stays in force; of the newest spec only suspend: true and its scale are followed"
    )
    assert "each component has its own config" in said
    world.annotate("quickstart-trainer-0", exit="137")
    world.until(lambda: world.attempts("trainer") == {"quickstart-trainer-0": "1"}, "the trainer's next attempt")
    world.until_whole(reward=1)

    assert first.stop() == 0
    start("another", probe_url=drivers.url)
    for pod in ("storage-1", "rollout-0"):
        world.annotate(f"quickstart-{pod}", exit="1")
    edit(rollout={"replicas": 3})
    world.until_whole(rollout=3, reward=1)
    world.until(lambda: world.attempts("storage")["quickstart-storage-1"] == "1", "the unit to come again")
    assert world.condition("Accepted")["status"] == "False"

    edit(suspend=True)
    world.until(lambda: "/v1/suspend" in driver.asked, "the driver to be told")
    driver.say(phase="Suspended")
    world.until(lambda: world.job()["status"]["phase"] == "Suspended" and not world.pods(), "the job to be suspended")
    edit(suspend=False)
    generation = world.job()["metadata"]["generation"]
    world.until(lambda: world.job()["status"]["observedGeneration"] == generation, "a look at that")
    assert world.job()["status"]["phase"] == "Suspended", "what is refused begins nothing"
    driver.say(phase="Running")
    edit(reward={"function": "task", "components": None, "config": None})
    world.until_whole(rollout=3, reward=1)
    assert world.condition("Accepted")["status"] == "True"


@pytest.mark.parametrize("wrong", [{"workers": "many"}, {"key-file": "/nowhere"}, {"kubeconfig": "/nowhere"}])
def test_a_wrong_setting_ends_it_before_it_begins(kwok_plane: ControlPlane, wrong: dict[str, str]) -> None:
    operator = OperatorProcess(kwok_plane, "wrong", **wrong)
    operator.process.start()
    assert operator.wait() == 2
    assert operator.log.startswith("Error: ")
