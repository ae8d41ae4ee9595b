"""Whatever happens to rollouts, nobody else notices; the figures are those of benchmarks/operator/kills.py."""

from typing import Any

import pytest
from one_job import OneJob
from scripted_driver import ScriptedDrivers

from kube.plane import ControlPlane
from operator_process import OperatorProcess
from rollout_storm import Storm

MOST = 6
EVENTS = 12
BUDGET = {"maxRestarts": 1000, "backoffSeconds": 0}


def said(status: dict[str, Any]) -> tuple[int, list[Any]]:
    """Return how many rollouts there are, and those that leave: a status write follows what it is about."""
    return status["replicas"], status["draining"]


@pytest.mark.parametrize("seed", [1, 2])
def test_kills_and_scalings_of_rollouts_restart_nobody_else(
    kwok_plane: ControlPlane, shared_operator: OperatorProcess, drivers: ScriptedDrivers, seed: int
) -> None:
    name = f"stormy-{seed}"
    spec = {"rollout": {"maxReplicas": MOST}, "failurePolicy": {"rollout": BUDGET}}
    job = OneJob(kwok_plane, "jobs", name, drivers.of("jobs", name), **spec).create()
    job.until_phase("Running")
    storm = Storm(kwok_plane, "jobs", name, seed=seed, most=MOST)
    storm.settle()
    before = storm.others()
    storm.run(EVENTS)
    assert storm.others() == before, storm.events
    status = job.status()
    assert status["attempt"] == 0
    assert set(status.get("restarts", {})) <= {"rollout"}
    wanted = job.job()["spec"]["rollout"]["replicas"]
    job.until(lambda: said(job.status()) == (wanted, []), "the status to say what is there")
    job.delete()
