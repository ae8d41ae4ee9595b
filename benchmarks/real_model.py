"""Compare a synchronous and an asynchronous run of a small real model with each other and with the simulator.

    python benchmarks/real_model.py                                    # the quickstart's tiny model, a few minutes
    python benchmarks/real_model.py --manifest examples/smollm2.yaml   # SmolLM2 (make models/smollm2), hours
    python benchmarks/real_model.py --set rollout.replicas=1           # another split, such as the planner's choice

The manifest runs in mode sync. The simulator's models are fitted to this run only, and the simulator predicts both
modes. Then the manifest runs in mode async. The exit status is 1 if the speedup is not above 1, or differs from the
prediction by more than 10 %, or if the final accuracies differ by more than chance. The machine must be otherwise idle.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from run_lines import lines

from asyncflow.api.load import load_job
from asyncflow.sim import Models, scenario_of, simulate

MODES = {
    "sync": "schedule={mode: sync}",
    "async": "schedule={mode: async, update: delayed, swapAt: quota, maxStaleness: 1}",
}
WITHOUT = 4
"""The number of steps at the start that are not counted, because of process starts and the first evaluation."""
NEAR = 0.1
SIGMAS = 3.0
"""The number of standard deviations by which two accuracies may differ by chance."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A real run. step_s: mean seconds of a step; accuracy: the final one, on ``problems`` held-out prompts."""

    step_s: float
    accuracy: float
    problems: int


def run(manifest: Path, folder: Path, settings: Sequence[str]) -> Run:
    """Run a manifest to its end. Raises CalledProcessError if it fails."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _command("run", str(manifest), "--fresh", "--output", str(folder), *_set(settings), log=folder)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return Run(
        step_s=fmean(line["wall_s"] for line in lines(folder)[WITHOUT:]),
        accuracy=summary["eval_accuracy_last"],
        problems=summary["eval_prompts"],
    )


def fitted(folder: Path) -> Models:
    """Return the simulator's models, fitted to a run that has ended."""
    _command("sim", "fit", str(folder), log=folder.with_name("fit"))
    return Models.read(folder / "models.json")


def _set(settings: Sequence[str]) -> list[str]:
    return [part for field in settings for part in ("--set", field)]


def _command(*words: str, log: Path) -> None:
    with log.with_name(f"{log.name}.log").open("w") as out:
        subprocess.run([sys.executable, "-m", "asyncflow", *words], check=True, stdout=out, stderr=out)


def predicted(manifest: Path, settings: Sequence[str], models: Models) -> float:
    """Return the mean seconds of a step in the simulator."""
    job = load_job(manifest, list(settings))
    made = simulate(scenario_of(job, models=models), seed=job.spec.algorithm.seed, spans=False)
    return fmean(step.wall_s for step in made.steps[WITHOUT:])


def alike(one: Run, other: Run) -> bool:
    """Return whether the accuracies are consistent with equally good models, as two proportions."""
    mean = (one.accuracy + other.accuracy) / 2
    spread = math.sqrt(mean * (1 - mean) * (1 / one.problems + 1 / other.problems))
    return abs(one.accuracy - other.accuracy) <= SIGMAS * max(spread, 1 / min(one.problems, other.problems))


def main() -> int:
    """Carry out the runs and check the limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--manifest", type=Path, default=Path("examples/quickstart.yaml"))
    parser.add_argument("--output", type=Path, default=Path("runs/real-model"))
    parser.add_argument("--set", action="append", default=[], help="as for asyncflow run, for both runs")
    options = parser.parse_args()
    settings = {mode: [*options.set, schedule] for mode, schedule in MODES.items()}
    waiting = run(options.manifest, options.output / "sync", settings["sync"])
    models = fitted(options.output / "sync")
    expected = {mode: predicted(options.manifest, settings[mode], models) for mode in MODES}
    flowing = run(options.manifest, options.output / "async", settings["async"])
    gain, expected_gain = waiting.step_s / flowing.step_s, expected["sync"] / expected["async"]
    print("| mode | step | simulator, fitted to sync | accuracy |\n|---|---|---|---|")
    for mode, made in (("sync", waiting), ("async", flowing)):
        print(f"| {mode} | {made.step_s:.3f} s | {expected[mode]:.3f} s | {made.accuracy:.3f} |")
    print(f"sync over async: {gain:.3f}, by the simulator {expected_gain:.3f}")
    return 0 if gain > 1 and abs(gain / expected_gain - 1) <= NEAR and alike(waiting, flowing) else 1


if __name__ == "__main__":
    sys.exit(main())
