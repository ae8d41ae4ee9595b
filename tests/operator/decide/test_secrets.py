"""When Secrets are written: for the first pods, for more of them, in time, and where a pod misses one."""

import base64
from dataclasses import replace

import pytest
from model import World
from model_api import Refusal
from model_samples import DESIRED, JOB, QUEUE, START, job_of, names, pending, pod_view

from asyncflow.api.names import QUEUE_ROLES
from asyncflow.api.queue import QueueStatus, TransferQueue
from asyncflow.plan.certificates import PERIOD_S
from asyncflow_operator.actions import Apply, Plan
from asyncflow_operator.decide import decide_queue
from asyncflow_operator.decide.secrets import UNBEGUN_S, secret_upkeep
from asyncflow_operator.decide.times import Alarm
from asyncflow_operator.desired.secrets import LEAVES
from asyncflow_operator.observed import Owner, TransferQueueState

DAY = 86_400
ALWAYS = {"driver", "controller", "storage", "trainer", "rollout", "keys", "viewer", "follower"}


def writes(plan: Plan) -> dict[str, dict[str, str]]:
    """Return what is written of Secrets, by part."""
    made = [each.manifest for stage in plan.stages for each in stage if isinstance(each, Apply)]
    parts = {ref.name: part for ref, records in plan.records.items() for part in records}
    return {parts[each["metadata"]["name"]]: each["data"] for each in made if each["kind"] == "Secret"}


def indices(data: dict[str, str]) -> set[int]:
    return {int(name.removesuffix(".key")) for name in data if name.endswith(".key")}


def test_they_are_written_once_for_all_that_the_job_may_have():
    world = World(job_of(rollout={"replicas": 2, "maxReplicas": 5}, transferQueue={"storageUnits": 3}))
    written = writes(world.decide(JOB))
    assert written.keys() == ALWAYS
    assert indices(written["rollout"]) == set(range(5))
    assert indices(written["storage"]) == set(range(3))
    world.settle()
    assert world.status.secrets.keys() == ALWAYS
    assert {part: record.leaves for part, record in world.status.secrets.items()}["rollout"] == 5
    world.vanish(world.with_role("driver")[0])
    world.see_all()
    assert writes(world.decide(JOB)) == {}
    assert world.decide(QUEUE).records == {}


def test_a_restarted_operator_writes_none_again():
    world = World(job_of())
    world.settle()
    world.restart_operator()
    assert writes(world.decide(JOB)) == {}


def test_nothing_is_on_record_that_was_refused():
    world = World(job_of())
    world.refuses = {"Secret"}
    world.run_rounds(5)
    assert world.status.secrets == {}
    assert world.pods == {}
    assert writes(world.decide(JOB)).keys() == ALWAYS
    world.refuses = set()
    world.settle()
    assert world.status.secrets.keys() == ALWAYS


def test_each_secret_is_on_record_by_itself(monkeypatch: pytest.MonkeyPatch):
    world = World(job_of())
    apply = world.apply
    refused = DESIRED.secrets(world.resources[JOB].owner).name("trainer")

    def one_refused(manifest):
        if manifest["metadata"]["name"] == refused:
            raise Refusal("exceeded quota: secrets")
        apply(manifest)

    monkeypatch.setattr(world, "apply", one_refused)
    world.run_rounds(20)
    assert world.status.secrets.keys() == ALWAYS - {"trainer"}
    assert writes(world.decide(JOB)).keys() == {"trainer"}
    assert "trainer-0" not in names(world.pods.values())


def test_certificates_are_renewed_in_place_long_before_they_expire():
    world = World(job_of())
    world.settle()
    before = dict(world.status.secrets)
    plan = world.decide(JOB)
    waits = plan.again_in_s
    assert waits is not None
    assert waits <= 3 * DAY
    while not writes(world.decide(JOB)):
        world.now += DAY / 8
        assert world.now < START + 3 * DAY
    written = writes(world.decide(JOB))
    assert written.keys() == ALWAYS - {"keys"}
    world.settle()
    after = world.status.secrets
    assert {part: record.name for part, record in after.items()} == {part: r.name for part, r in before.items()}
    for part in written:
        assert after[part].period == before[part].period + 1
        assert world.now < (before[part].period + 1) * PERIOD_S + DAY + DAY / 4
    assert writes(world.decide(JOB)) == {}


def test_a_renewal_that_is_refused_keeps_no_pod_from_being_replaced():
    world = World(job_of())
    world.settle()
    world.now += 2 * DAY
    world.refuses = {"Secret"}
    world.end(world.with_role("rollout")[0], code=1)
    world.run_rounds(20)
    assert len(world.with_role("rollout")) == 2
    assert writes(world.decide(JOB))
    world.now += 2 * DAY
    world.end(world.with_role("rollout")[0], code=1)
    world.run_rounds(20)
    assert len(world.with_role("rollout")) == 1, "its certificate would expire within the period"


def test_jobs_are_not_renewed_all_at_once():
    owners = [Owner(kind="RLJob", namespace="team", name="demo", uid=f"uid-{number}") for number in range(20)]
    alarms = [Alarm(START) for _ in owners]
    for owner, alarm in zip(owners, alarms, strict=True):
        secret_upkeep(owner, (), external_roles=("viewer",), pods=(), records={}, desired=DESIRED, alarm=alarm)
    times = sorted(alarm.at or 0.0 for alarm in alarms)
    assert len(set(times)) == len(times)
    assert times[0] > START
    assert times[-1] - times[0] > DAY / 2


def test_no_decision_takes_long_however_large_the_job_is(monkeypatch: pytest.MonkeyPatch):
    """The lead is not renewed during a decision: four jobs of 10,000 rollouts ended one operator after the other."""
    world, plans = World(job_of(rollout={"replicas": 1_200, "maxReplicas": 1_200})), []
    decide = world.decide
    monkeypatch.setattr(world, "decide", lambda ref: plans.append(decide(ref)) or plans[-1])
    for _ in range(12):
        world.see_all()
        for ref in (JOB, QUEUE):
            world.reconcile(ref)
        world.kubelets_work()
    assert len(world.with_role("rollout")) == 1_200
    certificates = [
        sum(len(indices(data)) for part, data in writes(plan).items() if part.startswith("rollout")) for plan in plans
    ]
    refs = [[each.ref for stage in plan.stages for each in stage] for plan in plans]
    made = [sum(ref.kind == "Pod" and "-rollout-" in ref.name for ref in each) for each in refs]
    assert sum(certificates) == 1_200
    assert max(certificates) == 4 * LEAVES
    assert max(made) == 512


def test_an_index_above_the_most_has_its_certificate_before_its_pod_is_made():
    """Rollouts that are drained keep their numbers meanwhile, so others have higher ones."""
    world = World(job_of(rollout={"replicas": 2, "maxReplicas": 2}))
    world.settle()
    world.edit(rollout={"replicas": 5, "maxReplicas": 5})
    world.see_spec()
    plan = world.decide(JOB)
    assert indices(writes(plan)["rollout"]) == set(range(5))
    secrets = plan.records.keys()
    made = [each for each in plan.stages[1] if isinstance(each, Apply) and each.ref.kind == "Pod"]
    assert [each.ref.name for each in made] == ["demo-rollout-2", "demo-rollout-3", "demo-rollout-4"]
    assert all(each.needs == secrets for each in made)
    world.settle()
    later = pod_view("rollout", 9)
    world.pods[later.name] = world.seen_pods[later.name] = later
    assert indices(writes(world.decide(JOB))["rollout"]) == set(range(10))


def test_a_second_secret_of_a_role_begins_with_its_first_pod():
    world = World(job_of(rollout={"replicas": 2, "minReplicas": 1, "maxReplicas": 1000}))
    world.settle()
    assert {part for part in world.status.secrets if part.startswith("rollout")} == {"rollout"}
    assert world.status.secrets["rollout"].leaves == LEAVES
    pod = pod_view("rollout", LEAVES)
    world.pods[pod.name] = world.seen_pods[pod.name] = pod
    written = writes(world.decide(JOB))
    assert written.keys() == {"rollout-1"}
    assert indices(written["rollout-1"]) == set(range(LEAVES, 2 * LEAVES))


def test_hundreds_of_units_of_a_job_have_certificates_before_the_first_of_them_is_there():
    world = World(job_of(transferQueue={"storageUnits": LEAVES + 2}))
    written = writes(world.decide(JOB))
    assert indices(written["storage"]) | indices(written["storage-1"]) == set(range(LEAVES + 2))


def made_by_queue(world: World) -> list[str]:
    return [each.ref.name for stage in world.decide(QUEUE).stages for each in stage if each.ref.kind == "Pod"]


def test_units_of_a_job_wait_until_the_job_has_written_their_certificates():
    world = World(job_of())
    world.settle()
    world.edit(transferQueue={"storageUnits": 4})
    world.see_spec()
    assert made_by_queue(world) == []
    world.reconcile(JOB)
    assert made_by_queue(world) == ["demo-storage-2", "demo-storage-3"]


def test_units_of_a_job_wait_until_certificates_that_expire_are_renewed():
    world = World(job_of())
    world.settle()
    del world.pods["demo-storage-0"]
    world.now += 6 * DAY
    world.restart_operator()
    assert made_by_queue(world) == []
    world.reconcile(JOB)
    assert made_by_queue(world) == ["demo-storage-0"]


def test_a_secret_is_written_again_where_a_pod_misses_it():
    world = World(job_of())
    world.settle()
    world.now += 1000
    pod = world.with_role("rollout")[0]
    name = world.status.secrets["rollout"].name
    says = pending(
        "rollout", pod.index, scheduled=True, waiting_message=f'secret "{name}" not found', created=world.now
    )
    mounts = pending("rollout", pod.index, scheduled=True, waiting="ContainerCreating", created=world.now)
    world.pods[pod.name] = world.seen_pods[pod.name] = replace(mounts, uid=pod.uid)
    assert writes(world.decide(JOB)) == {}
    world.now += UNBEGUN_S
    assert writes(world.decide(JOB)).keys() == {"rollout"}
    world.reconcile(JOB)
    world.now += 1000
    assert writes(world.decide(JOB)) == {}, "it was written since, so the pod waits for something else"
    world.pods[pod.name] = world.seen_pods[pod.name] = replace(says, uid=pod.uid)
    assert writes(world.decide(JOB)).keys() == {"rollout"}
    world.reconcile(JOB)
    assert writes(world.decide(JOB)) == {}, "not more often than once a minute"
    world.now += 60
    assert writes(world.decide(JOB)).keys() == {"rollout"}


@pytest.mark.parametrize(("role", "missing"), [("driver", "keys"), ("driver", "driver"), ("rollout", "keys")])
def test_the_keys_are_written_again_where_one_that_mounts_them_misses_them(role: str, missing: str):
    world = World(job_of())
    world.settle()
    world.now += 1000
    pod, says = world.with_role(role)[0], f'secret "{world.status.secrets[missing].name}" not found'
    waits = pending(role, pod.index, created=world.now, scheduled=True, waiting_message=says, waiting="Other")
    world.pods[pod.name] = world.seen_pods[pod.name] = replace(waits, uid=pod.uid)
    assert writes(world.decide(JOB)).keys() == (set() if role == "rollout" else {missing})


def test_a_pod_without_a_node_misses_no_secret():
    world = World(job_of())
    world.settle()
    pod = world.with_role("rollout")[0]
    world.pods[pod.name] = world.seen_pods[pod.name] = pending("rollout", pod.index, created=world.now)
    world.now += 1000
    assert writes(world.decide(JOB)) == {}


def test_a_queue_that_stands_alone_has_its_own_and_one_for_whoever_uses_it():
    owner = Owner(kind="TransferQueue", namespace="team", name="demo", uid="uid-queue", generation=2)
    spec = {"metadata": {"name": "demo", "namespace": "team"}, "spec": {"storageUnits": 2, "backend": "mooncake"}}
    state = TransferQueueState(owner=owner, queue=TransferQueue.model_validate(spec))
    plan = decide_queue(state, now=START, desired=DESIRED)
    written = writes(plan)
    assert written.keys() == {*QUEUE_ROLES, "keys", "client"}
    assert written["client"].keys() == {"ca.crt", "tls.crt", "tls.key"}
    assert all(base64.b64decode(value).startswith(b"-----BEGIN") for value in written["client"].values())
    after = plan.recorded({*plan.records})
    assert after is not None
    known = replace(state, status=QueueStatus.model_validate(after, by_name=False))
    assert known.status.secrets["client"].name.startswith("demo-tls-client-")
    assert writes(decide_queue(known, now=START + 1, desired=DESIRED)) == {}
    assert writes(decide_queue(known, now=START + 3 * DAY, desired=DESIRED)).keys() == written.keys() - {"keys"}
