"""Kueue and Volcano: pods come with the place, and the place goes with the pods."""

from dataclasses import replace

from model import World
from model_samples import JOB, QUEUE, job_of, names

from asyncflow_operator.observed import Ref

WORKLOAD = Ref("Workload", "demo")
KUEUE = {"scheduling": {"gang": "kueue", "queue": "research"}}


def say(world: World, phase: str, said: str = "") -> None:
    """Let Kueue write the Workload's status."""
    world.objects[WORKLOAD] = world.seen_objects[WORKLOAD] = replace(world.objects[WORKLOAD], phase=phase, said=said)


def admitted() -> World:
    world = World(job_of(**KUEUE))
    world.reconcile(JOB)
    say(world, "Admitted")
    world.settle()
    return world


def test_without_a_place_no_pod_is_made_and_it_is_said_why():
    world = World(job_of(**KUEUE))
    world.reconcile(JOB)
    say(world, "", "couldn't assign flavors to pod set trainer: insufficient quota")
    world.settle()
    assert world.pods == {}
    why = next(each for each in world.status.conditions if each.type == "WhyPending")
    assert why.reason == "Gang"
    assert "insufficient quota" in why.message
    assert WORKLOAD in world.objects


def test_with_its_place_all_of_the_core_is_made_at_once():
    world = World(job_of(**KUEUE))
    world.reconcile(JOB)
    say(world, "Admitted")
    for ref in (JOB, QUEUE):
        world.reconcile(ref)
    wanted = ["controller-0", "driver-0", "rollout-0", "rollout-1", "storage-0", "storage-1", "trainer-0"]
    assert names(world.pods.values()) == wanted


def test_who_is_evicted_saves_gives_its_place_back_and_asks_again():
    world = admitted()
    say(world, "Evicted")
    world.reconcile(JOB)
    assert world.status.phase == "Suspending"
    assert world.suspending
    first = world.objects[WORKLOAD].uid
    world.settle()
    assert world.status.phase == "Pending"
    assert world.pods == {}
    assert world.objects[WORKLOAD].uid != first
    say(world, "Admitted")
    world.settle()
    assert world.status.phase == "Running"
    assert world.status.attempt == 1


def test_a_job_that_ends_or_is_suspended_gives_its_place_back():
    for end in (lambda world: world.succeed(), lambda world: world.edit(suspend=True)):
        world = admitted()
        end(world)
        world.settle()
        assert WORKLOAD not in world.objects


def test_a_rollout_of_the_core_leaves_last():
    rollout = {"replicas": 4, "minReplicas": 2, "maxReplicas": 4}
    world = World(job_of(scheduling={"gang": "volcano"}, rollout=rollout))
    world.settle()
    world.edit(rollout={"replicas": 2})
    world.settle()
    assert [pod.index for pod in world.with_role("rollout")] == [0, 1]
