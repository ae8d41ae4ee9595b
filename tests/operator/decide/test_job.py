"""One job: what is made in which order, what is left alone, and that nothing is done twice."""

from collections.abc import Callable
from copy import copy
from dataclasses import replace

import pytest
from model import World
from model_samples import DESIRED, JOB, QUEUE, START, job_of, names, pod_view

from asyncflow.api.status import JobStatus
from asyncflow_operator.actions import Apply, Delete, Plan
from asyncflow_operator.decide import decide_job
from asyncflow_operator.decide.replicas import OVERDUE_S
from asyncflow_operator.decide.upkeep import needs
from asyncflow_operator.observed import LEFT_BEHIND, JobState, ObjectView, Owner, Ref
from asyncflow_operator.reconcile import CachedDesired

HOUR = 3600
ALL = ["controller-0", "driver-0", "rollout-0", "rollout-1", "storage-0", "storage-1", "trainer-0"]


def owner(**changes) -> Owner:
    return replace(Owner(kind="RLJob", namespace="team", name="demo", uid="uid-job", generation=3), **changes)


def applied(plan: Plan) -> list[tuple[str, str]]:
    actions = [action for stage in plan.stages for action in stage if isinstance(action, Apply)]
    return [(action.manifest["kind"], action.manifest["metadata"]["name"]) for action in actions]


def said(plan: Plan) -> dict[str, tuple[str, str]]:
    conditions = plan.status["conditions"] if plan.status is not None else ()
    return {each["type"]: (each["status"], each["reason"]) for each in conditions}


def condition(world: World, kind: str):
    return next(each for each in world.status.conditions if each.type == kind)


def test_the_first_plan_makes_supporting_objects_then_the_driver():
    plan = decide_job(JobState(owner=owner(), job=job_of()), now=START, desired=DESIRED)
    support, made = plan.stages
    assert {action.manifest["kind"] for action in support} >= {"ConfigMap", "Secret", "Service", "NetworkPolicy"}
    kinds = [(action.manifest["kind"], action.manifest["metadata"]["name"]) for action in made]
    assert kinds == [("TransferQueue", "demo"), ("WeightSync", "demo"), ("Pod", "demo-driver-0")]
    assert plan.status["images"]["trainer"] == "registry.example/runtime-cpu:1"
    assert plan.status["phase"] == "Pending"
    assert {each["observedGeneration"] for each in plan.status["conditions"]} == {3}


def test_roles_start_when_those_before_them_are_ready():
    world = World(job_of())
    seen = []
    for _ in range(12):
        world.one_round()
        now = names(world.pods.values())
        if not seen or seen[-1] != now:
            seen.append(now)
        world.now += 1
    assert seen == [
        ["driver-0"],
        ["controller-0", "driver-0", "storage-0", "storage-1"],
        ALL,
    ]
    assert world.status.phase == "Running"
    assert (condition(world, "Ready").status, condition(world, "Ready").reason) == ("True", "Ready")


def test_a_gang_scheduler_sees_all_of_the_core_at_once():
    world = World(job_of(scheduling={"gang": "volcano"}))
    for ref in (JOB, QUEUE):
        world.reconcile(ref)
    assert names(world.pods.values()) == ALL


def test_a_pod_lost_while_a_job_runs_does_not_wait_for_others():
    world = World(job_of())
    world.settle()
    for role in ("driver", "storage", "rollout"):
        world.vanish(world.with_role(role)[0])
    world.see_all()
    for ref in (JOB, QUEUE):
        world.reconcile(ref)
    assert names(world.pods.values()) == ALL


def test_a_whole_start_takes_few_writes():
    world = World(job_of())
    world.settle()
    statuses = world.writes - len(world.pods) - len(world.objects)
    assert statuses <= 12, f"{statuses} statuses of three objects"


def processes_end(world: World) -> None:
    world.end(world.with_role("rollout")[0], code=1)
    world.run_rounds(4)
    world.end(world.with_role("storage")[1], code=137)
    world.edit(rollout={"replicas": 3})


LIFE: tuple[Callable[[World], object], ...] = (
    lambda _: None,
    processes_end,
    lambda world: world.end(world.with_role("trainer")[0], code=1),
    lambda world: world.edit(suspend=True),
    lambda world: world.edit(suspend=False),
    lambda world: world.succeed(),
)
"""What happens in a job's life, each time until it has settled."""


def lived(world: World, step: Callable[[World], object]) -> dict[str, list[str]]:
    step(world)
    world.settle()
    return {
        "pods": names(world.pods.values()),
        "restarts": [f"{role} {count}" for role, count in sorted(world.status.restarts.items())],
        "objects": sorted(f"{ref.kind}/{ref.name}" for ref in world.objects),
    }


def twin(world: World) -> World:
    """Return another world that is as this one, with an operator that has just begun."""
    other = copy(world)
    for name, value in vars(world).items():
        if not isinstance(value, CachedDesired):
            setattr(other, name, copy(value))
    other.made.update({name: list(pods) for name, pods in world.made.items()})
    other.restart_operator()
    return other


def test_after_any_death_of_the_operator_the_same_objects_are_there():
    """Each life goes on from where the undisturbed one was before that step, and to the end of the next one."""
    world = World(job_of(trainer={"replicas": 2}))
    moments, wanted = [], []
    for step in LIFE:
        moments.append(twin(world))
        wanted.append(lived(world, step))
    assert wanted[-1]["pods"] == ["driver-0"]
    writes = [*(moment.writes for moment in moments), world.writes]
    for number, moment in enumerate(moments):
        for death in range(writes[number], writes[number + 1]):
            killed = twin(moment)
            killed.deaths = frozenset([death])
            for step, there in list(zip(LIFE, wanted, strict=True))[number : number + 2]:
                assert lived(killed, step) == there, death
            assert not killed.deaths


def test_a_quota_is_waited_for_without_using_up_attempts():
    world = World(job_of(trainer={"replicas": 2}), quota=True)
    for _ in range(30):
        world.one_round()
        world.now += 10
    assert condition(world, "WhyPending").reason == "Denied"
    assert "exceeded quota" in condition(world, "WhyPending").message
    assert world.status.waiting_for == condition(world, "WhyPending").message, "which kubectl get -o wide shows"
    world.quota = False
    world.settle()
    assert (world.status.phase, world.status.waiting_for) == ("Running", "")
    assert world.status.attempt == 0


def test_a_quota_that_lets_half_a_gang_in_does_not_make_it_restart():
    world = World(job_of(trainer={"replicas": 4}))
    world.run_rounds(4)
    while len(world.with_role("trainer")) < 4:
        world.one_round()
    for pod in world.with_role("trainer")[2:]:
        world.vanish(pod)
        world.made[pod.name].clear()
    record = world.status.failures["trainer"]
    failures = world.status.failures | {"trainer": record.model_copy(update={"whole": False})}
    status = world.status.model_copy(update={"failures": failures})
    world.resources[JOB] = world.seen_resources[JOB] = replace(world.resources[JOB], status=status)
    world.quota = True
    world.run_rounds(5)
    assert world.status.attempt == 0
    world.quota = False
    world.settle()
    assert (world.status.attempt, len(world.with_role("trainer"))) == (0, 4)


def test_in_a_namespace_that_ends_nothing_is_made():
    state = JobState(owner=owner(), job=job_of(), namespace_ending=True)
    plan = decide_job(state, now=START, desired=DESIRED)
    assert plan.stages == ()
    assert said(plan)["WhyPending"] == ("True", "NamespaceTerminating")


@pytest.mark.parametrize("reason", ["Invalid", "NotYet"])
def test_a_spec_that_the_contract_refuses_is_reported_and_left_alone(reason):
    problem = "spec.trainer.external = true: not supported yet: an external trainer can join jobs of one machine only"
    pods = (pod_view("driver"), pod_view("rollout"))
    state = JobState(owner=owner(), job=None, problem=problem, problem_reason=reason, pods=pods)
    plan = decide_job(state, now=START, desired=DESIRED)
    assert plan.stages == ()
    assert said(plan) == {"Accepted": ("False", reason), "Ready": ("False", "NotAccepted")}
    assert plan.status["conditions"][0]["message"] == problem
    assert [(note.type, note.reason, note.message) for note in plan.notes] == [("Warning", reason, problem)]
    again = replace(state, status=JobStatus.model_validate(plan.status, by_name=False))
    assert decide_job(again, now=START + HOUR, desired=DESIRED) == Plan()


def test_a_job_of_another_controller_is_left_alone():
    elsewhere = JobState(owner=owner(), job=job_of(managedBy="kueue.x-k8s.io/multikueue"))
    assert decide_job(elsewhere, now=START, desired=DESIRED) == Plan()
    ours = JobState(owner=owner(), job=job_of(managedBy="asyncflow.dev/operator"))
    assert decide_job(ours, now=START, desired=DESIRED).stages != ()


def test_a_job_that_is_being_deleted_is_left_to_the_garbage_collector():
    state = JobState(owner=owner(deleting=True), job=job_of(), pods=(pod_view("rollout", deleting=True),))
    assert decide_job(state, now=START, desired=DESIRED) == Plan()


def test_images_are_pinned_when_a_job_is_created():
    pinned = JobStatus(
        images=dict.fromkeys(("driver", "controller", "storage", "trainer", "rollout"), "old/runtime-cpu:0")
    )
    plan = decide_job(JobState(owner=owner(), job=job_of(), status=pinned), now=START, desired=DESIRED)
    pod = plan.stages[1][-1].manifest
    assert pod["spec"]["containers"][0]["image"] == "old/runtime-cpu:0"
    assert set(plan.status["images"].values()) == {"old/runtime-cpu:0"}


def test_an_object_that_somebody_deleted_or_changed_is_written_again():
    world = World(job_of())
    world.settle()
    service = Ref("Service", "demo-driver")
    del world.seen_objects[service]
    config = Ref("ConfigMap", "demo")
    world.seen_objects[config] = replace(world.seen_objects[config], digest="other")
    assert sorted(applied(world.decide(JOB))) == [("ConfigMap", "demo"), ("Service", "demo-driver")]


def test_nothing_is_deleted_of_a_job_that_runs_well():
    world = World(job_of())
    world.settle()
    for seconds in (1, 100, 10_000):
        world.now += seconds
        world.look_at_driver()
        plan = world.decide(JOB)
        assert not [action for stage in plan.stages for action in stage if isinstance(action, Delete)]


def test_an_attempt_that_only_the_driver_knows_is_not_used_again():
    world = World(job_of())
    world.settle()
    world.resources[JOB] = replace(world.resources[JOB], status=JobStatus())
    world.driver_attempt = 6
    world.vanish(world.with_role("trainer")[0])
    world.look_at_driver()
    world.settle()
    assert world.status.attempt == 7
    assert world.with_role("trainer")[0].attempt == 7


def test_a_job_that_is_paused_makes_no_progress_until_it_goes_on():
    world = World(job_of())
    world.settle()
    for phase, said in (("Paused", ("False", "Stalled")), ("Running", ("True", "Running"))):
        world.driver_phase = phase
        world.look_at_driver()
        world.reconcile(JOB)
        assert (condition(world, "Progressing").status, condition(world, "Progressing").reason) == said


def test_a_pod_that_the_api_server_lost_on_the_way_is_asked_for_again_as_the_same_attempt():
    world = World(job_of())
    world.run_rounds(4)
    while not world.with_role("trainer"):
        world.one_round()
    pod = world.with_role("trainer")[0]
    world.vanish(pod)
    world.made[pod.name].clear()
    world.settle()
    assert (world.status.attempt, world.with_role("trainer")[0].attempt) == (0, 0)


def test_an_operator_that_comes_back_late_does_not_guess_whether_a_pod_has_run():
    world = World(job_of())
    world.run_rounds(4)
    while not world.with_role("trainer"):
        world.one_round()
    world.vanish(world.with_role("trainer")[0])
    world.now += 60
    world.restart_operator()
    world.settle()
    assert world.status.attempt == 1


def test_a_job_whose_newest_spec_is_refused_goes_on_and_says_so():
    world = World(job_of())
    world.settle()
    assert world.status.accepted_generation == 1
    world.refuse("spec.rollout.engine.name: not yet", "NotYet")
    world.settle()
    accepted = condition(world, "Accepted")
    assert (accepted.status, accepted.reason, accepted.observed_generation) == ("False", "NotYet", 2)
    assert accepted.message.startswith(
        "Generation 1 stays in force; of the newest spec only suspend: true and its scale are followed"
    )
    assert world.notes.count("NotYet") == 1
    for role in ("trainer", "storage", "rollout", "driver"):
        world.end(world.with_role(role)[0], code=1)
    world.settle()
    assert names(world.pods.values()) == ALL
    assert world.status.attempt == 1
    world.edit(suspend=True)
    world.settle()
    assert world.status.phase == "Suspended"
    assert condition(world, "Accepted").status == "False"
    world.edit(suspend=False)
    world.settle(healthy=lambda: world.status.phase == "Running")
    world.refuse("", "")
    world.settle()
    assert condition(world, "Accepted").status == "True"
    assert world.status.accepted_generation == world.status.observed_generation


def test_a_driver_that_is_gone_before_anybody_saw_it_end_has_a_successor_of_the_next_attempt():
    """As where a person deletes it by force, from a node on which it may still run: it is to be fenced."""
    world = World(job_of())
    world.settle()
    (driver,) = world.with_role("driver")
    assert world.record("driver").attempt == driver.attempt
    world.vanish(driver)
    world.settle()
    (successor,) = world.with_role("driver")
    assert (successor.attempt, world.record("driver").restarts) == (driver.attempt + 1, 0)


def test_a_refused_object_stops_only_pods_that_need_it():
    world = World(job_of(storage={"ledger": {"claim": {"size": "1Gi"}}}))
    world.settle()
    world.refuses = {"PersistentVolumeClaim", "PodDisruptionBudget", "Service"}
    for ref in list(world.objects):
        if ref.kind in world.refuses:
            world.meddle(ref)
    for pod in list(world.pods.values()):
        world.vanish(pod)
    world.run_rounds(40)
    assert names(world.pods.values()) == ALL
    denied = condition(world, "WhyPending")
    assert (denied.status, denied.reason) == ("True", "Denied")
    assert "(and 2 more)" in denied.message
    assert "Running pods are not affected" in denied.message
    assert world.notes.count("Denied") == 1


@pytest.mark.parametrize("kind", ["ConfigMap", "Secret", "ServiceAccount", "NetworkPolicy", "PersistentVolumeClaim"])
def test_no_pod_is_made_without_the_objects_that_it_needs(kind: str):
    world = World(job_of(storage={"ledger": {"claim": {"size": "1Gi"}}}))
    world.refuses = {kind}
    world.run_rounds(30)
    made = ["driver-0"] if kind == "PersistentVolumeClaim" else []
    assert names(pod for pod in world.pods.values() if pod.role != "storage") == made
    assert condition(world, "WhyPending").reason == "Denied"
    world.refuses.clear()
    world.settle()
    assert names(world.pods.values()) == ALL


def test_a_pod_needs_the_policies_that_are_about_it_and_no_others():
    state = JobState(owner=owner(), job=job_of())
    policies = [each for each in DESIRED.supporting(state) if each["kind"] == "NetworkPolicy"]
    absent = {Apply(manifest=each).ref: each for each in policies}
    both = {Ref("NetworkPolicy", "demo"), Ref("NetworkPolicy", "demo.rewards")}
    assert set(absent) == both | {Ref("NetworkPolicy", "demo.driver")}
    assert needs(DESIRED.pod(state, "rollout", 0, 0), absent) == both
    assert needs(DESIRED.pod(state, "trainer", 0, 0), absent) == {Ref("NetworkPolicy", "demo")}


def test_pods_of_an_earlier_job_keep_their_names_and_their_ends_are_not_those_of_the_new_one():
    world = World(job_of())
    world.settle()
    earlier = {name: replace(pod, deleting=True, attempt=LEFT_BEHIND) for name, pod in world.pods.items()}
    world = World(job_of())
    world.pods = dict(earlier)
    for _ in range(9):
        world.see_all()
        world.reconcile(JOB)
        world.reconcile(QUEUE)
    assert world.pods == earlier
    assert condition(world, "WhyPending").reason == "Terminating"
    world.seen_pods = {name: replace(pod, ends_by=world.now - OVERDUE_S) for name, pod in earlier.items()}
    deletions = [action for ref in (JOB, QUEUE) for stage in world.decide(ref).stages for action in stage]
    assert {each.ref.name: each.grace_s for each in deletions if isinstance(each, Delete)} == dict.fromkeys(earlier, 0)
    world.pods.clear()
    world.settle()
    assert names(world.pods.values()) == ALL
    assert {pod.attempt for pod in world.pods.values()} == {0}
    assert [note for note in world.notes if note.endswith("Gone")] == []


def test_pods_wait_for_objects_of_an_earlier_job_to_go():
    world = World(job_of(scheduling={"gang": "volcano"}))
    config = Ref("ConfigMap", "demo")
    world.objects[config] = ObjectView(ref=config, uid="older", deleting=True)
    world.run_rounds(60)
    assert world.pods == {}
    assert world.status.attempt == 0
    why = condition(world, "WhyPending")
    assert why.reason == "Terminating"
    assert "ConfigMap/demo is being deleted" in why.message
    del world.objects[config]
    world.settle()
    assert names(world.pods.values()) == ALL
    assert world.status.attempt == 0
