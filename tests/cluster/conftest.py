"""A real control plane for the tests of this folder: begun when the first asks for it, ended after the last."""

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import operator_rights
from kube import foreign
from kube.plane import ControlPlane
from operator_process import OperatorProcess

sys.path.insert(0, str(Path(__file__).parent))

from scripted_driver import ScriptedDrivers
from world import DECISIONS

ROOT = Path(__file__).parents[2]
NODES = 20
SHARED = ("jobs", "jobs-quota", "jobs-doomed")
"""Namespaces of the operator that many tests share."""

LAST = "test_operator_privilege.py"
"""What all others did is judged after them."""

_serial = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name == LAST)


@pytest.fixture(scope="package")
def plane() -> Iterator[ControlPlane]:
    """etcd and API server with our definitions: no controllers, so nothing is collected and pods never run."""
    with ControlPlane(audited=True) as running:
        running.install_crds(ROOT / "crds")
        yield running


@pytest.fixture(scope="package")
def kwok_plane() -> Iterator[ControlPlane]:
    """With controllers, scheduler and 20 fake nodes of 16 NPUs, where pods run."""
    with ControlPlane(with_=("kcm", "sched", "kwok"), audited=True) as running:
        running.install_crds(ROOT / "crds")
        running.add_nodes(NODES)
        yield running


@pytest.fixture(scope="package")
def drivers() -> Iterator[ScriptedDrivers]:
    """All drivers of the shared operator's jobs."""
    with ScriptedDrivers() as serving:
        yield serving


@pytest.fixture(scope="package")
def shared_operator(kwok_plane: ControlPlane, drivers: ScriptedDrivers) -> Iterator[OperatorProcess]:
    """One operator of the namespaces ``SHARED``, in a cluster that knows Volcano and Kueue."""
    foreign.install(kwok_plane)
    for name in SHARED:
        kwok_plane.api.create("/api/v1/namespaces", {"metadata": {"name": name}})
    operator_rights.grant(kwok_plane, SHARED[0])
    operator = OperatorProcess(
        kwok_plane,
        "shared",
        kubeconfig=operator_rights.account(kwok_plane, "shared"),
        namespace=SHARED[0],
        namespaces=",".join(SHARED),
        probe_url=drivers.url,
        probe_seconds=0.3,
        connections=128,
        decisions=kwok_plane.folder / DECISIONS,
    )
    operator.start()
    operator.lead()
    kwok_plane.rely_on(operator.process)
    yield operator
    operator.process.end()


@pytest.fixture
def kubectl(plane: ControlPlane) -> Callable[..., str]:
    return plane.kubectl


@pytest.fixture
def namespace(plane: ControlPlane) -> str:
    return fresh_namespace(plane)


@pytest.fixture
def kwok_namespace(kwok_plane: ControlPlane) -> Iterator[str]:
    name = fresh_namespace(kwok_plane)
    yield name
    kwok_plane.api.delete(f"/api/v1/namespaces/{name}")


def fresh_namespace(plane: ControlPlane) -> str:
    """A name that was never used on this plane: without controllers a namespace that is deleted stays."""
    name = f"test-{next(_serial)}"
    plane.api.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    return name
