"""The end of a job: suspended and resumed, succeeded, failed, too late, too old."""

from dataclasses import replace

import pytest
from model import World
from model_samples import DESIRED, JOB, QUEUE, START, dead, job_of, names, pod_view

from asyncflow.api.status import JobStatus
from asyncflow_operator.decide.job import decide_job
from asyncflow_operator.observed import Denial, DriverProbe, JobState, Owner, Ref

CLAIMS = {"ledger": {"claim": {"size": "1Gi"}}, "checkpoints": {"claim": {"size": "1Gi"}}}


def running(**spec) -> World:
    world = World(job_of(**spec))
    world.settle()
    return world


def condition(world: World, kind: str):
    return next((each for each in world.status.conditions if each.type == kind), None)


def fail_budget(world: World, role: str) -> None:
    for _ in range(3):
        world.end(world.with_role(role)[0], code=1)
        world.settle()


def test_a_suspended_job_has_saved_and_released_everything():
    world = running()
    world.edit(suspend=True)
    world.see_all()
    world.reconcile(JOB)
    assert world.status.phase == "Suspending"
    assert world.suspending
    assert len(world.pods) == 7
    world.settle()
    assert (world.status.phase, world.pods) == ("Suspended", {})
    assert condition(world, "Suspended").status == "True"
    assert condition(world, "Ready").status == "False"
    assert (world.status.start_time, world.status.replicas, world.status.ready_rollouts) == (None, 0, 0)
    assert world.status.waiting_for == ""
    assert world.notes.count("Suspended") == 1


@pytest.mark.parametrize(
    ("missing", "type_", "end", "resumes"),
    [
        ([], "Normal", "deleted", "resumes the job from the checkpoint"),
        (["checkpoints"], "Warning", "without storage.checkpoints.claim", "starts the job again"),
        (["ledger"], "Warning", "without storage.ledger.claim", "which fails while the claim has checkpoints"),
        (
            ["ledger", "checkpoints"],
            "Warning",
            "without storage.ledger.claim and storage.checkpoints.claim",
            "starts the job again",
        ),
    ],
)
def test_a_job_that_loses_its_progress_is_suspended_with_a_warning(
    missing: list[str], type_: str, end: str, resumes: str
):
    storage = {name: each for name, each in CLAIMS.items() if name not in missing}
    state = JobState(
        owner=Owner(kind="RLJob", namespace="team", name="demo", uid="u"),
        job=job_of(storage=storage, suspend=True),
        status=JobStatus(phase="Running"),
    )
    note, suspended = decide_job(state, now=START, desired=DESIRED).notes
    assert (note.reason, note.type) == ("Suspending", type_)
    assert note.message.endswith(end)
    assert suspended.reason == "Suspended"
    assert suspended.message.endswith(resumes)


@pytest.mark.parametrize(("phase", "heard"), [("Paused", True), ("Running", False)])
def test_a_job_that_is_paused_or_not_heard_yet_saves_before_it_is_suspended(phase: str, heard: bool):
    world = running()
    world.driver_phase = phase
    world.edit(suspend=True)
    world.see_all()
    world.look_at_driver()
    world.probe = world.probe if heard else DriverProbe()
    world.reconcile(JOB)
    assert world.suspending
    assert not any(pod.deleting for pod in world.pods.values())


def test_a_job_that_has_not_begun_has_nothing_to_save():
    starts = World(job_of())
    starts.run_rounds(3)
    again = running()
    again.driver_phase = "Starting"
    for world in (starts, again):
        world.edit(suspend=True)
        world.see_all()
        world.look_at_driver()
        world.reconcile(JOB)
        assert not world.suspending
        assert world.pods
        assert all(pod.deleting for pod in world.pods.values())


def test_a_resumed_job_begins_the_next_attempt():
    world = running()
    world.edit(suspend=True)
    world.settle()
    world.edit(suspend=False)
    world.settle()
    assert world.status.phase == "Running"
    assert world.status.attempt == 1
    assert {pod.attempt for pod in world.with_role("trainer") + world.with_role("rollout")} == {1}
    assert condition(world, "Suspended").status == "False"
    assert world.notes.count("Resumed") == 1
    assert world.status.failures["trainer"].restarts == 0


def test_a_driver_that_never_saves_is_not_waited_for_for_ever():
    world = running()
    world.edit(suspend=True)
    told = []
    for _ in range(25):
        world.look_at_driver()
        world.see_all()
        told += [note.message for note in world.reconcile(JOB).notes]
        world.suspending = False
        world.now += 5
    assert told[-1].endswith(": the job is suspended, and its driver's time for a checkpoint is over")
    assert (world.status.phase, condition(world, "Suspended").status) == ("Suspending", "False")
    assert all(pod.deleting for pod in world.pods.values())
    world.settle()
    assert world.status.phase == "Suspended"


def test_what_a_job_that_is_suspended_waits_for_is_said():
    world = running()
    world.edit(suspend=True)
    world.see_all()
    world.reconcile(JOB)
    assert condition(world, "Suspended").message == "Waits for the checkpoint"
    assert world.status.waiting_for == "Waits for the checkpoint"
    kept = pod_view("rollout", deleting=True, forced=True, finalizers=("example.com/hold",))
    state = JobState(
        owner=Owner(kind="RLJob", namespace="team", name="demo", uid="u"),
        job=job_of(suspend=True),
        status=JobStatus(phase="Suspending"),
        pods=(kept,),
    )
    assert suspended_because(state).startswith(
        "Waits until all pods are deleted. demo-rollout-0 is deleted, but the finalizer example.com/hold keeps its name"
    )
    deletion = Denial(Ref("Pod", "demo-rollout-0"), "no pod may be deleted", missing=False, deletes=True)
    refused = replace(state, pods=(pod_view("rollout"),), denied=(deletion,))
    assert "refused the deletion of Pod/demo-rollout-0: no pod may be deleted" in suspended_because(refused)
    assert "Running pods" not in suspended_because(refused)
    (action,) = decide_job(refused, now=START, desired=DESIRED).stages[0]
    assert action.ref == deletion.ref
    assert not decide_job(refused, now=START, desired=DESIRED).notes


def suspended_because(state: JobState) -> str:
    conditions = decide_job(state, now=START, desired=DESIRED).status["conditions"]
    (suspended,) = (each for each in conditions if each["type"] == "Suspended")
    assert suspended["reason"] == "Suspending"
    return suspended["message"]


def test_a_job_that_never_ran_is_suspended_at_once():
    world = World(job_of(suspend=True))
    world.reconcile(JOB)
    assert (world.status.phase, condition(world, "Suspended").status) == ("Suspended", "True")
    world.settle()
    assert world.status.phase == "Suspended"
    assert world.made == {}


def test_unsuspending_half_way_finishes_suspending_first():
    world = running()
    world.edit(suspend=True)
    world.see_all()
    world.reconcile(JOB)
    world.edit(suspend=False)
    world.suspending = False
    world.now += 3600
    world.see_all()
    notes = [note.message for note in world.reconcile(JOB).notes]
    assert [": the job is suspended, and its driver's time" in each for each in notes] == [True]
    world.settle()
    assert world.status.phase == "Running"
    assert world.status.attempt == 1


def test_a_job_that_somebody_else_suspended_goes_on():
    world = running()
    world.ask("/v1/suspend")
    world.settle()
    assert world.status.phase == "Running"
    assert world.status.attempt == 1


def test_a_job_whose_last_step_came_first_has_succeeded():
    world = running()
    world.edit(suspend=True)
    world.see_all()
    world.reconcile(JOB)
    world.suspending = False
    world.succeed()
    world.settle()
    assert world.status.phase == "Succeeded"


@pytest.mark.parametrize("phase", ["Suspended", "Succeeded"])
def test_the_drivers_last_word_holds_though_nobody_asked_it_in_time(phase: str):
    world = running()
    world.edit(suspend=True)
    world.reconcile(JOB)
    world.driver_phase = phase
    world._dismiss()
    world.probe = DriverProbe()
    world.settle()
    assert world.status.phase == phase


@pytest.mark.parametrize("phase", ["Suspended", "Succeeded"])
def test_the_figures_are_those_with_which_the_driver_ended(phase: str):
    world = running()
    world.step = 3
    world.look_at_driver()
    seen = world.probe
    world.edit(suspend=phase == "Suspended")
    world.see_all()
    world.reconcile(JOB)
    world.step, world.driver_phase = 10, phase
    world._dismiss()
    world.probe = seen
    world.settle()
    assert (world.status.phase, world.status.step, world.status.progress) == (phase, 10, "10/10")


def test_the_end_keeps_the_drivers_pod_and_is_final():
    world = running()
    world.step = 10
    world.succeed()
    world.settle()
    assert (world.status.phase, names(world.pods.values())) == ("Succeeded", ["driver-0"])
    assert condition(world, "Complete").status == "True"
    assert condition(world, "Failed") is None
    assert world.notes.count("Succeeded") == 1
    assert world.status.progress == "10/10"
    world.edit(rollout={"replicas": 3}, suspend=True)
    world.settle()
    assert (world.status.phase, names(world.pods.values())) == ("Succeeded", ["driver-0"])


def test_a_process_that_is_dismissed_at_the_end_is_not_made_again():
    world = running(limits={"stopSeconds": 20})
    for pod in world.with_role("rollout") + world.with_role("trainer"):
        world.end(pod, code=0)
    made = sum(map(len, world.made.values()))
    for _ in range(20 + 7 - 2):
        world.look_at_driver()
        world.see_all()
        world.reconcile(JOB)
        world.now += 1
    assert sum(map(len, world.made.values())) == made
    assert world.status.attempt == 0
    world.settle()
    assert len(world.with_role("rollout")) == 2
    assert world.status.attempt == 1


@pytest.mark.parametrize("role", ["rollout", "trainer", "driver", "controller", "storage"])
def test_a_budget_that_is_used_up_fails_the_job_and_names_the_role(role):
    world = running(failurePolicy={role: {"maxRestarts": 2, "backoffSeconds": 0}})
    fail_budget(world, role)
    assert world.status.phase == "Failed"
    said = condition(world, "Failed")
    assert said.reason == "BudgetExceeded"
    assert f"demo-{role}-0 ended with exit code 1" in said.message
    assert f"2 restarts of {role} within 1h are used up" in said.message
    assert {f"{role}-0", "driver-0"} == set(names(world.pods.values()))


@pytest.mark.parametrize("role", ["rollout", "controller"])
def test_a_process_that_refuses_its_input_fails_the_job_at_once(role):
    world = running()
    world.step = 7
    world.end(world.with_role(role)[0], code=2)
    world.settle()
    assert (world.status.phase, world.status.step) == ("Failed", 7)
    assert condition(world, "Failed").reason == "Refused"
    assert f"{role}-0" in names(world.pods.values())


def test_no_failed_pod_is_kept_unless_the_job_asks_for_it():
    world = running(limits={"keepOnFailure": False})
    world.end(world.with_role("trainer")[0], code=2)
    world.settle()
    assert (world.status.phase, world.pods) == ("Failed", {})


def test_a_deadline_counts_from_the_start_and_not_while_suspended():
    world = running(limits={"activeDeadlineSeconds": 600})
    world.edit(suspend=True)
    world.settle()
    world.now += 10_000
    world.edit(suspend=False)
    world.settle(rounds=30)
    assert world.status.phase == "Running"
    world.vanish(world.with_role("driver")[0])
    world.now += 601
    world.settle()
    assert (world.status.phase, condition(world, "Failed").reason) == ("Failed", "DeadlineExceeded")


def test_a_finished_job_is_deleted_when_its_time_is_over():
    world = running(limits={"ttlSecondsAfterFinished": 300})
    world.succeed()
    world.run_rounds(3)
    assert world.status.phase == "Succeeded"
    assert world.decide(JOB).again_in_s == pytest.approx(300, abs=5)
    world.now += 301
    world.see_all()
    world.reconcile(JOB)
    assert world.resources == {}


def test_a_queue_whose_job_has_ended_makes_nothing():
    world = running()
    world.succeed()
    world.settle()
    ready = next(each for each in world.resources[QUEUE].status.conditions if each.type == "Ready")
    assert (ready.status, ready.reason) == ("False", "Succeeded")


def test_no_end_is_a_failure_while_a_job_is_suspended():
    world = running()
    world.edit(suspend=True)
    world.see_all()
    world.reconcile(JOB)
    for pod in list(world.pods.values()):
        if pod.role != "driver":
            world.pods[pod.name] = dead(pod.role, pod.index)
    world.settle()
    assert world.status.phase == "Suspended"
    assert world.status.restarts == {}


def test_a_job_is_suspended_and_ends_though_a_node_does_not_answer():
    world = running()
    world.lose_node_of(world.with_role("storage")[0])
    world.edit(suspend=True)
    world.settle()
    assert (world.status.phase, world.pods) == ("Suspended", {})


def test_a_pod_of_a_finished_job_that_a_sidecar_keeps_alive_is_deleted():
    world = running()
    world.succeed()
    driver = world.with_role("driver")[0]
    world.pods[driver.name] = replace(driver, leftover=True)
    world.settle()
    assert world.status.phase == "Succeeded"
    assert world.with_role("driver") == []
