"""Kills and stops processes of a queue at random, then asks whether every row was counted once, and how long all took.

    python benchmarks/queue/faults.py --faults 200 --seed 1
    python benchmarks/queue/faults.py --faults 60 --seed 2 --backend mooncake

A queue that stands alone serves three tasks in a row and a gang of two ranks that counts rows into its checkpoints.
Faults (SIGKILL, or SIGSTOP for a while, often longer than a lease) hit all kinds of processes in turn, in seeded order;
a process is left alone until it is at work again, and the trainer until it has committed a step since its last fault.

The witness is the array of counts in the surviving checkpoint, which must be 1 everywhere; the ledger's audit must
agree. Exit status 1 where it is not so, where a client failed by itself, or where anything did not come back.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np
from fault_clients import (
    CHAIN,
    CHECKPOINT_STEPS,
    GROUPS,
    LEASE_S,
    PRODUCERS,
    RANKS,
    ROWS_LOST,
    SAMPLES,
    TASKS,
    P,
    newest_checkpoint,
    publish,
    total_counts,
)
from fault_outcomes import Fault, Outcome, by_kind, judge, table
from lines import emit
from servers import Servers, servers

from asyncflow.net.keys import Keys
from asyncflow.queue.client.client import QueueClient
from asyncflow.queue.client.visitor import visit
from asyncflow.queue.ledger.audit import audit_ledger

HERE = Path(__file__).parent
CLIENTS = {"producer": PRODUCERS, **dict.fromkeys(CHAIN, 2), "trainer": RANKS}
ACTIONS = ("kill", "stop")
AHEAD = 8
"""Steps that are open beyond the last that was committed."""
BACK_S = 60.0
"""Most time until a process that was hit, or whoever took its place, is at work again."""
CALL_S = 90.0


@dataclass
class Client:
    """A process that is no server. mark: size of its diary at its last fault, which it must outgrow."""

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
    """Everything that runs. stopped: members that do not now; away: those that will be started."""

    made: Servers
    folder: Path
    dice: random.Random
    clients: dict[str, Client] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    stopped: set[str] = field(default_factory=set)
    away: set[str] = field(default_factory=set)
    faults: list[Fault] = field(default_factory=list)
    later: set[asyncio.Task[None]] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    hit_at: dict[str, float] = field(default_factory=dict)
    committed: int = 0
    trained_at_fault: int = -1

    def start_client(self, client: Client) -> None:
        client.attempt += 1
        client.mark = 0
        handle = self.made.handle
        words = [client.kind, handle.address, handle.key_file, self.folder, client.index, client.attempt]
        with (self.folder / f"{client.name}.log").open("ab") as log:
            client.process = subprocess.Popen(
                [sys.executable, str(HERE / "fault_clients.py"), *map(str, words)], stdout=log, stderr=log
            )

    def pid(self, name: str) -> int:
        process = self.clients[name].process if name in self.clients else self.made.processes[name]
        assert process is not None
        return process.pid

    def diary_size(self, client: Client) -> int:
        file = self.folder / f"{client.name}-{client.attempt}.jsonl"
        return file.stat().st_size if file.exists() else 0

    async def at_work(self, name: str) -> bool:
        """Tell whether a member serves, or has done something since its last fault."""
        if name in self.stopped or name in self.away:
            return False
        if name in self.clients:
            return self.diary_size(self.clients[name]) > self.clients[name].mark
        return await asyncio.to_thread(self.made.is_ready, name)

    def of_kind(self, kind: str) -> list[str]:
        names = [*self.clients, *self.made.processes]
        return [name for name in names if name.rstrip("0123456789") == kind]

    def soon(self, seconds: float, name: str, places: set[str], act: object) -> None:
        """Have something done to a member in a while. places: where it stands until then."""

        async def do() -> None:
            await asyncio.sleep(seconds)
            places.discard(name)
            act()  # type: ignore[operator]

        places.add(name)
        self.later.add(task := asyncio.create_task(do()))
        task.add_done_callback(self.later.discard)


async def hit(world: World, kind: str, action: str) -> bool:
    """Do one fault; False where nobody of that kind can be hit now."""
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
        pid = world.pid(name)
        os.kill(pid, signal.SIGSTOP)
        world.soon(fault.seconds, name, world.stopped, lambda: go_on(world, name, pid))
    elif kind == "trainer":
        restart_gang(world)
    else:
        end(world, name)
        world.soon(world.dice.uniform(0.0, 0.5), name, world.away, lambda: start(world, name))
    return True


def go_on(world: World, name: str, pid: int) -> None:
    if world.pid(name) != pid or name in world.away:
        return
    if name in world.clients:
        world.clients[name].mark = world.diary_size(world.clients[name])
    os.kill(pid, signal.SIGCONT)


def start(world: World, name: str) -> None:
    if name in world.clients:
        world.start_client(world.clients[name])
    else:
        world.attempts[name] = world.attempts.get(name, 0) + 1
        world.made.start(name, world.attempts[name])


def end(world: World, name: str) -> None:
    process = world.clients[name].process if name in world.clients else world.made.processes[name]
    assert process is not None
    process.kill()
    process.wait()


def restart_gang(world: World) -> None:
    """End all ranks, and start their next attempt in a moment: ranks start and end together."""
    for name in world.of_kind("trainer"):
        end(world, name)
        world.soon(0.1, name, world.away, lambda name=name: start(world, name))  # type: ignore[misc]


async def cause_faults(world: World, count: int, pause: tuple[float, float]) -> None:
    """Do ``count`` faults; every kind and action in turn before any comes again."""
    kinds = sorted({name.rstrip("0123456789") for name in [*world.clients, *world.made.processes]})
    bag: list[tuple[str, str]] = []
    while len(world.faults) < count:
        await asyncio.sleep(world.dice.uniform(*pause))
        if not bag:
            bag = world.dice.sample(pairs := [(k, a) for k in kinds for a in ACTIONS], len(pairs))
        for pair in bag:
            if await hit(world, *pair):
                bag.remove(pair)
                break


async def look_after(world: World) -> NoReturn:
    """Start a gang anew whose rows were lost; take note of clients that failed, and of who does not come back."""
    while True:
        await asyncio.sleep(0.1)
        for client in world.clients.values():
            status = client.process.poll() if client.process is not None else None
            if status is None or client.name in world.away:
                continue
            if client.kind == "trainer" and status == ROWS_LOST:
                restart_gang(world)
            else:
                world.problems.append(f"{client.name} ended by itself with status {status}")
                start(world, client.name)
        for name, at in list(world.hit_at.items()):
            if await world.at_work(name):
                del world.hit_at[name]
            elif time.monotonic() - at > BACK_S:
                del world.hit_at[name]
                world.problems.append(f"{name} did nothing for {BACK_S:.0f} s after it was hit")


async def drive(world: World, queue: QueueClient, over: asyncio.Event) -> int:
    """Open steps as long as faults come; give the last one, when it is committed."""
    opened = 0
    while True:
        world.committed = (await queue.snapshot(partition=P, timeout=CALL_S)).last_committed_step
        if over.is_set() and world.committed >= opened:
            return opened
        while not over.is_set() and opened < world.committed + AHEAD:
            for step in range(opened + 1, opened + CHECKPOINT_STEPS + 1):
                await queue.open_step(partition=P, step=step, groups=GROUPS, group_size=SAMPLES, timeout=CALL_S)
            opened += CHECKPOINT_STEPS
            publish_goal(world.folder, opened)
        await asyncio.sleep(0.2)


def publish_goal(folder: Path, steps: int) -> None:
    publish(folder / "goal", lambda file: file.write_text(str(steps * GROUPS)) and None)


@contextlib.contextmanager
def clients_of(world: World) -> Iterator[None]:
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


async def run(made: Servers, chosen: argparse.Namespace) -> tuple[list[str], list[Outcome], dict[str, object]]:
    """Run everything; give the problems, what became of each fault, and the figures."""
    folder = made.folder / "clients"
    folder.mkdir()
    world = World(made, folder, random.Random(chosen.seed))
    over, began = asyncio.Event(), time.monotonic()
    async with visit(made.handle.address, keys=Keys.load(Path(made.handle.key_file))) as queue:
        await queue.declare(TASKS, timeout=CALL_S)
        publish_goal(folder, 0)
        with clients_of(world):
            driving = asyncio.create_task(drive(world, queue, over))
            watching = asyncio.create_task(look_after(world))
            troubling = asyncio.create_task(cause_faults(world, chosen.faults, tuple(chosen.pause)))
            try:
                async with asyncio.timeout(chosen.most):
                    await asyncio.wait([driving, watching, troubling], return_when=asyncio.FIRST_COMPLETED)
                    await troubling
                    over.set()
                    await asyncio.wait([driving, watching], return_when=asyncio.FIRST_COMPLETED)
                    steps = await driving
                while world.later or world.hit_at:
                    await asyncio.sleep(0.1)
            except TimeoutError:
                steps = world.committed
                world.problems.append(f"{len(world.faults)} faults and {steps} steps were all in {chosen.most:.0f} s")
            finally:
                for task in (driving, watching, troubling, *world.later):
                    task.cancel()
        await queue.close_partition(partition=P, step=steps, timeout=CALL_S)
    figures = {"steps": steps, "rows": steps * GROUPS * SAMPLES, "seconds": round(time.monotonic() - began)}
    world.problems += count_errors(folder, steps)
    audit = audit_ledger(made.folder / "controller" / "ledger")
    figures |= {name: getattr(audit, name) for name in ("trained", "unfinished", "lost", "duplicated", "redeliveries")}
    world.problems += audit.problems
    if not audit.ok or not audit.closed or audit.trained != figures["rows"]:
        world.problems.append(f"the audit does not agree: {audit}")
    return world.problems, judge(world.faults, folder), figures


def count_errors(folder: Path, steps: int) -> list[str]:
    """Look at the counts of the surviving checkpoint."""
    step, files = newest_checkpoint(folder)
    counts = total_counts(files)
    wrong = np.flatnonzero(counts != 1)
    problems = [f"row {row} is counted {counts[row]} times" for row in wrong[:20]]
    if step != steps or len(counts) != steps * GROUPS * SAMPLES:
        problems.append(f"the checkpoint of step {step} of {steps} counts {len(counts)} rows")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--backend", choices=["memory", "mooncake", "redis"], default="memory")
    parser.add_argument("--units", type=int, default=2)
    parser.add_argument("--pause", type=float, nargs=2, default=(0.2, 1.0), help="seconds between faults, from and to")
    parser.add_argument("--most", type=float, default=1800.0, help="seconds for all of it")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with servers(units=chosen.units, backend=chosen.backend, bytes_per_unit="64Mi", keys=True) as made:
        problems, outcomes, figures = asyncio.run(run(made, chosen))
        if problems:
            print(made.logs())
            for file in sorted((made.folder / "clients").glob("*.log")):
                print(f"== {file.name}\n{file.read_text()[-1500:]}")
    print(table(outcomes))
    chose = {"backend": chosen.backend, "seed": chosen.seed}
    hits = {"faults": len(outcomes), "by_kind": by_kind(outcome.fault for outcome in outcomes)}
    emit({"bench": "faults", **chose, **hits, **figures})
    for problem in problems:
        print(f"PROBLEM {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
