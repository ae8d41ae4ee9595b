"""Objects of the cluster that jobs refer to: read where they are asked for, and nobody waits for them."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from asyncflow_operator import lookups
from asyncflow_operator.cluster.client import Refusal
from asyncflow_operator.cluster.kinds import Kind
from asyncflow_operator.lookups import Lookups
from asyncflow_operator.observed import Ref, ReferredObject
from asyncflow_operator.references import Key

FLAVOR = Ref("ResourceFlavor", "big")
CLASS = Ref("PriorityClass", "none")
JOB = Key("RLJob", "team", "demo")


class Server:
    """Has one flavor. asked: how often for each object."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.labels = {"pool": "big"}

    async def settle(self, _: Kind) -> None:
        return

    async def get(self, kind: Kind, namespace: str, name: str) -> dict[str, Any]:
        assert namespace == ""
        self.asked[f"{kind.plural}/{name}"] += 1
        if kind.name != "ResourceFlavor":
            raise Refusal(f"{kind.plural} {name!r} not found", where="get", status=404)
        return {"metadata": {"name": name, "managedFields": ["x" * 1000]}, "spec": {"nodeLabels": dict(self.labels)}}


@asynccontextmanager
async def running(server: Server, *, keep_s: float = 60) -> AsyncIterator[tuple[Lookups, asyncio.Queue[Key]]]:
    changed: asyncio.Queue[Key] = asyncio.Queue()
    found = Lookups(server, changed=changed.put_nowait, keep_s=keep_s)  # type: ignore[arg-type]
    task = asyncio.create_task(found.run())
    try:
        yield found, changed
    finally:
        task.cancel()


async def told(changed: asyncio.Queue[Key]) -> Key:
    return await asyncio.wait_for(changed.get(), 10)


async def test_a_requested_object_is_read_and_its_jobs_are_notified() -> None:
    server = Server()
    async with running(server) as (found, changed):
        assert found.find(FLAVOR, by=JOB) is None
        assert await told(changed) == JOB
        assert found.find(FLAVOR, by=JOB) == ReferredObject(content={"spec": {"nodeLabels": {"pool": "big"}}})
        assert found.find(CLASS, by=JOB) is None
        await told(changed)
        read = found.find(CLASS, by=JOB)
        assert read is not None
        assert "'none' not found" in read.problem
        assert server.asked == {"resourceflavors/big": 1, "priorityclasses/none": 1}


async def test_every_change_is_reported_once_to_its_jobs(monkeypatch) -> None:
    monkeypatch.setattr(lookups, "FRESH_S", 0.0)
    monkeypatch.setattr(lookups, "_CHECK_S", 0.01)
    server = Server()
    async with running(server) as (found, changed):
        found.find(FLAVOR, by=JOB)
        await told(changed)
        for pool in ("other", "third"):
            await read_again(server, times=2)
            server.labels = {"pool": pool}
            assert await told(changed) == JOB
        assert found.find(FLAVOR, by=JOB) == ReferredObject(content={"spec": {"nodeLabels": {"pool": "third"}}})


async def test_an_object_that_no_job_asks_for_is_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(lookups, "FRESH_S", 0.0)
    monkeypatch.setattr(lookups, "_CHECK_S", 0.01)
    server = Server()
    async with running(server, keep_s=0.2) as (found, changed):
        found.find(FLAVOR, by=JOB)
        await told(changed)
        await read_again(server, times=2)
        read = -1
        async with asyncio.timeout(10):
            while read != server.asked.total():
                read = server.asked.total()
                await asyncio.sleep(0.1)
        assert found.find(FLAVOR, by=JOB) is None


async def read_again(server: Server, *, times: int) -> None:
    before = server.asked.total()
    async with asyncio.timeout(10):
        while server.asked.total() < before + times:
            await asyncio.sleep(0.01)
