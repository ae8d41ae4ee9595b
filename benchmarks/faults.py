"""Kills processes of a running job at random moments, then asks whether every sample was trained exactly once.

    python benchmarks/faults.py examples/counting.yaml --kills 50 --seed 1
    python benchmarks/faults.py examples/quickstart.yaml --kills 5 --seed 1 --eval-at-least 0.85
    python benchmarks/faults.py examples/quickstart-vllm.yaml --kills 6 --roles engine rollout trainer --pause 5 15
    python benchmarks/faults.py examples/counting.yaml --kills 100 --roles drain rollout scale --set evaluation=null
    python benchmarks/faults.py benchmarks/tasks.yaml --kills 50 --roles task reward critic reference rollout trainer

The victims are drawn from a seeded generator, every role in turn before any comes again. The witnesses are the audit of
the ledger, the run's own summary, and, with the counting trainer, the weights in the last checkpoint themselves. Where
only rollouts are disturbed and nothing is evaluated, every token that they made is accounted for (``token_account``).
Of a job with tasks of its own the ledger must say that each did each trained row exactly once. With ``--replay`` all
steps are made again by engines that nobody disturbs: tokens, log-probs and weights must have the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray
from run_lines import lines
from token_account import Account, Killed, ask, kept, made_in_order

from asyncflow.api.graph import graph_of
from asyncflow.api.job import RLJob
from asyncflow.api.load import load_job
from asyncflow.api.names import kind_of_role
from asyncflow.driver.tasks import TRAIN
from asyncflow.plan.job import critic_role
from asyncflow.queue.ledger.audit import Auditor, audit_ledger
from asyncflow.queue.ledger.events import Completed, Leased, RowsPut, SlotDecided
from asyncflow.queue.ledger.log import read_ledger
from asyncflow.training.counting import CRITIC_COUNTS

ENGINE = "engine"
"""As a role: any process that a rollout has started, a vLLM server or its engine, say."""
DRAIN = "drain"
"""As a role: a rollout that is told to end, as when it is evicted or scaled down."""
SCALE = "scale"
"""As a role: another number of rollouts, from the fewest to the most that the manifest allows."""
ROLLOUT = "rollout"
AS_ROLLOUT = {ENGINE, DRAIN, ROLLOUT}
ROLES = [ROLLOUT, "storage", "controller", "trainer", "driver"]
SETTLED_S = 600.0


def processes(folder: Path) -> list[dict[str, object]]:
    """Return the placements that the supervisor has on record."""
    try:
        record = json.loads((folder / "run" / "processes.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return []
    return [entry for entry in record["processes"] if entry["pid"]]


def steps_done(folder: Path) -> int:
    """Return the last step on record."""
    try:
        made = lines(folder)
        return int(made[-1]["step"]) if made else 0
    except (FileNotFoundError, json.JSONDecodeError):
        return 0


def scale(folder: Path, job: RLJob, dice: random.Random) -> dict[str, object] | None:
    """Set another number of rollouts; None while that cannot be asked for."""
    rollout = job.spec.rollout
    number = dice.randint(max(1, rollout.min_replicas), rollout.max_replicas)
    command = [sys.executable, "-m", "asyncflow", "scale", str(folder), f"rollout={number}"]
    asked = subprocess.run(command, check=False, capture_output=True, text=True)
    return {"role": SCALE, "index": number} if asked.returncode == 0 else None


def kill_one(folder: Path, role: str, dice: random.Random, killed: list[Killed]) -> dict[str, object] | None:
    """SIGKILL one process of ``role``, or end it by SIGTERM for a drain; None while there is none.

    killed: gets what a rollout had made when it was killed.
    """
    kind = ROLLOUT if role in AS_ROLLOUT else role
    alive = [entry for entry in processes(folder) if kind_of_role(str(entry["role"])) == kind]
    if not alive:
        return None
    victim = dice.choice(alive)
    if role == ENGINE:
        started = [each.pid for each in psutil.Process(int(str(victim["pid"]))).children(recursive=True)]
        if not started:
            return None
        victim = {**victim, "pid": dice.choice(started)}
    victim = {**victim, "role": role}
    last = None
    if role == ROLLOUT and (last := ask(f"rollout-{victim['index']}", str(victim["http"]))) is None:
        return None
    try:
        os.kill(int(str(victim["pid"])), signal.SIGTERM if role == DRAIN else signal.SIGKILL)
    except ProcessLookupError:
        return None
    if last is not None:
        killed.append(last)
    return victim


def weight_errors(job: RLJob, folder: Path) -> list[str]:
    """Compare the counting trainer's weights with the ledger: 1 exactly where it says trained, and nowhere else."""
    counts, group = newest_counts(folder), job.spec.algorithm.group_size
    expected = np.zeros_like(counts)
    auditor = Auditor()
    for event in read_ledger(folder / "ledger"):
        auditor.see(event)
    for (serial, sample), times in auditor.trained(TRAIN).items():
        expected[serial * group + sample] = times
    wrong = np.flatnonzero(counts != expected)
    return [f"sample {i // group}.{i % group}: {counts[i]} in the weights, {expected[i]} in the ledger" for i in wrong]


def newest_counts(folder: Path, file: str = "counts.npy") -> NDArray[Any]:
    """Return the counting trainer's weights of the newest checkpoint, or those of its critic."""
    newest = max((folder / "checkpoints").glob("step-*/manifest.json")).parent
    counts: NDArray[Any] = np.load(newest / file, allow_pickle=False)
    return counts


def count_errors(job: RLJob, folder: Path) -> list[str]:
    """Compare the counting trainer's weights with the ledger, and with the samples of a whole run."""
    found, counts = weight_errors(job, folder), newest_counts(folder)
    if critic_role(job.spec) is not None:
        learned = newest_counts(folder, CRITIC_COUNTS)
        found += [
            f"entry {i} is {learned[i]} in the critic, and {counts[i]}" for i in np.flatnonzero(learned != counts)
        ]
        print(f"critic: {int(learned.sum())} samples learned, at most {int(learned.max())} times")
    samples = job.spec.algorithm.steps * job.spec.algorithm.prompts_per_step * job.spec.algorithm.group_size
    if job.spec.algorithm.filter_zero_variance == "keep" and not (counts[:samples] == 1).all():
        found.append(f"{np.count_nonzero(counts[:samples] != 1)} of {samples} samples are not counted once")
    return found


def task_errors(job: RLJob, folder: Path) -> list[str]:
    """Say which tasks have not done each trained row exactly once, by the ledger; of rows put since its snapshot."""
    done: dict[str, Counter[int]] = {task.name: Counter() for task in graph_of(job.spec).of(TRAIN) if task.place}
    task_of: dict[int, str] = {}
    put: set[int] = set()
    slotted: set[int] = set()
    for event in read_ledger(folder / "ledger"):
        if isinstance(event, RowsPut):
            put.update(event.rows)
        elif isinstance(event, Leased) and event.partition == TRAIN:
            task_of[event.lease] = event.task
        elif isinstance(event, Completed) and task_of.get(event.lease) in done:
            done[task_of[event.lease]].update(event.rows)
        elif isinstance(event, SlotDecided):
            slotted.update(row for rank in event.ranks for row in rank)
    found = []
    slotted &= put
    for name, counts in done.items():
        twice, never = [row for row, count in counts.items() if count > 1], [row for row in slotted if not counts[row]]
        found += [f"task {name} did row {row} {counts[row]} times" for row in twice[:8]]
        found += [f"task {name} never did row {row}, which was trained" for row in never[:8]]
        print(f"task {name}: {len(slotted)} rows trained, done {sum(counts[row] for row in slotted)} times")
    return found


def replay_errors(job: RLJob, folder: Path) -> list[str]:
    """Make all steps again from the initial model; say where a token, a log-prob or a weight is another."""
    command = [sys.executable, "-m", "asyncflow", "replay", str(folder), "--step", str(job.spec.algorithm.steps)]
    again = subprocess.run([*command, "-n", "0"], check=False, capture_output=True, text=True)
    print(again.stdout, end="")
    if again.returncode:
        return [f"the steps are not the same when they are made again: {again.stdout[-200:]} {again.stderr[-400:]}"]
    if "from the initial model" not in again.stdout:
        return ["not all steps were made again: a checkpoint lies between; give storage.checkpoints.every more steps"]
    return []


def main() -> int:
    """Run the job, kill, and judge; give 0 where all is as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--output", type=Path, default=Path("runs/faults"))
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--roles", nargs="+", default=ROLES)
    parser.add_argument("--pause", type=float, nargs=2, default=(0.5, 4.0), help="seconds between kills, from and to")
    parser.add_argument("--eval-at-least", type=float, default=None)
    parser.add_argument("--replay", action="store_true", help="make all steps again, and compare")
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    dice = random.Random(options.seed)
    command = [
        sys.executable,
        "-m",
        "asyncflow",
        "run",
        str(options.manifest),
        "--output",
        str(options.output),
        "--fresh",
    ]
    for change in options.set:
        command += ["--set", change]
    job = load_job(options.manifest, options.set)
    log = options.output.with_name(options.output.name + ".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as stream:
        run = subprocess.Popen(command, stdout=stream, stderr=stream)
        kills: list[str] = []
        killed: list[Killed] = []
        bag: list[str] = []
        while run.poll() is None and len(kills) < options.kills:
            time.sleep(dice.uniform(*options.pause))
            if steps_done(options.output) < 1 and not kills:
                continue
            bag = bag or dice.sample(options.roles, len(options.roles))
            role = bag[-1]
            victim = scale(options.output, job, dice) if role == SCALE else kill_one(options.output, role, dice, killed)
            if victim is not None:
                bag.pop()
                kills.append(f"{victim['role']}-{victim['index']}")
                what = killed[-1] if role == ROLLOUT else kills[-1]
                print(f"step {steps_done(options.output)}: killed {what}", flush=True)
        status = run.wait(timeout=SETTLED_S)
    audit = audit_ledger(options.output / "ledger")
    problems = [] if status == 0 else [f"the run ended with status {status}, see {log}"]
    problems += audit.problems
    if len(kills) < options.kills:
        problems.append(f"only {len(kills)} of {options.kills} kills were done before the run ended")
    if job.spec.trainer.backend.name == "counting":
        problems += count_errors(job, options.output)
    problems += task_errors(job, options.output)
    accuracy = None
    if (options.output / "summary.json").exists():
        accuracy = json.loads((options.output / "summary.json").read_text())["eval_accuracy_last"]
    if options.eval_at_least is not None and (accuracy is None or accuracy < options.eval_at_least):
        problems.append(f"accuracy {accuracy} is below {options.eval_at_least}")
    print(
        f"{len(kills)} kills: {', '.join(f'{role} {sum(k.startswith(role) for k in kills)}' for role in options.roles)}"
    )
    print(
        f"dispatched {audit.dispatched}, trained {audit.trained}, filtered {audit.filtered}, dropped {audit.dropped}, "
        f"unfinished {audit.unfinished}, lost {audit.lost}, duplicated {audit.duplicated}; attempts {audit.attempts}; "
        f"accuracy {accuracy}"
    )
    if {DRAIN, ROLLOUT, SCALE} >= set(options.roles) and job.spec.evaluation is None:
        account = Account(
            in_order=made_in_order(options.output),
            killed=killed,
            kept=kept(options.output),
            lease_s=job.spec.rollout.lease_seconds,
        )
        print(account)
        problems += account.problems()
    if options.replay:
        problems += replay_errors(job, options.output)
    for problem in problems:
        print(f"PROBLEM {problem}")
    return 1 if problems or not audit.ok else 0


if __name__ == "__main__":
    sys.exit(main())
