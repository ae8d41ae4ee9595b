"""Runs PPO with each of its six tasks where it has a place of its own, and asks the spans when which was at work.

    python benchmarks/six_tasks.py --steps 20

The tasks are those of AsyncFlow (arXiv 2507.01663), figure 1: rollout, reference, reward, the critic's values, its
update, and that of the actor; each by the spans that its processes recorded. What is printed is for how long each was
at work, for how long each pair was at the same time, and for how long all six. Trainer and critic are two processes
each, so that one critic may value while the other learns. It fails where the run does, or where the six were never at
work at the same time.
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
"""Role and kinds of the spans of each task."""
Intervals = list[tuple[float, float]]


def union(spans: Iterable[tuple[float, float]]) -> Intervals:
    """Return the times that any of the intervals covers, in order."""
    found: Intervals = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def together(one: Intervals, other: Intervals) -> Intervals:
    """Return the times that both cover."""
    return union((max(a, c), min(b, d)) for a, b in one for c, d in other if max(a, c) < min(b, d))


def seconds(intervals: Intervals) -> float:
    """Return how long they are together."""
    return sum(end - begin for begin, end in intervals)


def at_work(timeline: Timeline, role: str, kinds: tuple[str, ...]) -> Intervals:
    """Return when any process of ``role`` did one of ``kinds``."""
    spans = (span for track in timeline.tracks if track.role == role for span in (*track.main, *track.beside))
    return union((span.begin, span.end) for span in spans if span.kind in kinds)


def main() -> int:
    """Run and report; return 0 where all is as it must be."""
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
