"""The quickstart, the other modes and the controls: that each mode learns as much, and that noise teaches nothing.

    python benchmarks/controls.py --seeds 1 2 3
    python benchmarks/controls.py --seeds 1 2 3 --runs sync "verl 4, decoupled"

All runs but those called ``half`` have the same model, data and steps, so as many samples; figures are means over the
seeds, on the manifest's held-out prompts. ``sync``: one step after another. ``shuffled``: rewards are permuted within
each group. ``decoupled``: ``old: recompute`` with truncated weights of tokens; ``lagged``: the old policy of one step
behind. ``lag 8``: weights are published every 8 steps, so that tokens are 6 to 8 steps stale on average; ``half``: with
half of the samples, before all have learned everything. Staleness: the greatest of a sample's oldest and newest token,
and the mean of tokens, in steps, of the run that has most. Effective: the mean of ``correction_ess`` over the steps, 1
without a correction.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from run_lines import lines

from asyncflow.api.job import RLJob
from asyncflow.api.load import load

QUICKSTART = Path("examples/quickstart.yaml")
SYNC = ["schedule.update=sync", "schedule.maxStaleness=0"]
STAGGERED = ["schedule.update=staggered", "schedule.stalenessThreshold=0.5"]
DECOUPLED = ["algorithm.old=recompute", "algorithm.correction={kind: truncate, level: token, high: 2.0}"]
HALF = ["algorithm.steps=30"]
LAG_8 = [f"schedule.{field}" for field in ("swapAt=sequence", "syncEvery=8", "maxStaleness=16", "stalenessThreshold=1")]
MODES = {
    "sync": (QUICKSTART, ["schedule.mode=sync", *SYNC]),
    "periodic": (QUICKSTART, ["schedule.mode=periodic", *SYNC]),
    "periodic, lagged": (QUICKSTART, ["schedule.mode=periodic", *SYNC, "algorithm.old=lagged"]),
    "quickstart": (QUICKSTART, []),
    "staggered": (QUICKSTART, [*STAGGERED, "schedule.swapAt=sequence"]),
    "staggered token": (QUICKSTART, [*STAGGERED, "schedule.swapAt=token"]),
    **{f"verl {mode}": (Path(f"examples/verl/mode-{mode}.yaml"), []) for mode in range(1, 5)},
    "verl 4, decoupled": (Path("examples/verl/mode-4.yaml"), DECOUPLED),
}
VARIANTS = {
    **MODES,
    "shuffled": (QUICKSTART, ["reward.shuffle=true"]),
    "sync, half": (QUICKSTART, ["schedule.mode=sync", *SYNC, *HALF]),
    "lag 8, half": (QUICKSTART, [*LAG_8, *HALF]),
}
"""By name: manifest, and fields that are set."""
KINDS = ("accuracy", "greedy")
MEANS = (*(f"eval_{kind}_{end}" for kind in KINDS for end in ("first", "last")), "effective", "wall_s")
STALENESS = ("staleness_start_max", "staleness_end_max", "staleness_token_mean")
WITHIN = 0.03
NOISE = 0.05
"""Most that may seem to be learned from shuffled rewards."""
WORSE = 0.10
"""Least that samples so stale are behind after half of them."""


def run(name: str, manifest: Path, fields: Sequence[str], *, seed: int, output: Path) -> dict[str, float]:
    """Run a manifest with fields and a seed, into a folder of that name, and give its summary."""
    folder = output / f"{name}-{seed}"
    settings = [*fields, f"algorithm.seed={seed}", f"data.train.seed={seed}"]
    command = [sys.executable, "-m", "asyncflow", "run", str(manifest), "--output", str(folder), "--fresh"]
    command += [word for setting in settings for word in ("--set", setting)]
    log = output / f"{name}-{seed}.log"
    with log.open("w") as stream:
        subprocess.run(command, check=True, stdout=stream, stderr=stream, timeout=600)
    summary: dict[str, float] = json.loads((folder / "summary.json").read_text())
    steps = lines(folder)
    return summary | {"effective": statistics.fmean(step.get("correction_ess", 1.0) for step in steps)}


def allowed(manifest: Path, fields: list[str]) -> int:
    """Return by how many steps the oldest token of a sample may be stale."""
    job = load(manifest, fields)
    assert isinstance(job, RLJob)
    return job.spec.schedule.lag


def main() -> int:
    """Run everything, print the table, and give 0 where the controls hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--output", type=Path, default=Path("runs/controls"))
    parser.add_argument("--runs", metavar="RUN", choices=VARIANTS, nargs="+", default=list(VARIANTS))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    means: dict[str, dict[str, float]] = {}
    stale: dict[str, dict[str, float]] = {}
    print("| run | accuracy first | last | greedy first | last | oldest token | newest | mean | effective | wall s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in options.runs:
        summaries = [run(name, *VARIANTS[name], seed=seed, output=options.output) for seed in options.seeds]
        means[name] = {field: statistics.fmean(summary[field] for summary in summaries) for field in MEANS}
        stale[name] = {field: max(summary[field] for summary in summaries) for field in STALENESS}
        cells = [f"{means[name][field]:.3f}" for field in MEANS[:4]]
        cells += [f"{stale[name][field]:.3g}" for field in STALENESS]
        cells += [f"{means[name]['effective']:.3f}", f"{means[name]['wall_s']:.0f}"]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    prompts = summaries[0]["eval_prompts"]
    print(f"\n{prompts} held-out prompts, seeds {options.seeds}")
    return 0 if judged(means, stale) and prompts >= 500 else 1


def judged(means: dict[str, dict[str, float]], stale: dict[str, dict[str, float]]) -> bool:
    """Print how what was run compares with its bars, and return whether it keeps them."""
    kept = []
    ends = {name: each["eval_accuracy_last"] for name, each in means.items()}
    if "shuffled" in means:
        rise = max(means["shuffled"][f"eval_{kind}_last"] - means["shuffled"][f"eval_{kind}_first"] for kind in KINDS)
        print(f"shuffled rewards: {rise:+.3f} (at most +{NOISE})")
        kept.append(rise <= NOISE)
    if "sync" in means:
        apart = max(abs(end - ends["sync"]) for name, end in ends.items() if name in MODES)
        print(f"the modes end within {apart:.3f} of sync (at most {WITHIN})")
        kept.append(apart <= WITHIN)
    if means.keys() >= {"sync, half", "lag 8, half"}:
        lost = ends["sync, half"] - ends["lag 8, half"]
        print(f"lag 8 is {lost:.3f} behind after half of the samples (at least {WORSE})")
        kept.append(lost >= WORSE)
    broken = [name for name in means if stale[name]["staleness_start_max"] > allowed(*VARIANTS[name])]
    print(f"staler than promised: {', '.join(broken) or 'none'}")
    return all([*kept, not broken])


if __name__ == "__main__":
    sys.exit(main())
