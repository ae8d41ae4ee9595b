"""Scale the rollouts of a running job repeatedly, and compare its throughput with jobs of a constant size.

    python benchmarks/elastic.py --changes 100 --seed 1

The engine is simulated: its slots limit the tokens per second of a rollout. The rollouts are the bottleneck of the job,
and twice as many rollouts give twice the throughput. First, a job runs with each number of rollouts to measure its
static throughput. Then one job is scaled ``--changes`` times, by ``asyncflow scale``, to numbers from a seeded
generator.

The measurement after a change starts when all wanted rollouts are ready and the surplus ones have left. It skips one
version and covers the next ``--versions``. The limits are:

* The throughput, in the mean and in the median, is at least 95 % of the static throughput.
* A joining rollout delivers its first sample before two versions have been published since its process started.
* The trainer is never restarted.
* Each sample is trained once.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from faults import processes, steps_done, weight_errors
from run_lines import lines

from asyncflow.api.load import load_job
from asyncflow.api.status import DriverStatus
from asyncflow.local.http_client import ask
from asyncflow.queue.ledger.audit import audit_ledger

ROOT = Path(__file__).parents[1]
COUNTING = ROOT / "examples" / "counting.yaml"
SETTINGS = (
    "evaluation=null",
    "schedule.swapAt=token",
    "schedule.maxStaleness=2",
    "schedule.stalenessThreshold=1.0",
    "algorithm.promptsPerStep=16",
    "sampling.maxTokens=64",
    "rollout.engine={name: simulated, slots: 4, options: {token_s: 0.04, tokens: 15, sigma: 0.4}}",
    "rollout.minReplicas=1",
    "storage.checkpoints={every: 10, keep: 1}",
    "trainer.backend.options={capacity: 1048576}",
)
BAR = 0.95
WARM = 3
"""The number of steps at the start of a run that are not measured."""
WITHIN_S = 60.0
"""The timeout of a wait, in seconds."""


class Change(NamedTuple):
    """One change. before, after: numbers of rollouts; settled_s: seconds until it was complete; ratio: the throughput
    of the measured versions divided by the static throughput.
    """

    before: int
    after: int
    settled_s: float
    ratio: float


class Job:
    """A job in its own process. folder: the run folder."""

    def __init__(self, folder: Path, *, rollouts: int, most: int, steps: int) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "asyncflow", "run", str(COUNTING), "--output", str(folder), "--fresh"]
        numbers = (f"rollout.replicas={rollouts}", f"rollout.maxReplicas={most}", f"algorithm.steps={steps}")
        for setting in (*SETTINGS, *numbers):
            command += ["--set", setting]
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_name(f"{folder.name}.log").open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def until(self, condition: Callable[[], bool], what: str, *, within_s: float = WITHIN_S) -> None:
        """Wait for ``condition``. Raises RuntimeError at the timeout, or if the job ends."""
        deadline = time.monotonic() + within_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.folder}: waited {within_s:.0f} s for {what}, see its log")
            time.sleep(0.05)

    def until_step(self, step: int) -> None:
        """Wait until ``step`` steps are done."""
        missing = max(1, step - steps_done(self.folder))
        self.until(lambda: steps_done(self.folder) >= step, f"step {step}", within_s=WITHIN_S * missing)

    def status(self) -> DriverStatus | None:
        """Return the driver's status."""
        driver = next((each for each in processes(self.folder) if each["role"] == "driver"), None)
        return ask(int(str(driver["http"]).rpartition(":")[2]), DriverStatus) if driver else None

    def generates_with(self, rollouts: int) -> bool:
        """Return whether exactly ``rollouts`` rollouts run, and all are ready."""
        placed = [each for each in processes(self.folder) if each["role"] == "rollout"]
        status = self.status()
        states = [each.state for each in status.rollouts] if status else []
        return len(placed) == len(states) == rollouts and all(state in ("ready", "lagging") for state in states)

    def scale(self, rollouts: int) -> None:
        """Scale the job with ``asyncflow scale``, as a user does."""
        command = [sys.executable, "-m", "asyncflow", "scale", str(self.folder), f"rollout={rollouts}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def steps(self) -> dict[int, dict[str, Any]]:
        """Return the lines of ``metrics.jsonl`` by step."""
        return {line["step"]: line for line in lines(self.folder)}

    def end(self) -> None:
        """End the job by SIGTERM, and wait for its end."""
        self.process.terminate()
        self.process.wait(timeout=WITHIN_S)


def throughput(made: dict[int, dict[str, Any]], first: int, last: int) -> float:
    """Return the response tokens per second of the steps after ``first`` up to ``last``."""
    tokens = sum(int(made[step]["response_tokens"]) for step in range(first + 1, last + 1))
    return tokens / (float(made[last]["ended"]) - float(made[first]["ended"]))


def run_static(folder: Path, rollouts: int, *, steps: int, versions: int) -> tuple[float, list[float]]:
    """Run a job with a constant number of rollouts.

    Return its throughput, and the throughput of each window of ``versions`` steps divided by it.
    """
    job = Job(folder, rollouts=rollouts, most=max(2, rollouts), steps=10_000)
    job.until(lambda: job.generates_with(rollouts), f"{rollouts} rollouts")
    first = steps_done(folder) + WARM
    job.until_step(first + steps)
    job.end()
    made = job.steps()
    whole = throughput(made, first, first + steps)
    marks = range(first, first + steps + 1, versions)
    return whole, [throughput(made, a, b) / whole for a, b in pairwise(marks)]


def one_change(job: Job, *, before: int, after: int, static: dict[int, float], versions: int) -> Change:
    """Scale the job, and measure the throughput afterwards."""
    requested = time.monotonic()
    job.scale(after)
    job.until(lambda: job.generates_with(after), f"{after} rollouts instead of {before}")
    settled_s = time.monotonic() - requested
    first = steps_done(job.folder) + 2  # the step in progress has mixed numbers of rollouts; then skip one version
    job.until_step(first + versions)
    return Change(before, after, settled_s, throughput(job.steps(), first, first + versions) / static[after])


def joiners(folder: Path, published: Sequence[float]) -> list[tuple[float, int]]:
    """Return, for each rollout that joined, the seconds from the start of its process to its first sample, and the
    number of versions published in this time. The first rollouts of the job are left out.
    """
    found = []
    for log in (folder / "logs").glob("rollout-*.log"):
        began: float | None = None
        for line in log.read_text().splitlines():
            stamp = line.partition(" ")[0].replace("Z", "+00:00")
            if re.search(r" attempt \d+, worker ", line):
                began = datetime.fromisoformat(stamp).timestamp()
            elif "the first sample is delivered" in line and began is not None:
                at = datetime.fromisoformat(stamp).timestamp()
                if began > published[0]:
                    found.append((at - began, sum(began < version <= at for version in published)))
                began = None
    return found


def main() -> int:
    """Run the benchmark and print the results; return 0 if every limit is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/elastic"))
    parser.add_argument("--changes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--least", type=int, default=2)
    parser.add_argument("--most", type=int, default=4)
    parser.add_argument("--versions", type=int, default=2, help="number of versions to measure after each change")
    parser.add_argument("--static-steps", type=int, default=20, help="number of steps of each job of a constant size")
    options = parser.parse_args()
    dice, numbers = random.Random(options.seed), range(options.least, options.most + 1)
    static: dict[int, float] = {}
    windows: list[float] = []
    for rollouts in numbers:
        folder = options.output / f"static-{rollouts}"
        static[rollouts], some = run_static(folder, rollouts, steps=options.static_steps, versions=options.versions)
        windows += some
        print(f"{rollouts} rollouts, constant: {static[rollouts]:.0f} tokens/s", flush=True)
    job = Job(options.output / "scaled", rollouts=options.least, most=options.most, steps=100_000)
    job.until(lambda: job.generates_with(options.least), "the first rollouts")
    job.until_step(WARM)
    changes: list[Change] = []
    now = options.least
    while len(changes) < options.changes:
        after = dice.choice([number for number in numbers if number != now])
        changes.append(one_change(job, before=now, after=after, static=static, versions=options.versions))
        now = after
        made = changes[-1]
        print(f"{len(changes):3d}: {made.before} -> {after} in {made.settled_s:.1f} s, {made.ratio:.3f}", flush=True)
    status = job.status()
    job.end()
    return judge(job, changes, windows, trainer_attempt=-1 if status is None else status.attempt)


def judge(job: Job, changes: Sequence[Change], windows: Sequence[float], *, trainer_attempt: int) -> int:
    """Print the figures and the violated limits; return 0 if there are none."""
    ratios, made = [change.ratio for change in changes], job.steps()
    whole, median = statistics.fmean(ratios), statistics.median(ratios)
    joined = joiners(job.folder, [float(line["at"]) for line in made.values()])
    versions = [each for _, each in joined]
    audit = audit_ledger(job.folder / "ledger")
    print(f"throughput relative to a constant number of rollouts: mean {whole:.3f}, {_spread(ratios)}")
    print(f"  windows of the same length with a constant number:  {_spread(windows)}")
    for words, some in (
        ("joined", [each.ratio for each in changes if each.after > each.before]),
        ("left", [each.ratio for each in changes if each.after < each.before]),
    ):
        print(f"  after some {words}: mean {statistics.fmean(some or [0.0]):.3f} of {len(some)}")
    print(
        f"{len(joined)} joined: first sample {_spread([each for each, _ in joined])} s after the start of the process,"
    )
    print(f"  versions published meanwhile: {dict(sorted(Counter(versions).items()))}")
    print(f"until the change was complete: {_spread([change.settled_s for change in changes])} s")
    print(f"trainer attempt {trainer_attempt}; trained {audit.trained}, lost {audit.lost}, doubled {audit.duplicated}")
    problems = [*audit.problems, *weight_errors(load_job(job.folder / "job.yaml"), job.folder)]
    if whole < BAR or median < BAR:
        problems.append(f"the throughput after a change is below {BAR:.0%} of that with a constant number of rollouts")
    if not joined or max(versions) > 1:
        problems.append(f"{sum(each > 1 for each in versions)} of {len(joined)} joiners needed more than one version")
    if trainer_attempt != 0:
        problems.append("the trainer was restarted, or the driver did not answer")
    for problem in problems:
        print(f"PROBLEM {problem}")
    return 1 if problems or not audit.ok else 0


def _spread(values: Sequence[float]) -> str:
    """Return the lowest, the tenth, the median and the highest of the values."""
    values = sorted(values) or [0.0]
    middle = statistics.median(values)
    return f"least {values[0]:.3g}, p10 {values[len(values) // 10]:.3g}, median {middle:.3g}, most {values[-1]:.3g}"


if __name__ == "__main__":
    sys.exit(main())
