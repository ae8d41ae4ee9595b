"""Processes of one queue, which tests kill and stop."""

import asyncio
import importlib.util
import signal
import sys
from itertools import groupby
from pathlib import Path

import pytest

from asyncflow.queue.protocol.messages import Samples, TaskSpec
from asyncflow.rpc.columns import Jagged

CHILD = Path(__file__).with_name("child.py")
_spec = importlib.util.spec_from_file_location("queue_child", CHILD)
child = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(child)

P = "train"


def tasks(lease_s):
    return [
        TaskSpec(partition=P, name="rollout", needs=["prompt"], writes=["response"], lease_s=lease_s),
        TaskSpec(partition=P, name="advantage", needs=["response"], writes=["advantage"], groups=True, lease_s=lease_s),
        TaskSpec(partition=P, name="train", needs=["advantage"], kind="gang"),
    ]


class QueueProcesses:
    """Processes of one queue. store: name of the units' backend, and its address."""

    def __init__(self, folder):
        self.folder = folder
        self.store = []
        self.children = {}
        self.client = child.connect(folder, "test")

    async def start(self, name, *words):
        options = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
        self.children[name] = process = await asyncio.create_subprocess_exec(
            sys.executable, str(CHILD), words[0], str(self.folder), *map(str, words[1:]), **options
        )
        return process

    async def start_queue(self, *, lease_s, units=1, limit=1 << 20, controllers=1):
        for index in range(controllers):
            await self.start(f"controller-{index}" if index else "controller", "controller", index, controllers)
        for index in range(units):
            await self.start_unit(index, limit=limit)
        await self.declare(lease_s=lease_s)
        async with asyncio.timeout(30):
            while len(list(self.folder.glob("unit-?"))) < units:
                await asyncio.sleep(0.02)

    async def declare(self, *, lease_s):
        """Declare the tasks, whose leases from now on last so long."""
        await self.client.declare(tasks(lease_s), timeout=30)

    async def start_unit(self, index, *, limit=1 << 20, role="unit"):
        await self.start(f"unit-{index}", role, index, limit, *self.store)

    async def replace(self, name, *words):
        """Kill a server and wait until its successor has said where it is."""
        path = self.folder / name
        before = path.read_text()
        await self.kill(name)
        await self.start(name, *words)
        async with asyncio.timeout(60):
            while path.read_text() == before:
                await asyncio.sleep(0.02)

    async def kill(self, name, number=signal.SIGKILL):
        process = self.children.pop(name)
        if process.returncode is None:
            process.send_signal(number)
            await process.wait()
        process._transport.close()

    async def left(self, name, *, within_s=30):
        """Wait until a unit that was told to leave has ended."""
        async with asyncio.timeout(within_s):
            assert await self.children[name].wait() == 0
        await self.kill(name)

    def stop(self, name):
        self.children[name].send_signal(signal.SIGSTOP)

    def go_on(self, name):
        self.children[name].send_signal(signal.SIGCONT)

    async def line(self, name):
        async with asyncio.timeout(30):
            return (await self.children[name].stdout.readline()).decode().split()

    async def create(self, *serials, per_step=1000, timeout=30):
        """Put groups, step by step; return whether each row is new, in the order of steps."""
        new = []
        for step, some in groupby(sorted(serials), key=lambda serial: 1 + serial // per_step):
            mine = list(some)
            prompts = {"prompt": Jagged.from_rows([range(s + 1) for s in mine for _ in range(2)], "int64")}
            samples = Samples(serials=mine, step=step)
            new += (await self.client.put(P, prompts, group_size=2, samples=samples, timeout=timeout)).new
        return new

    async def claim(self, task, *, rows=100, timeout=30):
        return (await self.client.claim(partition=P, task=task, max_rows=rows, timeout=timeout)).rows

    async def complete(self, rows, column):
        values = Jagged.from_rows([[row.meta.serial, row.meta.sample] for row in rows], "int32")
        return await self.client.complete(rows, {column: values}, timeout=30)

    async def close(self):
        await self.client.close()
        for name in list(self.children):
            await self.kill(name)


@pytest.fixture
async def processes(tmp_path):
    processes = QueueProcesses(tmp_path)
    yield processes
    await processes.close()
