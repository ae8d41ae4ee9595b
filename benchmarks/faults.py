"""Kill processes of a running job at random times, then check that every sample was trained exactly once.

    python benchmarks/faults.py examples/counting.yaml --kills 50 --seed 1
    python benchmarks/faults.py examples/quickstart.yaml --kills 5 --seed 1 --eval-at-least 0.85
    python benchmarks/faults.py examples/quickstart-vllm.yaml --kills 6 --roles engine rollout trainer --pause 5 15
    python benchmarks/faults.py examples/counting.yaml --kills 100 --roles drain rollout scale --set evaluation=null
    python benchmarks/faults.py benchmarks/tasks.yaml --kills 50 --roles task reward critic reference rollout trainer

A seeded generator draws the victims; every role is drawn once before any role is drawn again. The checks use the audit
of the ledger, the run's summary and, with the counting trainer, the weights in the last checkpoint. If only rollouts
are disturbed and there is no evaluation, every generated token is accounted for (``token_account``). If the job has
user tasks, the ledger must show that each task did each trained row exactly once. With ``--replay``, undisturbed
engines repeat all steps; tokens, log-probs and weights must have the same bits.
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
"""As a role: any child process of a rollout, for example a vLLM server or its engine."""
DRAIN = "drain"
"""As a role: a rollout that is ended by SIGTERM, as in an eviction or a scale-down."""
SCALE = "scale"
"""As a role: a change of the number of rollouts, within the limits of the manifest."""
ROLLOUT = "rollout"
AS_ROLLOUT = {ENGINE, DRAIN, ROLLOUT}
ROLES = [ROLLOUT, "storage", "controller", "trainer", "driver"]
SETTLED_S = 600.0


def processes(folder: Path) -> list[dict[str, object]]:
    """Return the running processes in the supervisor's record."""
    try:
        record = json.loads((folder / "run" / "processes.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return []
    return [entry for entry in record["processes"] if entry["pid"]]


def steps_done(folder: Path) -> int:
    """Return the last step in metrics.jsonl, 0 if there is none."""
    try:
        made = lines(folder)
        return int(made[-1]["step"]) if made else 0
    except (FileNotFoundError, json.JSONDecodeError):
        return 0


def scale(folder: Path, job: RLJob, dice: random.Random) -> dict[str, object] | None:
    """Set a random number of rollouts; None if the request fails."""
    rollout = job.spec.rollout
    number = dice.randint(max(1, rollout.min_replicas), rollout.max_replicas)
    command = [sys.executable, "-m", "asyncflow", "scale", str(folder), f"rollout={number}"]
    scaled = subprocess.run(command, check=False, capture_output=True, text=True)
    return {"role": SCALE, "index": number} if scaled.returncode == 0 else None


def kill_one(folder: Path, role: str, dice: random.Random, killed: list[Killed]) -> dict[str, object] | None:
    """End one process of ``role`` by SIGKILL, or by SIGTERM for a drain, and return it; None if there is none.

    killed: receives the work of a rollout at the time of its kill.
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
    """Return the samples whose count in the counting trainer's weights differs from the ledger's count."""
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
    """Return the counting trainer's weights, or its critic's, from the newest checkpoint."""
    newest = max((folder / "checkpoints").glob("step-*/manifest.json")).parent
    counts: NDArray[Any] = np.load(newest / file, allow_pickle=False)
    return counts


def count_errors(job: RLJob, folder: Path) -> list[str]:
    """Return the differences of the counting trainer's weights from the ledger, the critic and a complete run."""
    found, counts = weight_errors(job, folder), newest_counts(folder)
    if critic_role(job.spec) is not None:
        learned = newest_counts(folder, CRITIC_COUNTS)
        found += [
            f"entry {i} is {learned[i]} in the critic, {counts[i]} in the trainer"
            for i in np.flatnonzero(learned != counts)
        ]
        print(f"critic: {int(learned.sum())} samples learned, at most {int(learned.max())} times")
    samples = job.spec.algorithm.steps * job.spec.algorithm.prompts_per_step * job.spec.algorithm.group_size
    if job.spec.algorithm.filter_zero_variance == "keep" and not (counts[:samples] == 1).all():
        found.append(f"{np.count_nonzero(counts[:samples] != 1)} of {samples} samples are not counted once")
    return found


def task_errors(job: RLJob, folder: Path) -> list[str]:
    """Return the tasks that did not do each trained row exactly once, by the ledger, among rows after its snapshot."""
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
    """Replay all steps from the initial model; return the difference if a token, a log-prob or a weight differs."""
    command = [sys.executable, "-m", "asyncflow", "replay", str(folder), "--step", str(job.spec.algorithm.steps)]
    again = subprocess.run([*command, "-n", "0"], check=False, capture_output=True, text=True)
    print(again.stdout, end="")
    if again.returncode:
        return [f"the replay differs from the run: {again.stdout[-200:]} {again.stderr[-400:]}"]
    if "from the initial model" not in again.stdout:
        return ["not all steps were replayed, because there is a checkpoint: increase storage.checkpoints.every"]
    return []


def main() -> int:
    """Run the job, kill processes and check the result; return 0 if there is no problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--output", type=Path, default=Path("runs/faults"))
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--roles", nargs="+", default=ROLES)
    parser.add_argument("--pause", type=float, nargs=2, default=(0.5, 4.0), help="range of seconds between kills")
    parser.add_argument("--eval-at-least", type=float, default=None)
    parser.add_argument("--replay", action="store_true", help="replay all steps and compare them")
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
