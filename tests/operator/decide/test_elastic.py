"""The built-in policy in a job: it acts alone or not at all."""

from dataclasses import replace

import pytest
from model import World
from model_samples import JOB, START, job_of

from asyncflow.api.status import DriverStatus, JobStatus
from asyncflow_operator.decide.rollouts import target
from asyncflow_operator.decide.times import Alarm
from asyncflow_operator.observed import DriverProbe, JobState, Owner

OWNER = Owner(kind="RLJob", namespace="team", name="demo", uid="uid-job")
BOUNDS = {"replicas": 2, "minReplicas": 1, "maxReplicas": 6}


def state(
    *,
    wanted: int | None = None,
    phase: str = "Running",
    status: JobStatus | None = None,
    at: float = START,
    **elasticity,
):
    job = job_of(rollout=BOUNDS, elasticity=elasticity)
    seen = DriverStatus(phase=phase, step=5, steps=10, desired_rollouts=wanted)
    return JobState(owner=OWNER, job=job, status=status or JobStatus(), probe=DriverProbe(status=seen, at=at))


def look(seen: JobState, now: float = START):
    return target(seen.job.spec, seen, Alarm(now))


def test_without_a_policy_the_spec_counts():
    found = look(state(wanted=4))
    assert (found.replicas, found.acts) == (2, None)
    assert found.fields == {"desired_replicas": None}


def test_before_the_policy_has_decided_the_spec_counts():
    found = look(state(enabled=True))
    assert (found.replicas, found.acts, found.fields) == (2, True, {"desired_replicas": None})


@pytest.mark.parametrize(("wanted", "done"), [(4, 4), (1, 1), (0, 1), (9, 6)])
def test_what_the_driver_has_decided_is_done_within_the_bounds_and_shown(wanted, done):
    found = look(state(enabled=True, wanted=wanted))
    assert (found.replicas, found.acts, found.reason) == (done, True, "Following")
    assert found.fields == {"desired_replicas": done}


def test_bounds_that_change_count_at_once():
    seen = state(enabled=True, wanted=9)
    wider = seen.job.spec.rollout.model_copy(update={"max_replicas": 8})
    assert target(seen.job.spec.model_copy(update={"rollout": wider}), seen, Alarm(START)).replicas == 8


@pytest.mark.parametrize(
    "silent",
    [
        {"at": START - 100, "wanted": 5},
        {"phase": "Suspending", "wanted": 5},
        {"wanted": None},
    ],
)
def test_what_was_wanted_last_is_kept_while_the_driver_says_nothing(silent):
    assert look(state(enabled=True, status=JobStatus(desired_replicas=3), **silent)).replicas == 3
    nobody = replace(state(enabled=True, status=JobStatus(desired_replicas=9)), probe=DriverProbe())
    assert look(nobody).replicas == 6


def test_a_dry_run_shows_and_does_nothing():
    found = look(state(enabled=True, dryRun=True, wanted=4))
    assert (found.replicas, found.acts, found.reason) == (2, False, "DryRun")
    assert found.fields == {"desired_replicas": 4}


def test_a_foreign_scaler_switches_the_policy_off():
    found = look(replace(state(enabled=True, wanted=4), scaled_by=("kube-controller-manager",)))
    assert (found.replicas, found.acts, found.reason) == (2, False, "ForeignOwner")
    assert "kube-controller-manager" in found.message
    assert found.fields["desired_replicas"] is None


def test_the_policy_scales_a_running_job():
    world = World(job_of(rollout=BOUNDS, elasticity={"enabled": True}))
    world.settle()
    for wanted in (6, 2, 4):
        world.step += 1
        world.look_at_driver()
        says = world.probe.status.model_copy(update={"desired_rollouts": wanted})
        for _ in range(20):
            world.probe = replace(world.probe, status=says, at=world.now)
            world.see_all()
            world.reconcile(JOB)
            world.kubelets_work()
            world.now += 2
    assert len(world.with_role("rollout")) == 4
    condition = next(each for each in world.status.conditions if each.type == "ElasticityActive")
    assert condition.status == "True"
    assert world.status.attempt == 0
