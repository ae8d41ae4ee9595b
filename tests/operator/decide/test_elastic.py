"""The built-in policy in a job: it acts alone or not at all."""

from dataclasses import replace

from model import World
from model_samples import JOB, START, job_of

from asyncflow.api.status import DriverStatus, ElasticityRecord, JobStatus, QueueDepth, RecentFigures, RolloutState
from asyncflow_operator.decide.rollouts import target
from asyncflow_operator.decide.times import Alarm, to_rfc3339
from asyncflow_operator.observed import DriverProbe, JobState, Owner

OWNER = Owner(kind="RLJob", namespace="team", name="demo", uid="uid-job")
BOUNDS = {"replicas": 2, "minReplicas": 1, "maxReplicas": 6}


THERE = ElasticityRecord(replicas=2, step=1)
"""Two rollouts have been there since the first step."""


def state(
    *,
    wait: float = 0.5,
    busy: float = 1.0,
    ready: int = 0,
    step: int = 5,
    status: JobStatus | None = None,
    at: float = START,
    **elasticity,
):
    job = job_of(rollout=BOUNDS, elasticity=elasticity)
    rollouts = tuple(RolloutState(id=f"w{index}", index=index, state="ready") for index in range(2))
    seen = DriverStatus(
        phase="Running",
        step=step,
        steps=10,
        recent=RecentFigures(since=step - 3, wait_share=wait, busy_share=busy),
        queue=QueueDepth(ready=ready),
        rollouts=rollouts,
    )
    status = status or JobStatus(elasticity=THERE)
    return JobState(owner=OWNER, job=job, status=status, probe=DriverProbe(status=seen, at=at))


def look(seen: JobState, now: float = START):
    return target(seen.job.spec, seen, Alarm(now))


def test_without_a_policy_the_spec_counts():
    found = look(state())
    assert (found.replicas, found.acts) == (2, None)


def test_a_recommendation_is_shown_and_followed_when_it_has_lasted():
    found = look(state(enabled=True))
    assert (found.replicas, found.acts, found.reason) == (2, True, "Following")
    wish = {"wish": "more", "wish_time": to_rfc3339(START)}
    assert found.fields["elasticity"] == THERE.model_copy(update=wish)
    later = state(enabled=True, status=JobStatus(**found.fields), at=START + 60)
    followed = look(later, START + 60)
    assert followed.replicas == 4
    assert followed.fields == {"desired_replicas": 4, "elasticity": ElasticityRecord(replicas=4, step=5)}


def test_the_effect_of_a_change_is_seen_before_the_next_one():
    changed = JobStatus(desired_replicas=4, elasticity=ElasticityRecord(replicas=4, step=5))
    at_once = {"enabled": True, "stabilizationSeconds": 0}
    found = look(state(status=changed, step=9, **at_once))
    begins = ElasticityRecord(replicas=4, step=9)
    assert (found.replicas, found.fields["elasticity"]) == (4, begins), "those that were added are not there yet"
    rests = {"status": JobStatus(**found.fields), "wait": 0.0, "busy": 0.5} | at_once
    assert look(state(step=11, **rests)).replicas == 4, "its figures begin before the change"
    assert look(state(step=12, **rests)).replicas == 2


def test_in_the_default_schedule_rollouts_that_have_too_little_to_do_go():
    """Nothing piles up there: no more is generated than the next step takes."""
    idle = state(enabled=True, stabilizationSeconds=0, wait=0.0, busy=0.5, ready=0)
    assert look(idle).replicas == 1


def test_the_last_recommendation_is_kept_within_bounds_without_signals():
    silent = replace(state(enabled=True, status=JobStatus(desired_replicas=9)), probe=DriverProbe())
    assert look(silent).replicas == 6
    old = state(enabled=True, status=JobStatus(desired_replicas=3), at=START - 100)
    assert look(old).replicas == 3


def test_a_dry_run_shows_and_does_nothing():
    record = ElasticityRecord(replicas=2, step=1, wish="more", wish_time=to_rfc3339(START - 60))
    found = look(state(enabled=True, dryRun=True, status=JobStatus(desired_replicas=2, elasticity=record)))
    assert (found.replicas, found.acts, found.reason) == (2, False, "DryRun")
    assert found.fields["desired_replicas"] == 4
    shown = look(state(enabled=True, dryRun=True, step=6, status=JobStatus(**found.fields)))
    assert shown.fields["desired_replicas"] == 4, "until it has decided again"


def test_a_foreign_scaler_switches_the_policy_off():
    found = look(replace(state(enabled=True), scaled_by=("kube-controller-manager",)))
    assert (found.replicas, found.acts, found.reason) == (2, False, "ForeignOwner")
    assert "kube-controller-manager" in found.message
    assert found.fields["desired_replicas"] is None


def test_the_policy_scales_a_running_job():
    world = World(job_of(rollout=BOUNDS, elasticity={"enabled": True, "stabilizationSeconds": 20}))
    world.settle()
    for _ in range(120):
        world.step += 1
        world.look_at_driver()
        recent = RecentFigures(since=max(0, world.step - 3), wait_share=0.6)
        world.probe = replace(world.probe, status=world.probe.status.model_copy(update={"recent": recent}))
        world.see_all()
        world.reconcile(JOB)
        world.kubelets_work()
        world.now += 2
    assert len(world.with_role("rollout")) == 6
    condition = next(each for each in world.status.conditions if each.type == "ElasticityActive")
    assert condition.status == "True"
    assert world.status.attempt == 0


def test_a_dry_run_starts_from_the_real_number_of_rollouts():
    content = state(enabled=True, dryRun=True, wait=0.05, status=JobStatus(desired_replicas=6, elasticity=THERE))
    assert look(content).fields["desired_replicas"] == 2
