"""An operator that is killed after any of its writes leaves nothing that the next one could not go on from."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from lives import Cluster, ClusterState, cluster
from world import quickstart

Stage = dict[str, Any]


class Step(NamedTuple):
    """A step in a job's life. what: in words; act: what somebody does; goal: what it comes to."""

    what: str
    act: Callable[[Cluster], object]
    goal: Callable[[Cluster], object]


def attempts(cluster: Cluster, role: str = "") -> dict[str, str]:
    return {
        name: pod["metadata"]["labels"]["asyncflow.dev/attempt"]
        for name, pod in cluster.server.of("pods").items()
        if role in name
    }


def status(cluster: Cluster) -> dict[str, Any]:
    return dict(cluster.server.of("rljobs").get("quickstart", {}).get("status", {}))


def phase(cluster: Cluster) -> str:
    return str(status(cluster).get("phase", ""))


def lose_trainer_and_unit(cluster: Cluster) -> None:
    cluster.end("quickstart-storage-0", 1)
    cluster.end("quickstart-trainer-0", 137)


def resume(cluster: Cluster) -> None:
    cluster.drivers.suspended.clear()
    cluster.edit("quickstart", suspend=False)


LIFE = (
    Step("begins", lambda _: None, lambda job: phase(job) == "Running"),
    Step(
        "loses a rollout",
        lambda job: job.end("quickstart-rollout-1", 1),
        lambda job: attempts(job).get("quickstart-rollout-1") == "1",
    ),
    Step(
        "loses its trainer and a unit",
        lose_trainer_and_unit,
        lambda job: attempts(job, "trainer") == {"quickstart-trainer-0": "1"},
    ),
    Step(
        "grows",
        lambda job: job.edit("quickstart", rollout={"replicas": 4}),
        lambda job: len(attempts(job, "rollout")) == 4,
    ),
    Step(
        "shrinks",
        lambda job: job.edit("quickstart", rollout={"replicas": 1}),
        lambda job: len(attempts(job, "rollout")) == 1,
    ),
    Step(
        "is suspended",
        lambda job: job.edit("quickstart", suspend=True),
        lambda job: phase(job) == "Suspended" and not attempts(job),
    ),
    Step("is resumed", resume, lambda job: phase(job) == "Running" and len(attempts(job)) == 6),
    Step(
        "succeeds",
        lambda job: job.end("quickstart-driver-0", 0),
        lambda job: phase(job) == "Succeeded" and len(attempts(job)) == 1,
    ),
    Step("is deleted", lambda _: None, lambda job: not job.server.of("rljobs")),
)
"""The life that ``test_operator_crash.py`` has a job live under an operator that is a process."""


async def taken(step: Step, cluster: Cluster) -> Stage:
    """Take a step, and return how things stand then."""
    step.act(cluster)
    await cluster.until(lambda: step.goal(cluster), f"a job that {step.what}")
    server = cluster.server
    return {
        "stage": step.what,
        "objects": {key for key in server.objects if key[0] != "events"},
        "attempts": attempts(cluster),
        "restarts": status(cluster).get("restarts", {}),
        "made": {what: times for what, times in server.made.items() if what[0] != "events"},
    }


def begin_life(cluster: Cluster) -> None:
    manifest = quickstart("team")
    manifest["spec"]["limits"] = {"ttlSecondsAfterFinished": 60}
    cluster.server.put("rljobs", manifest)


@pytest.mark.timeout(480)
async def test_killed_after_any_write_of_a_jobs_life_it_makes_the_same_objects_as_often() -> None:
    """The operator dies with the write, and so do the requests that were under way beside it.

    Each time the life goes on from where the undisturbed one was before that step, until it has been the same, to the
    last object, for one step more.
    """
    states: list[ClusterState] = []
    reference: list[Stage] = []
    async with cluster(begin_life) as undisturbed:
        for step in LIFE:
            states.append(undisturbed.state())
            reference.append(await taken(step, undisturbed))
        states.append(undisturbed.state())
    assert not reference[-1]["objects"]
    for number, (before, after) in enumerate(pairwise(states)):
        for deadly in range(1, after.writes - before.writes + 1):
            async with cluster(lambda job, before=before: job.go_on_from(before), deadly=deadly) as killed:
                for step, stage in list(zip(LIFE, reference, strict=True))[number : number + 2]:
                    assert await taken(step, killed) == stage, f"killed at write {deadly} of one that {step.what}"
                assert killed.deaths == 1, f"killed at write {deadly} of one that {LIFE[number].what}"
