"""Jobs of which nothing new is seen cost no write, and jobs that only make progress cost few."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from scripted_driver import ScriptedDrivers
from world import OURS, World, quickstart

import operator_rights
from asyncflow_operator.decide.draft import FIGURES_S
from kube.audit import Request
from kube.plane import ControlPlane
from operator_process import OperatorProcess

STEADY = ("steady-0", "steady-1", "steady-2")
SILENT = "silent"
STEPPING = ("stepping-0", "stepping-1")
LOOKS = 2
ON_ITS_WAY_S = 5.0
"""By which a write may arrive later than the next one, after they were decided."""


@pytest.fixture
def operator(kwok_plane: ControlPlane, drivers: ScriptedDrivers) -> Iterator[OperatorProcess]:
    world = World.new(kwok_plane, "idle")
    operator_rights.grant(kwok_plane, "idle")
    running = OperatorProcess(
        kwok_plane,
        "idle",
        kubeconfig=operator_rights.account(kwok_plane, "idle"),
        namespace="idle",
        namespaces="idle",
        probe_url=drivers.url,
        probe_seconds=0.5,
        resync_seconds=10,
    )
    running.start()
    running.lead()
    yield running
    running.process.end()
    world.plane.api.delete("/api/v1/namespaces/idle")


def test_steady_jobs_cost_no_write_and_stepping_ones_one_in_fifteen_seconds(
    kwok_plane: ControlPlane, operator: OperatorProcess, drivers: ScriptedDrivers
) -> None:
    """The stepping ones step until that is told; meanwhile the operator looks at everything, changed or not. Of one job
    the driver does not answer; it has no rollouts, whose number would be a figure of it.
    """
    world, heard, steps = World(kwok_plane, "idle"), STEADY + STEPPING, itertools.count(1)
    drivers.of("idle", SILENT).silent = True
    jobs = (*heard, SILENT)
    for name in jobs:
        manifest = quickstart("idle", name)
        manifest["spec"]["rollout"] |= {"replicas": 0, "minReplicas": 0} if name == SILENT else {}
        kwok_plane.api.create(f"{OURS}/namespaces/idle/rljobs", manifest)
    world.until(
        lambda: all(world.job(name).get("status", {}).get("phase") == "Running" for name in jobs), "the jobs to run"
    )
    world.until(lambda: all("step" in world.job(name)["status"] for name in heard), "the drivers to be heard")
    world.until(lambda: why(world.job(SILENT), "Stalled") == "DriverSilent", "one not to be heard")
    world.until(lambda: why(world.job(SILENT), "Ready") == "Ready", "that one to be ready")
    looked, told = censuses(operator), len(writes(kwok_plane))
    seen = {name: world.job(name)["status"]["step"] for name in STEPPING}

    def step() -> bool:
        for name in STEPPING:
            drivers.of("idle", name).say(step=next(steps))
        told_more = all(world.job(name)["status"]["step"] > seen[name] for name in STEPPING)
        return told_more and censuses(operator) >= looked + LOOKS

    world.until(step, "more steps, and looks at everything")
    every = writes(kwok_plane)
    latest = {(each.resource, each.name): each.at for each in every[:told]}
    for each in every[told:]:
        assert (each.subresource, each.name in STEPPING) == ("status", True), each
        assert (each.at - latest[each.resource, each.name]).total_seconds() >= FIGURES_S - ON_ITS_WAY_S
        latest[each.resource, each.name] = each.at


def why(job: dict[str, Any], kind: str) -> str:
    """Return the reason of a condition."""
    return next((each["reason"] for each in job["status"].get("conditions", ()) if each["type"] == kind), "")


def censuses(operator: OperatorProcess) -> float:
    return operator.total("asyncflow_operator_api_requests_total", verb="list", resource="rljobs")


def writes(plane: ControlPlane) -> list[Request]:
    """Return what the operator has written, its Lease and events for people aside."""
    return [
        each
        for each in operator_rights.of(plane, "idle")
        if each.is_write and each.resource not in ("leases", "events")
    ]
