"""Drivers that attack whoever asks them: a small form of benchmarks/operator/hostile.py, which has the figures."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from world import OURS, World, quickstart

import operator_rights
from hostile_drivers import HostileDrivers
from kube.plane import ControlPlane
from operator_process import OperatorProcess

NAMESPACE = "hostile"
MOST_BYTES = 150 << 20
QUICK = ("gigabyte", "refusal", "bomb", "redirect", "pipelined")
"""Those who do not keep one waiting, so that they are soon asked again."""
KINDS = (*QUICK, "endless", "drip", "interim", "liar", "shouting")
SMALL = {"rollout": {"replicas": 1, "minReplicas": 0}, "transferQueue": {"storageUnits": 1}}


pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[HostileDrivers]:
    with HostileDrivers(tmp_path / "drivers") as drivers:
        yield drivers


@pytest.fixture
def operator(kwok_plane: ControlPlane, hostile: HostileDrivers) -> Iterator[OperatorProcess]:
    world = World.new(kwok_plane, NAMESPACE)
    operator_rights.grant(kwok_plane, NAMESPACE)
    account = operator_rights.account(kwok_plane, NAMESPACE)
    own = {"namespace": NAMESPACE, "namespaces": NAMESPACE, "probe_url": hostile.url, "probe_seconds": 0.5}
    running = OperatorProcess(kwok_plane, NAMESPACE, kubeconfig=account, **own)
    running.start()
    running.lead()
    yield running
    running.process.end()
    kwok_plane.api.delete(f"/api/v1/namespaces/{world.namespace}")


def test_hostile_drivers_cost_neither_memory_nor_the_jobs_of_others(
    kwok_plane: ControlPlane, operator: OperatorProcess, hostile: HostileDrivers
) -> None:
    world, jobs = World(kwok_plane, NAMESPACE), f"{OURS}/namespaces/{NAMESPACE}/rljobs"
    for name in ("honest", *(f"{kind}-0" for kind in KINDS)):
        manifest = quickstart(NAMESPACE, name)
        for part, change in SMALL.items():
            manifest["spec"][part] |= change
        kwok_plane.api.create(jobs, manifest)

    def asked(kinds: Iterable[str], times: int) -> bool:
        seen = hostile.asked()
        return all(len(seen[f"{kind}-0"]) >= times for kind in kinds)

    world.until(lambda: asked(KINDS, 1), "all hostile drivers to be asked")
    world.until(lambda: all(status(world, f"{kind}-0").get("phase") == "Running" for kind in QUICK), "them to run")
    for kind in QUICK:
        kwok_plane.api.patch(f"{jobs}/{kind}-0", {"spec": {"suspend": True}})
    before = len(hostile.asked()["honest"])
    world.until(lambda: asked(QUICK, 3), "some of them to be asked again")
    kwok_plane.api.patch(f"{jobs}/honest/scale", {"spec": {"replicas": 3}})
    world.until(lambda: status(world, "honest").get("replicas") == 3, "the honest job to be scaled")
    world.until(lambda: len(hostile.asked()["honest"]) >= before + 10, "its driver to be asked as often as ever")
    world.until(lambda: declined(operator) >= 3, "the orders to be refused")

    assert operator.peak_bytes() < MOST_BYTES
    assert not any("gigabyte-there" in name for name in hostile.asked())
    for kind in ("liar", "bomb", "redirect", "endless"):
        assert status(world, f"{kind}-0").get("step", 0) == 0
    assert "\x1b" not in str(status(world, "shouting-0"))
    assert operator.total("asyncflow_operator_reconciles_total", outcome="failed") == 0
    assert "Traceback" not in operator.log


def status(world: World, name: str) -> dict[str, Any]:
    return dict(world.job(name).get("status", {}))


def declined(operator: OperatorProcess) -> float:
    return operator.total("asyncflow_operator_actions_total", action="ask", outcome="failed")
