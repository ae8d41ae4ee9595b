"""Real processes, killed and stopped by real signals."""

import asyncio
import importlib.util
import random
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from asyncflow.errors import StaleHandle
from asyncflow.net.frames import Jagged
from asyncflow.queue.audit import audit_ledger
from asyncflow.queue.messages import RowMeta, TaskSpec

pytestmark = pytest.mark.process

CHILD = Path(__file__).with_name("child.py")
_spec = importlib.util.spec_from_file_location("queue_child", CHILD)
child = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(child)

P = "train"
LEASE_S = 1.0
TASKS = [
    TaskSpec(partition=P, name="rollout", needs=["prompt"], writes=["response"], lease_s=LEASE_S),
    TaskSpec(partition=P, name="advantage", needs=["response"], writes=["advantage"], groups=True, lease_s=LEASE_S),
    TaskSpec(partition=P, name="train", needs=["advantage"], kind="gang"),
]


class Crew:
    """Processes of one queue."""

    def __init__(self, folder):
        self.folder = folder
        self.children = {}
        self.client = child.connect(folder, "test")

    async def start(self, name, *words):
        options = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
        self.children[name] = process = await asyncio.create_subprocess_exec(
            sys.executable, str(CHILD), words[0], str(self.folder), *map(str, words[1:]), **options
        )
        return process

    async def start_queue(self, *, units=1, limit=1 << 20):
        await self.start("controller", "controller")
        for index in range(units):
            await self.start_unit(index, limit=limit)
        await self.client.declare(TASKS, timeout=30)
        async with asyncio.timeout(30):
            while len(list(self.folder.glob("unit-?"))) < units:
                await asyncio.sleep(0.02)

    async def start_unit(self, index, *, limit=1 << 20):
        await self.start(f"unit-{index}", "unit", index, limit)

    async def kill(self, name, number=signal.SIGKILL):
        process = self.children.pop(name)
        if process.returncode is None:
            process.send_signal(number)
            await process.wait()
        process._transport.close()

    def stop(self, name):
        self.children[name].send_signal(signal.SIGSTOP)

    def go_on(self, name):
        self.children[name].send_signal(signal.SIGCONT)

    async def line(self, name):
        async with asyncio.timeout(30):
            return (await self.children[name].stdout.readline()).decode().split()

    async def create(self, *serials, per_step=1000, timeout=30):
        metas = [RowMeta(partition=P, serial=s, sample=j, step=1 + s // per_step) for s in serials for j in range(2)]
        prompts = {"prompt": Jagged.from_rows([range(meta.serial + 1) for meta in metas], "int64")}
        return await self.client.create(metas, prompts, group_size=2, timeout=timeout)

    async def claim(self, task, *, rows=100, timeout=30):
        return await self.client.claim(partition=P, task=task, max_rows=rows, timeout=timeout)

    async def complete(self, rows, column):
        values = Jagged.from_rows([[row.meta.serial, row.meta.sample] for row in rows], "int32")
        return await self.client.complete(rows, {column: values}, timeout=30)

    async def close(self):
        await self.client.close()
        for name in list(self.children):
            await self.kill(name)


@pytest.fixture
async def crew(tmp_path):
    crew = Crew(tmp_path)
    yield crew
    await crew.close()


async def test_rows_of_a_killed_consumer_go_to_another(crew):
    await crew.start_queue()
    await crew.start("holder", "hold", "rollout", "w1")
    await crew.create(0, 1)
    assert await crew.line("holder") == ["claimed", "4"]
    await crew.kill("holder")
    rows = await crew.claim("rollout")
    assert [row.attempt for row in rows] == [1] * 4
    assert await crew.complete(rows, "response") == [True] * 4


async def test_rows_of_a_consumer_known_to_be_dead_go_to_another_at_once(crew):
    await crew.start_queue()
    await crew.start("holder", "hold", "rollout", "w1")
    await crew.create(0, 1)
    await crew.line("holder")
    await crew.kill("holder")
    await crew.client.expire(worker="w1", timeout=30)
    assert len(await crew.claim("rollout", timeout=0)) == 4


async def test_a_stopped_consumer_is_fenced_when_it_goes_on(crew):
    await crew.start_queue()
    await crew.start("holder", "hold", "rollout", "w1")
    await crew.create(0, 1)
    await crew.line("holder")
    crew.stop("holder")
    rows = await crew.claim("rollout")
    crew.children["holder"].stdin.write(b"\n")
    crew.go_on("holder")
    assert await crew.line("holder") == ["completed", "0", "0", "0", "0"]
    assert await crew.complete(rows, "response") == [True] * 4


async def test_a_killed_producer_leaves_whole_groups_and_can_be_repeated(crew):
    await crew.start_queue(units=2)
    producer = await crew.start("producer", "produce", 200, 1000)
    for _ in range(20):
        await producer.stdout.readline()
    await crew.kill("producer")
    assert audit_ledger(crew.folder / "ledger").ok
    snapshot = await crew.client.snapshot(partition=P, timeout=30)
    assert snapshot.missing == []
    assert 20 <= snapshot.next_serial <= 200
    again = await crew.create(*range(snapshot.next_serial + 3))
    assert again == [False] * (2 * snapshot.next_serial) + [True] * 6
    assert audit_ledger(crew.folder / "ledger").ok


async def test_a_killed_unit_loses_its_bytes_and_nothing_else(crew):
    await crew.start_queue(units=2)
    await crew.create(0, 1, 2, 3)
    rows = await crew.claim("rollout")
    known = (await crew.client.wanted(partition=P, known=-1, timeout=30)).revision
    await crew.kill("unit-1")
    await crew.start_unit(1)
    wanted = await crew.client.wanted(partition=P, known=known, timeout=30)
    assert {meta.serial for meta in wanted.keys} == {1, 3}
    with pytest.raises(StaleHandle):
        await crew.client.fetch([row for row in rows if row.unit == 1], ["prompt"], timeout=30)
    assert await crew.complete(rows, "response") == [row.unit == 0 for row in rows]
    assert await crew.create(1, 3) == [True] * 4
    again = await crew.claim("rollout")
    assert sorted({row.meta.serial for row in again}) == [1, 3]
    assert await crew.complete(again, "response") == [True] * 4
    assert audit_ledger(crew.folder / "ledger").ok


async def test_a_put_to_a_stopped_unit_is_done_when_it_goes_on(crew):
    await crew.start_queue()
    crew.stop("unit-0")
    put = asyncio.create_task(crew.create(0))
    done, _ = await asyncio.wait([put], timeout=0.5)
    assert not done
    crew.go_on("unit-0")
    assert await put == [True, True]


async def test_a_killed_controller_honours_the_leases_of_the_old_one(crew):
    await crew.start_queue()
    await crew.create(0, 1)
    rows = await crew.claim("rollout", rows=2)
    parked = asyncio.create_task(crew.claim("advantage"))
    await asyncio.sleep(0.05)
    await crew.kill("controller")
    put = asyncio.create_task(crew.complete(rows, "response"))
    await asyncio.sleep(2 * LEASE_S)
    await crew.start("controller", "controller")
    assert await put == [True, True]
    assert {row.meta.serial for row in await parked} == {rows[0].meta.serial}
    assert len(await crew.claim("rollout")) == 2
    assert audit_ledger(crew.folder / "ledger").ok


async def test_a_stopped_controller_fences_nobody(crew):
    await crew.start_queue()
    await crew.create(0, 1)
    rows = await crew.claim("rollout", rows=2)
    crew.stop("controller")
    put = asyncio.create_task(crew.complete(rows, "response"))
    await asyncio.sleep(3 * LEASE_S)
    crew.go_on("controller")
    assert await put == [True, True]


async def test_two_controllers_cannot_share_a_ledger(crew):
    await crew.start_queue()
    second = await crew.start("second", "controller")
    async with asyncio.timeout(30):
        assert await second.wait() != 0
    await crew.create(0)


IDLE = """
import sys, asyncio
from pathlib import Path
async def main():
    if sys.argv[1] == "controller":
        from asyncflow.queue.controller import Controller
        server = Controller(ledger_dir=Path(sys.argv[2]))
    else:
        from asyncflow.queue.unit import StorageUnit
        server = StorageUnit(index=0, limit_bytes=1, controller="tcp://127.0.0.1:9")
    await server.start()
    status = Path("/proc/self/status").read_text()
    peak_kib = status.partition("VmHWM:")[2].split()[0]
    sys.stdout.write(f"{peak_kib} {'torch' in sys.modules}")
    await server.close()
asyncio.run(main())
"""


@pytest.mark.parametrize("role", ["controller", "unit"])
async def test_servers_are_small_and_know_no_torch(tmp_path, role):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", IDLE, role, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    size, torch = out.decode().split()
    assert int(size) < 70 * 1024
    assert torch == "False"


class CountingTrainer:
    """Weights that count samples, with checkpoints; restarts itself from the newest when rows were lost."""

    def __init__(self, crew, *, steps, rng):
        self.crew, self.steps, self.rng = crew, steps, rng
        self.attempt, self.done = -1, 0
        self.weights = {0: Counter()}
        self.checkpoint = 0

    async def run(self):
        while True:
            self.attempt += 1
            self.done = self.checkpoint
            await self.call("begin", step=self.done, world=1)
            try:
                while self.done < self.steps:
                    await self.step(self.done + 1)
            except StaleHandle:
                continue
            return

    async def step(self, step):
        sums = Counter()
        slot = 0
        while True:
            got = await self.call("slot", step=step, slot=slot, rank=0, tokens=12)
            if got is None:
                continue
            if got.rows:
                columns = await self.crew.client.fetch(got.rows, ["advantage"], timeout=30)
                sums.update(tuple(map(int, columns["advantage"].row(i))) for i in range(len(got.rows)))
            await asyncio.sleep(0.03)
            if self.rng.random() < 0.05:
                raise StaleHandle("the trainer dies")
            slot += 1
            if got.last:
                break
        self.weights[step] = self.weights[step - 1] + sums
        self.done = step
        await self.call("step_done", step=step, rank=0)
        if step % 2 == 0:
            self.checkpoint = step
            if self.rng.random() < 0.2:
                raise StaleHandle("the trainer dies between checkpoint and commit")
            await self.call("commit", step=step)

    async def call(self, name, **words):
        method = getattr(self.crew.client, name)
        return await method(partition=P, attempt=self.attempt, **words, timeout=30 if name != "slot" else 5)


async def compute_advantages(crew):
    while True:
        if rows := await crew.claim("advantage", rows=8, timeout=5):
            await crew.complete(rows, "advantage")


async def recreate(crew, serials, per_step):
    known = -1
    for serial in range(serials):
        await crew.create(serial, per_step=per_step)
    while True:
        wanted = await crew.client.wanted(partition=P, known=known, timeout=5)
        known = wanted.revision
        for serial in sorted({meta.serial for meta in wanted.keys}):
            await crew.create(serial, per_step=per_step)


async def cause_trouble(crew, rng):
    number = 0
    while True:
        await asyncio.sleep(rng.uniform(0.1, 0.4))
        victim = rng.choice(["controller", "unit-0", "unit-1", "worker", "worker", "stop worker"])
        number += 1
        if victim == "controller":
            await crew.kill(victim)
            await crew.start("controller", "controller")
        elif victim.startswith("unit"):
            await crew.kill(victim)
            await crew.start_unit(int(victim[-1]))
        elif victim == "worker":
            name = rng.choice(sorted(name for name in crew.children if name.startswith("worker")))
            await crew.kill(name)
            await crew.start(f"worker-{number}", "work", "rollout", "response", f"w{number}", 3)
        else:
            name = rng.choice(sorted(name for name in crew.children if name.startswith("worker")))
            crew.stop(name)
            await asyncio.sleep(rng.uniform(0.1, 1.5 * LEASE_S))
            crew.go_on(name)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("seed", [1, 2])
async def test_whatever_dies_each_sample_counts_once(crew, seed):
    rng = random.Random(seed)
    steps, per_step = 8, 4
    await crew.start_queue(units=2)
    for step in range(1, steps + 1):
        await crew.client.open_step(partition=P, step=step, groups=per_step, group_size=2, timeout=30)
    for number in range(2):
        await crew.start(f"worker-a{number}", "work", "rollout", "response", f"wa{number}", 3)
    trainer = CountingTrainer(crew, steps=steps, rng=random.Random(seed + 100))
    helpers = [
        asyncio.create_task(job)
        for job in (compute_advantages(crew), recreate(crew, steps * per_step, per_step), cause_trouble(crew, rng))
    ]
    running = asyncio.create_task(trainer.run())
    await asyncio.wait([running, *helpers], return_when=asyncio.FIRST_COMPLETED)
    for task in helpers:
        task.cancel()
    await asyncio.wait(helpers)
    assert [task.exception() for task in helpers if not task.cancelled()] == []
    await running
    assert trainer.weights[steps] == Counter((s, j) for s in range(steps * per_step) for j in range(2))
    if "controller" not in crew.children:
        await crew.start("controller", "controller")
    await crew.client.close_partition(partition=P, step=steps, timeout=30)
    report = audit_ledger(crew.folder / "ledger")
    assert report.ok, report
    assert (report.trained, report.unfinished, report.closed) == (steps * per_step * 2, 0, True)
