"""A small form of the storm of kubectl in benchmarks/operator/storm.py, which has three hundred events."""

from collections.abc import Iterator

import pytest
from world import World, quickstart

import operator_rights
from driver_double import DriverDouble
from kube.plane import ControlPlane
from kubectl_storm import Storm, jobs_of
from operator_process import OperatorProcess

EVENTS = 20
SEED = 3


@pytest.fixture
def storm(kwok_plane: ControlPlane) -> Iterator[Storm]:
    name = "storm"
    world = World.new(kwok_plane, name)
    operator_rights.grant(kwok_plane, name)
    with DriverDouble() as drivers:
        own = {"namespace": name, "namespaces": name, "probe_url": drivers.url, "probe_seconds": 0.5}
        operator = OperatorProcess(kwok_plane, name, kubeconfig=operator_rights.account(kwok_plane, name), **own)
        operator.start()
        operator.lead()
        jobs = jobs_of(quickstart(name, "any"), name)
        yield Storm(kwok_plane, operator, drivers, namespace=name, jobs=jobs, queue="q", seed=SEED)
        assert "Traceback" not in operator.log
        operator.process.end()
    kwok_plane.api.delete(f"/api/v1/namespaces/{world.namespace}")


@pytest.mark.timeout(300)
def test_after_a_storm_all_is_as_the_specs_say_and_nothing_of_others_was_changed(storm: Storm) -> None:
    storm.begin()
    storm.run(EVENTS)
    storm.settle()
    assert len(storm.events) == EVENTS
    assert storm.differences() == []
