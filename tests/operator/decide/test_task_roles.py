"""Roles that a manifest adds, as the operator keeps them: made with the core, made again one by one under a budget."""

from dataclasses import replace

from model import World
from model_samples import job_of, names

TASK = {"name": "mark", "function": "m:f", "reads": ["reward"], "writes": [{"name": "mark"}], "replicas": 2}
ADDED = ["reference-0", "task-mark-0", "task-mark-1"]


def running() -> World:
    world = World(job_of(tasks=[TASK], reference={}, algorithm={"steps": 10, "kl": {"coefficient": 0.1}}))
    for _ in range(12):
        world.one_round()
        world.now += 1
    return world


def test_they_start_with_the_trainer_and_the_job_runs():
    world = running()
    assert [name for name in names(world.pods.values()) if name.startswith(("task", "reference"))] == ADDED
    assert world.status.phase == "Running"
    assert {"task-mark", "reference"} <= world.status.images.keys()
    secrets = {ref.name.rpartition("-")[0] for ref in world.objects if ref.kind == "Secret"}
    assert {"demo-tls-task-mark", "demo-tls-reference"} <= secrets


def test_one_that_ends_is_made_again_alone():
    world = running()
    before = {name: pod.uid for name, pod in world.pods.items()}
    name = "demo-task-mark-1"
    ended = replace(world.pods[name], phase="Failed", ready=False, exit_code=1, finished=world.now)
    world.pods[name] = ended
    for _ in range(8):
        world.see_all()
        world.one_round()
        world.now += 2
    after = {name: pod.uid for name, pod in world.pods.items()}
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} == {name}
    assert world.status.failures["task-mark"].restarts == 1
    assert "TaskFailed" in world.notes
    assert world.status.phase == "Running"
