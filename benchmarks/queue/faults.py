"""Kill and stop random processes of a queue, then check that every row was counted once, and measure recovery times.

    python benchmarks/queue/faults.py --faults 200 --seed 1
    python benchmarks/queue/faults.py --faults 60 --seed 2 --backend mooncake
    python benchmarks/queue/faults.py --faults 42 --seed 1 --alone --pause 4 5
    python benchmarks/queue/faults.py --faults 200 --seed 3 --controllers 3

A stand-alone queue serves three tasks in sequence and a gang of two ranks that counts rows in its checkpoints. Faults
(SIGKILL, or SIGSTOP for a while, often longer than a lease) hit all kinds of processes in turn, in a seeded order. A
process is not hit again before it works again; the trainer is not hit again before it has committed another step.

The counts in the final checkpoint must all be 1, and the ledger's audit must agree. The exit status is 1 if they are
not, if a client failed by itself, if a process did not recover, or if the recovery from a single fault took too long.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
from fault_clients import (
    CHECKPOINT_STEPS,
    GROUPS,
    SAMPLES,
    TASKS,
    P,
    newest_checkpoint,
    publish,
    total_counts,
)
from fault_outcomes import Outcome, by_kind, judge, late_writes, slowest, table, too_late
from fault_world import Plan, World, cause_faults, clients_of, look_after
from samples import emit
from servers import Servers, servers

from asyncflow.queue.client import QueueClient, aconnect
from asyncflow.rpc.tls import Credentials

AHEAD = 8
"""The number of open steps after the last committed step."""
CALL_S = 90.0


async def drive(world: World, queue: QueueClient, over: asyncio.Event) -> int:
    """Open steps until the faults are over; return the last step after it is committed."""
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
    publish(folder / "goal", str(steps * GROUPS).encode())


async def run(made: Servers, chosen: argparse.Namespace) -> tuple[list[str], list[Outcome], dict[str, object]]:
    """Run the test; return the problems, the outcome of each fault, and the figures."""
    folder = made.folder / "clients"
    folder.mkdir()
    world = World(made, folder, random.Random(chosen.seed))
    plan = Plan(count=chosen.faults, pause=tuple(chosen.pause), alone=chosen.alone, kinds=chosen.kinds or [])
    over, began = asyncio.Event(), time.monotonic()
    async with aconnect(made.handle.address, credentials=Credentials(Path(made.handle.certificate))) as queue:
        await queue.declare(TASKS, timeout=CALL_S)
        publish_goal(folder, 0)
        with clients_of(world):
            driving = asyncio.create_task(drive(world, queue, over))
            watching = asyncio.create_task(look_after(world))
            faulting = asyncio.create_task(cause_faults(world, plan))
            try:
                async with asyncio.timeout(chosen.most):
                    await asyncio.wait([driving, watching, faulting], return_when=asyncio.FIRST_COMPLETED)
                    await faulting
                    over.set()
                    await asyncio.wait([driving, watching], return_when=asyncio.FIRST_COMPLETED)
                    steps = await driving
                while (world.pending or world.hit_at) and not watching.done():
                    await asyncio.sleep(0.1)
            except TimeoutError:
                steps = world.committed
                world.problems.append(f"only {len(world.faults)} faults and {steps} steps in {chosen.most:.0f} s")
            finally:
                for task in (driving, watching, faulting, *world.pending):
                    task.cancel()
        await queue.close_partition(partition=P, step=steps, timeout=CALL_S)
    rows, seconds = steps * GROUPS * SAMPLES, round(time.monotonic() - began)
    figures: dict[str, object] = {"steps": steps, "rows": rows, "seconds": seconds}
    world.problems += count_errors(folder, steps) + late_writes(folder)
    audit = made.audit()
    figures |= {name: getattr(audit, name) for name in ("trained", "unfinished", "lost", "duplicated", "redeliveries")}
    world.problems += audit.problems
    if not audit.ok or not audit.closed or audit.trained != rows:
        world.problems.append(f"the audit does not agree: {audit}")
    outcomes = judge(world.faults, folder)
    return world.problems + too_late(outcomes), outcomes, figures


def count_errors(folder: Path, steps: int) -> list[str]:
    """Return the errors in the counts of the final checkpoint."""
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
    parser.add_argument("--controllers", type=int, default=1)
    parser.add_argument("--units", type=int, default=2)
    parser.add_argument("--pause", type=float, nargs=2, default=(0.2, 1.0), help="range of seconds between faults")
    parser.add_argument("--kinds", nargs="+", help="kinds of processes to hit, such as unit; by default all")
    parser.add_argument("--keep", type=Path, help="copy ledger, logs and diaries into this new folder")
    parser.add_argument("--alone", action="store_true", help="wait for recovery before the next fault")
    parser.add_argument("--most", type=float, default=1800.0, help="time limit of the test in seconds")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sizes = {"controllers": chosen.controllers, "units": chosen.units, "bytes_per_unit": "64Mi"}
    with servers(**sizes, backend=chosen.backend, secured=True, shared_memory=True) as made:
        problems, outcomes, figures = asyncio.run(run(made, chosen))
        if chosen.keep is not None:
            shutil.copytree(made.folder, chosen.keep)
        if problems:
            print(made.logs())
            for file in sorted((made.folder / "clients").glob("*.log")):
                print(f"== {file.name}\n{file.read_text()[-1500:]}")
    print(table(outcomes), *slowest(outcomes), sep="\n")
    choices = {"backend": chosen.backend, "controllers": chosen.controllers, "seed": chosen.seed}
    hits = {"faults": len(outcomes), "by_kind": by_kind(outcome.fault for outcome in outcomes)}
    emit({"bench": "faults", **choices, **hits, **figures})
    for problem in problems:
        print(f"PROBLEM {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
