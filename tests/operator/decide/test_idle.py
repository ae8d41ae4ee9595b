"""Where nothing changes nothing is written, and where only figures change, seldom."""

from itertools import pairwise

import pytest
from model import World
from model_samples import JOB, QUEUE, SYNC, job_of, pending

from asyncflow_operator.observed import DriverProbe

HOUR = 3600


def pass_by(world: World, seconds: int, *, step: int = 10) -> int:
    """Make rounds in which nothing happens, and return the writes."""
    before = world.writes
    for _ in range(0, seconds, step):
        world.now += step
        for ref in (JOB, QUEUE, SYNC):
            world.reconcile(ref)
    return world.writes - before


@pytest.mark.parametrize("life", ["running", "silent", "suspended", "succeeded", "failed", "pending", "unpullable"])
def test_an_observation_that_does_not_change_causes_no_write_in_an_hour(life):
    world = World(job_of())
    if life in ("pending", "unpullable"):
        world.run_rounds(1)
        driver = world.with_role("driver")[0]
        waits = {"unschedulable": "0/1 nodes are available: 1 Insufficient cpu."}
        if life == "unpullable":
            waits = {"waiting": "ImagePullBackOff", "waiting_message": "Back-off pulling image"}
        world.pods[driver.name] = pending("driver", **waits)
    else:
        world.settle()
    if life == "suspended":
        world.edit(suspend=True)
    elif life == "succeeded":
        world.succeed()
    elif life == "failed":
        world.end(world.with_role("rollout")[0], code=2)
    elif life == "silent":
        world.probe = DriverProbe(error="no answer", failing_since=world.now)
    if life in ("suspended", "succeeded", "failed"):
        world.settle()
    world.see_all()
    for ref in (JOB, QUEUE, SYNC):
        world.reconcile(ref)
    pass_by(world, 30)
    writes = pass_by(world, HOUR)
    assert writes == (1 if life == "running" else 0), "only that a job which makes no step has stalled is said"
    plans = [world.decide(ref) for ref in (JOB, QUEUE, SYNC)]
    assert all(plan.again_in_s is None or plan.again_in_s >= 6 for plan in plans), "at most 10 looks a minute"


def test_a_running_job_is_written_at_most_every_fifteen_seconds():
    world = World(job_of())
    world.settle()
    world.now += 60
    times = []
    for step in range(1, 300):
        world.step = step
        world.look_at_driver()
        world.reconcile(JOB)
        if world.status.step == step:
            times.append(world.now)
        world.now += 1
    gaps = [after - before for before, after in pairwise(times)]
    assert len(times) >= 15
    assert min(gaps) >= 15
