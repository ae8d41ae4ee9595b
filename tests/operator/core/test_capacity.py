"""Free capacity of nodes, counted object by object."""

import asyncio
import weakref
from collections.abc import AsyncIterator

import pytest

from asyncflow_operator.cluster.kinds import NODE, Kind
from asyncflow_operator.lookups import Capacity, allocatable, amount, is_open, needs, take


@pytest.mark.parametrize(
    ("written", "meant"), [("500m", 0.5), ("16", 16.0), ("1536Gi", 1536 * 2.0**30), ("2k", 2000.0), ("what", 0.0)]
)
def test_quantities(written: str, meant: float) -> None:
    assert amount(written) == meant


def container(cpu: str, **more: str) -> dict[str, object]:
    return {"resources": {"requests": {"cpu": cpu}}, **more}


def test_a_pod_needs_its_containers_together_or_its_largest_init_container() -> None:
    spec = {"containers": [container("1"), container("500m")], "initContainers": [container("4")]}
    assert needs(spec) == {"cpu": 4.0, "pods": 1.0}
    spec["initContainers"] = [container("1"), container("250m", restartPolicy="Always")]
    assert needs(spec) == {"cpu": 1.75, "pods": 1.0}
    assert needs(spec | {"overhead": {"cpu": "250m"}})["cpu"] == 2.0


def node(name: str, *, ready: str = "True", **spec: object) -> dict[str, object]:
    allocatable = {"cpu": "8", "npu": "16"}
    status = {"conditions": [{"type": "Ready", "status": ready}], "allocatable": allocatable}
    return {"metadata": {"name": name}, "spec": spec, "status": status}


def test_free_capacity_is_counted_of_nodes_that_take_pods() -> None:
    nodes = [node("a"), node("cordoned", unschedulable=True), node("lost", ready="Unknown"), {"metadata": {}}]
    assert [is_open(each) for each in nodes] == [True, False, False, False]
    left = {"a": allocatable(nodes[0])}
    assert left == {"a": {"cpu": 8.0, "npu": 16.0}}
    for where in ("a", "elsewhere", ""):
        take(left, {"nodeName": where, "containers": [container("500m")]})
    take(left, {"containers": [container("4")]})
    assert left == {"a": {"cpu": 7.5, "npu": 16.0}}


class Pages:
    """An API server with many large nodes; most: of them that were in memory at a time."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.most = 0

    async def pages(self, kind: Kind, *, size: int = 500, **_: object) -> AsyncIterator[dict[str, object]]:
        made: weakref.WeakSet[Large] = weakref.WeakSet()
        for first in range(0, self.count if kind is NODE else 0, size):
            items = [Large(node(f"node-{number}")) for number in range(first, min(first + size, self.count))]
            made.update(items)
            yield {"items": items}
            del items
            self.most = max(self.most, len(made))


class Large(dict[str, object]):
    """A node of which one can tell whether anybody has it still."""

    __hash__ = object.__hash__  # type: ignore[assignment]


async def test_of_many_nodes_few_are_in_memory_at_a_time() -> None:
    server = Pages(2000)
    told = asyncio.Event()
    capacity = Capacity(server, wanted=lambda: True, changed=told.set)  # type: ignore[arg-type]
    looking = asyncio.create_task(capacity.run())
    await asyncio.wait_for(told.wait(), 20)
    looking.cancel()
    assert capacity.nodes is not None
    assert len(capacity.nodes) == 2000
    assert server.most <= 300
