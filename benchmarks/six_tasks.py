"""Run PPO with its six tasks in separate processes, and compute from their spans which tasks worked concurrently.

    python benchmarks/six_tasks.py --steps 20

The tasks are those in figure 1 of AsyncFlow (arXiv 2507.01663): rollout, reference, reward, the critic's values, the
critic's update, and the actor's update. The output is the time for which each task, each pair of tasks and all six
tasks worked, from the recorded spans. Trainer and critic are two processes each, so that one critic can compute values
while the other learns. The benchmark fails if the run fails, or if the six tasks never worked at the same time.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable
from functools import reduce
from itertools import combinations
from pathlib import Path

from asyncflow.queue.ledger.audit import audit_ledger
from asyncflow.telemetry.spans import read_timeline
from asyncflow.timeline.tracks import Timeline

ROOT = Path(__file__).parents[1]
SETTINGS = (
    "evaluation=null",
    "algorithm.kl.coefficient=0.02",
    "reference={}",
    "reward.role={}",
    "critic.role={replicas: 2}",
    "trainer.replicas=2",
)
TASKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "rollout": ("rollout", ("generate",)),
    "reference": ("reference", ("compute",)),
    "reward": ("reward", ("compute",)),
    "critic's values": ("critic", ("forward",)),
    "critic's update": ("critic", ("compute", "optimizer")),
    "actor's update": ("trainer", ("forward", "backward", "compute", "optimizer")),
}
"""The role and the kinds of spans of each task."""
Intervals = list[tuple[float, float]]


def union(spans: Iterable[tuple[float, float]]) -> Intervals:
    """Return the union of intervals, in order."""
    found: Intervals = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def together(one: Intervals, other: Intervals) -> Intervals:
    """Return the intersection of two unions."""
    return union((max(a, c), min(b, d)) for a, b in one for c, d in other if max(a, c) < min(b, d))


def seconds(intervals: Intervals) -> float:
    """Return the total length of intervals."""
    return sum(end - begin for begin, end in intervals)


def at_work(timeline: Timeline, role: str, kinds: tuple[str, ...]) -> Intervals:
    """Return the times in which any process of ``role`` had a span of one of ``kinds``."""
    spans = (span for track in timeline.tracks if track.role == role for span in (*track.main, *track.background))
    return union((span.begin, span.end) for span in spans if span.kind in kinds)


def main() -> int:
    """Run the benchmark and print the result; return 0 if there is no problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("runs/six-tasks"))
    options = parser.parse_args()
    settings = [word for one in (*SETTINGS, f"algorithm.steps={options.steps}") for word in ("--set", one)]
    run = [sys.executable, "-m", "asyncflow", "run", str(ROOT / "examples/ppo.yaml"), "--output", str(options.output)]
    subprocess.run([*run, "--fresh", *settings], check=True)
    audit = audit_ledger(options.output / "ledger")
    timeline = read_timeline(options.output)
    busy = {task: at_work(timeline, *by) for task, by in TASKS.items()}
    problems = [*audit.problems, *(f"{task} was never at work" for task, times in busy.items() if not times)]
    for task, times in busy.items():
        print(f"{task:16s} {seconds(times):8.2f} s in {len(times)} stretches")
    for one, other in combinations(TASKS, 2):
        both = seconds(together(busy[one], busy[other]))
        print(f"{one} and {other}: {both:.2f} s at the same time")
    at_once = seconds(reduce(together, busy.values()))
    print(f"all six: {at_once:.2f} s at the same time")
    if not at_once:
        problems.append("the six tasks were never at work at the same time")
    print(f"{audit.trained} samples trained, {audit.lost} lost, {audit.duplicated} twice")
    for problem in problems:
        print(f"PROBLEM {problem}")
    return 1 if problems or not audit.ok else 0


if __name__ == "__main__":
    sys.exit(main())
