"""Real processes, killed and stopped by real signals, one at a time."""

import asyncio
import sys

import pytest

from asyncflow.errors import StaleHandle
from asyncflow.identity import unit_of
from asyncflow.queue.ledger.audit import audit_ledger
from asyncflow.queue.protocol.messages import TaskSpec
from asyncflow.rpc.columns import Jagged

pytestmark = pytest.mark.process

P = "train"
SPARE_S = 30.0
"""What a busy machine may take, beyond what has to pass, until a fault is got over."""

on_every_backend = pytest.mark.usefixtures("backend")


def within(seconds=0.0):
    """Bound the time to an outcome. seconds: what has to pass before it, such as a lease."""
    return asyncio.timeout(seconds + SPARE_S)


@pytest.fixture(params=["memory", "mooncake", "redis"])
def backend(request, processes, stores):
    """Where the units keep their bytes."""
    role = {"memory": "", "mooncake": "master", "redis": "holder"}[request.param]
    processes.store = [request.param, stores(request.param).address(role, 0) or ""]


async def test_rows_of_a_killed_consumer_go_to_another(processes):
    await processes.start_queue(lease_s=1)
    await processes.start("holder", "hold", "rollout", "w1")
    await processes.create(0, 1)
    assert await processes.line("holder") == ["claimed", "4"]
    await processes.declare(lease_s=60)
    await processes.kill("holder")
    async with within(1):
        rows = await processes.claim("rollout")
    assert [row.attempt for row in rows] == [1] * 4
    assert await processes.complete(rows, "response") == [True] * 4


async def test_rows_of_a_consumer_known_to_be_dead_go_to_another_at_once(processes):
    await processes.start_queue(lease_s=60)
    await processes.start("holder", "hold", "rollout", "w1")
    await processes.create(0, 1)
    await processes.line("holder")
    await processes.kill("holder")
    async with within():
        await processes.client.expire(worker="w1", timeout=30)
        assert len(await processes.claim("rollout", timeout=0)) == 4


async def test_a_stopped_consumer_is_fenced_when_it_goes_on(processes):
    await processes.start_queue(lease_s=1)
    await processes.start("holder", "hold", "rollout", "w1")
    await processes.create(0, 1)
    await processes.line("holder")
    await processes.declare(lease_s=60)
    processes.stop("holder")
    async with within(1):
        rows = await processes.claim("rollout")
    assert await processes.complete(rows, "response") == [True] * 4
    processes.children["holder"].stdin.write(b"\n")
    processes.go_on("holder")
    async with within():
        assert await processes.line("holder") == ["completed", "0", "0", "0", "0"]


@on_every_backend
async def test_a_killed_producer_leaves_whole_groups_and_can_be_repeated(processes):
    await processes.start_queue(lease_s=60, units=2)
    producer = await processes.start("producer", "produce", 200, 1000)
    for _ in range(20):
        await producer.stdout.readline()
    await processes.kill("producer")
    assert audit_ledger(processes.folder / "ledger").ok
    async with within():
        snapshot = await processes.client.snapshot(partition=P, timeout=30)
        again = await processes.create(*range(snapshot.next_serial + 3))
    assert snapshot.missing == []
    assert 20 <= snapshot.next_serial <= 200
    under_way = again[2 * snapshot.next_serial]
    assert again == [False] * (2 * snapshot.next_serial) + [under_way] * 2 + [True] * 4
    assert audit_ledger(processes.folder / "ledger").ok


@pytest.mark.parametrize(
    ("backend", "kill_unit"),
    [("memory", False), ("memory", True), ("mooncake", True), ("redis", True)],
    indirect=["backend"],
)
async def test_a_producer_killed_before_its_rows_are_admitted_leaves_them_whole_or_not_at_all(
    processes, backend, kill_unit
):
    await processes.start_queue(lease_s=60, units=0)
    await processes.start_unit(0, role="unit-aloud")
    assert await processes.line("unit-0") == ["holds", "0"]
    processes.stop("controller")
    await processes.start("producer", "produce", 1, 1000)
    assert await processes.line("unit-0") == ["holds", "16"]
    await processes.kill("producer")
    if kill_unit:
        await processes.kill("unit-0")
        await processes.start_unit(0)
    processes.go_on("controller")
    async with within():
        assert await processes.create(0) == [kill_unit] * 2
        assert len(await processes.claim("rollout")) == 2
    report = audit_ledger(processes.folder / "ledger")
    assert report.ok
    assert report.dispatched == 2


@on_every_backend
async def test_a_killed_unit_loses_its_bytes_and_nothing_else(processes):
    await processes.start_queue(lease_s=60, units=2)
    await processes.create(0, 1, 2, 3)
    rows = await processes.claim("rollout")
    known = (await processes.client.wanted(partition=P, known=-1, timeout=30)).revision
    await processes.kill("unit-1")
    await processes.start_unit(1)
    async with within():
        wanted = await processes.client.wanted(partition=P, known=known, timeout=30)
    assert {meta.serial for meta in wanted.keys} == {1, 3}
    with pytest.raises(StaleHandle):
        await processes.client.fetch([row for row in rows if row.unit == 1], ["prompt"], timeout=30)
    async with within():
        assert await processes.complete(rows, "response") == [row.unit == 0 for row in rows]
        assert await processes.create(1, 3) == [True] * 4
        again = await processes.claim("rollout")
    assert sorted({row.meta.serial for row in again}) == [1, 3]
    assert await processes.complete(again, "response") == [True] * 4
    assert audit_ledger(processes.folder / "ledger").ok


@on_every_backend
async def test_a_put_to_a_stopped_unit_is_done_when_it_goes_on(processes):
    await processes.start_queue(lease_s=60)
    processes.stop("unit-0")
    put = asyncio.create_task(processes.create(0))
    done, _ = await asyncio.wait([put], timeout=0.5)
    assert not done
    processes.go_on("unit-0")
    async with within():
        assert await put == [True, True]


async def test_rows_of_a_stopped_unit_go_to_another(processes):
    await processes.start_queue(lease_s=60, units=2)
    processes.stop("unit-0")
    columns = {"x": Jagged.from_rows([[row] for row in range(4)], "int64")}
    new, *puts = await asyncio.gather(
        processes.create(0, 1, timeout=12), *(processes.client.put("open", columns, timeout=12) for _ in range(2))
    )
    assert new == [True] * 4
    processes.go_on("unit-0")
    rows = [row for put in puts for row in put.rows]
    assert {unit_of(row) for row in rows} == {1}
    assert len(set(rows)) == 8
    assert len(await processes.claim("rollout")) == 4


async def test_a_killed_controller_honours_the_leases_of_the_old_one(processes):
    await processes.start_queue(lease_s=2)
    await processes.create(0, 1)
    rows = await processes.claim("rollout", rows=2)
    parked = asyncio.create_task(processes.claim("advantage"))
    await asyncio.sleep(0.05)
    await processes.kill("controller")
    put = asyncio.create_task(processes.complete(rows, "response"))
    await asyncio.sleep(2.5)
    await processes.start("controller", "controller")
    async with within(2):
        assert await put == [True, True]
        assert {row.meta.serial for row in await parked} == {rows[0].meta.serial}
        assert len(await processes.claim("rollout")) == 2
    assert audit_ledger(processes.folder / "ledger").ok


async def test_a_stopped_controller_fences_nobody(processes):
    await processes.start_queue(lease_s=2)
    await processes.create(0, 1)
    rows = await processes.claim("rollout", rows=2)
    processes.stop("controller")
    put = asyncio.create_task(processes.complete(rows, "response"))
    await asyncio.sleep(3)
    processes.go_on("controller")
    async with within():
        assert await put == [True, True]


async def test_claims_of_other_tasks_go_on_while_one_of_three_controllers_is_stopped(processes):
    places = {"first": 1, "second": 2, "third": 0}
    await processes.start_queue(lease_s=60, controllers=3)
    await processes.client.declare([TaskSpec(partition="open", name=task, needs=["x"]) for task in places], timeout=30)
    await processes.client.put("open", {"x": Jagged.from_rows([[row] for row in range(100)], "int64")}, timeout=30)

    async def claim(task, *, within_s=30):
        async with asyncio.timeout(within_s):
            claimed = await processes.client.claim(partition="open", task=task, max_rows=1, timeout=30)
            assert len(claimed.rows) == 1

    for task in places:
        await claim(task)
    for victim, name in enumerate(["controller", "controller-1", "controller-2"]):
        processes.stop(name)
        for task, place in places.items():
            if place == victim:
                with pytest.raises(TimeoutError):
                    await claim(task, within_s=0.3)
            else:
                for _ in range(5):
                    await claim(task)
        processes.go_on(name)
        async with within():
            for task in places:
                await claim(task)


async def test_two_controllers_cannot_share_a_ledger(processes):
    await processes.start_queue(lease_s=60)
    second = await processes.start("second", "controller")
    async with within():
        assert await second.wait() != 0
    await processes.create(0)


IDLE = """
import sys, asyncio
from pathlib import Path
async def main():
    if sys.argv[1] == "controller":
        from asyncflow.queue.controller.controller import Controller
        server = Controller(ledger_dir=Path(sys.argv[2]))
    else:
        from asyncflow.queue.storage.unit import StorageUnit
        server = StorageUnit(index=0, limit_bytes=1, controller="tcp://127.0.0.1:9")
    await server.start()
    status = Path("/proc/self/status").read_text()
    peak_kib = status.partition("VmHWM:")[2].split()[0]
    sys.stdout.write(f"{peak_kib} {sorted({'torch', 'pydantic'} & sys.modules.keys())}")
    await server.close()
asyncio.run(main())
"""


@pytest.mark.parametrize("role", ["controller", "unit"])
async def test_servers_are_small_and_know_neither_torch_nor_manifests(tmp_path, role):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", IDLE, role, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    size, heavy = out.decode().split()
    assert int(size) < 70 * 1024
    assert heavy == "[]"
