"""All processes of the fault test, and their faults: they are killed and restarted, or stopped for a while.

Invariant: a fault hits only a working process. A process that ended by itself is restarted and reported as a problem,
except for a gang whose rows were lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

from fault_clients import CHAIN, LEASE_S, PRODUCERS, RANKS, ROWS_LOST
from fault_outcomes import Fault
from servers import Servers

HERE = Path(__file__).parent
CLIENTS = {"producer": PRODUCERS, **dict.fromkeys(CHAIN, 2), "trainer": RANKS}
ACTIONS = ("kill", "stop")
BACK_S = 60.0
"""The longest accepted time until a process, or its successor, works again after a fault."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The planned faults.

    count: the number of faults; pause: the shortest and longest seconds between them; alone: whether each waits for the
    recovery from the previous one; kinds: of the processes to hit, all if empty.
    """

    count: int
    pause: tuple[float, float]
    alone: bool
    kinds: list[str]


@dataclass
class Client:
    """A client process. mark: the size of its diary at its last fault; the client works if the diary is larger."""

    kind: str
    index: int
    attempt: int = -1
    process: subprocess.Popen[bytes] | None = None
    mark: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind}{self.index}"


@dataclass
class World:
    """All processes of a test. stopped: members under SIGSTOP; away: members that will be restarted."""

    made: Servers
    folder: Path
    dice: random.Random
    clients: dict[str, Client] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    stopped: set[str] = field(default_factory=set)
    away: set[str] = field(default_factory=set)
    faults: list[Fault] = field(default_factory=list)
    pending: set[asyncio.Task[None]] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    hit_at: dict[str, float] = field(default_factory=dict)
    committed: int = 0
    trained_at_fault: int = -1

    def start_client(self, client: Client) -> None:
        client.attempt += 1
        client.mark = 0
        handle = self.made.handle
        words = [client.kind, handle.address, handle.certificate, self.folder, client.index, client.attempt]
        with (self.folder / f"{client.name}.log").open("ab") as log:
            client.process = subprocess.Popen(
                [sys.executable, str(HERE / "fault_clients.py"), *map(str, words)], stdout=log, stderr=log
            )

    def process(self, name: str) -> subprocess.Popen[bytes]:
        process = self.clients[name].process if name in self.clients else self.made.processes[name]
        assert process is not None
        return process

    def diary_size(self, client: Client) -> int:
        file = self.folder / f"{client.name}-{client.attempt}.jsonl"
        return file.stat().st_size if file.exists() else 0

    async def at_work(self, name: str) -> bool:
        """Return whether a server is ready, or a client has acted since its last fault."""
        if name in self.stopped or name in self.away:
            return False
        if name in self.clients:
            return self.diary_size(self.clients[name]) > self.clients[name].mark
        return await asyncio.to_thread(self.made.is_ready, name)

    def of_kind(self, kind: str) -> list[str]:
        names = [*self.clients, *self.made.processes]
        return [name for name in names if name.rstrip("0123456789") == kind]

    def soon(self, seconds: float, name: str, places: set[str], act: Callable[[], None]) -> None:
        """Call ``act`` after ``seconds``. The member ``name`` is in the set ``places`` until then."""

        async def do() -> None:
            await asyncio.sleep(seconds)
            places.discard(name)
            act()

        places.add(name)
        self.pending.add(task := asyncio.create_task(do()))
        task.add_done_callback(self.pending.discard)


async def hit(world: World, kind: str, action: str) -> bool:
    """Cause one fault; return False if no process of that kind can be hit now."""
    if kind == "trainer" and world.committed <= world.trained_at_fault:
        return False
    fit = [name for name in world.of_kind(kind) if await world.at_work(name)]
    if not fit:
        return False
    name = world.dice.choice(fit)
    attempt = world.clients[name].attempt if name in world.clients else world.attempts.get(name, 0)
    fault = Fault(kind=kind, action=action, member=name, attempt=attempt, at=time.monotonic())
    world.faults.append(fault)
    world.hit_at[name] = fault.at
    if kind == "trainer":
        world.trained_at_fault = world.committed
    if action == "stop":
        long = world.dice.random() < 0.5
        fault.seconds = world.dice.uniform(1.2, 2.4) * LEASE_S if long else world.dice.uniform(0.1, 1.0)
        process = world.process(name)
        process.send_signal(signal.SIGSTOP)
        world.soon(fault.seconds, name, world.stopped, partial(resume, world, name, process))
    elif kind == "trainer":
        restart_gang(world)
    else:
        end(world, name)
        world.soon(world.dice.uniform(0.0, 0.5), name, world.away, partial(start, world, name))
    return True


def resume(world: World, name: str, process: subprocess.Popen[bytes]) -> None:
    """Resume a stopped process unless it was killed meanwhile."""
    if world.process(name) is process and process.poll() is None:
        if name in world.clients:
            world.clients[name].mark = world.diary_size(world.clients[name])
        process.send_signal(signal.SIGCONT)


def start(world: World, name: str) -> None:
    if name in world.clients:
        world.start_client(world.clients[name])
    else:
        world.attempts[name] = world.attempts.get(name, 0) + 1
        world.made.start(name, world.attempts[name])


def end(world: World, name: str) -> None:
    process = world.process(name)
    process.kill()
    process.wait()


def restart_gang(world: World) -> None:
    """End all ranks, and start their next attempt shortly afterwards: ranks start and end together."""
    for name in world.of_kind("trainer"):
        end(world, name)
        world.soon(0.1, name, world.away, partial(start, world, name))


async def cause_faults(world: World, plan: Plan) -> None:
    """Cause the planned faults. Every kind and action occurs once before any occurs again."""
    kinds = plan.kinds or sorted({name.rstrip("0123456789") for name in [*world.clients, *world.made.processes]})
    bag: list[tuple[str, str]] = []
    while len(world.faults) < plan.count:
        await asyncio.sleep(world.dice.uniform(*plan.pause))
        if plan.alone and (world.pending or world.hit_at):
            continue
        if not bag:
            bag = world.dice.sample(pairs := [(k, a) for k in kinds for a in ACTIONS], len(pairs))
        for pair in bag:
            if await hit(world, *pair):
                bag.remove(pair)
                break


async def look_after(world: World) -> NoReturn:
    """Restart a gang whose rows were lost; record processes that failed or do not recover."""
    while True:
        await asyncio.sleep(0.1)
        for name in [*world.clients, *world.made.processes]:
            status = world.process(name).poll()
            if status is None or name in world.away:
                continue
            if name in world.of_kind("trainer") and status == ROWS_LOST:
                restart_gang(world)
            else:
                world.problems.append(f"{name} ended by itself with status {status}")
                start(world, name)
        for name, at in list(world.hit_at.items()):
            if await world.at_work(name):
                del world.hit_at[name]
            elif time.monotonic() - at > BACK_S:
                del world.hit_at[name]
                world.problems.append(f"{name} did nothing for {BACK_S:.0f} s after it was hit")


@contextlib.contextmanager
def clients_of(world: World) -> Iterator[None]:
    """Run the clients during the context; at its end, kill them and resume stopped servers."""
    try:
        for kind, count in CLIENTS.items():
            for index in range(count):
                client = world.clients[f"{kind}{index}"] = Client(kind, index)
                world.start_client(client)
        yield
    finally:
        for client in world.clients.values():
            end(world, client.name)
        for process in world.made.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
