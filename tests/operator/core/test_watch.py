"""Which custom resources are to be reconciled after one of them has changed."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from asyncflow.api.document import parse
from asyncflow_operator.cluster.kinds import Kind
from asyncflow_operator.references import Key
from asyncflow_operator.watch import ClusterWatch, WatchEnded

QUICKSTART = Path(__file__).parents[3] / "examples/quickstart.yaml"
FIRST, SECOND = Key("RLJob", "ns", "first"), Key("RLJob", "ns", "second")
SHARED, FLEET = Key("WeightSync", "ns", "shared"), Key("WeightSync", "ns", "fleet")
NAMES = {
    FIRST: {"weightSync": {"name": "shared"}},
    SECOND: {"weightSync": {"name": "shared"}},
    SHARED: {},
    FLEET: {"source": {"job": "first"}},
}
"""Two jobs name one WeightSync, and another one is for followers of the first."""


class World:
    """marked: what was marked since it was asked for last; listed, version: what a list answers."""

    def __init__(self) -> None:
        self._marked: set[Key] = set()
        self.version = 0
        self.listed: dict[Key, dict[str, Any]] = {}
        mark = self._marked.add
        self.watch = ClusterWatch(self, namespaces=(), mark=mark, renew=mark, resync_s=60.0)  # type: ignore[arg-type]
        for key in NAMES:
            self.put(key)

    @property
    def marked(self) -> set[Key]:
        marked = set(self._marked)
        self._marked.clear()
        return marked

    def put(self, key: Key, *, generation: int = 1, status: Any = None, **spec: Any) -> None:
        self.version += 1
        usual = parse(QUICKSTART.read_text(), source="q").data["spec"] if key.kind == "RLJob" else {}
        meta = {"name": key.name, "namespace": key.namespace, "uid": key.name, "generation": generation}
        self.listed[key] = {
            "apiVersion": "asyncflow.dev/v1alpha1",
            "kind": key.kind,
            "metadata": meta | {"resourceVersion": str(self.version)},
            "spec": usual | NAMES[key] | spec,
            "status": status or {},
        }
        self.watch.store.put(key.kind, self.listed[key])

    async def pages(self, kind: Kind, **_: Any) -> AsyncIterator[dict[str, Any]]:
        items = [raw for key, raw in self.listed.items() if key.kind == kind.name]
        yield {"metadata": {"resourceVersion": str(self.version)}, "items": items}


@pytest.fixture
def world() -> World:
    world = World()
    assert world.marked == {FIRST, SECOND, SHARED, FLEET}
    return world


def test_figures_of_a_job_concern_the_weights_that_show_them_and_no_other_job(world: World) -> None:
    world.put(FIRST, status={"step": 3})
    assert world.marked == {FIRST, SHARED, FLEET}


def test_figures_of_a_weight_sync_concern_nobody_else(world: World) -> None:
    world.put(SHARED, status={"version": 3})
    assert world.marked == {SHARED}


def test_a_phase_or_a_spec_concerns_all_that_refer_to_it(world: World) -> None:
    world.put(FIRST, status={"phase": "Succeeded"})
    assert world.marked == {FIRST, SECOND, SHARED, FLEET}
    world.put(SHARED, generation=2, keep=3)
    assert world.marked == {FIRST, SECOND, SHARED}


@pytest.mark.parametrize("kept", [True, False], ids=["an object is older", "the list is older than an object"])
async def test_a_server_that_has_gone_back_to_an_older_state_makes_the_operator_start_again(
    world: World, *, kept: bool
) -> None:
    backup, version = dict(world.listed), world.version
    resync = asyncio.create_task(world.watch.resync())
    async with asyncio.timeout(10):
        while "the first list of custom resources" in world.watch.missing():
            await asyncio.sleep(0)
        resync.cancel()
        world.put(FIRST, status={"phase": "Running"})
        if not kept:
            del backup[FIRST]
            world.version = version
        world.listed = backup
        with pytest.raises(WatchEnded):
            await world.watch.resync()
