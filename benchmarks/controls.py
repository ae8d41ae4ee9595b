"""The quickstart, the other modes and the controls: that each mode learns as much, and that noise teaches nothing.

    python benchmarks/controls.py --seeds 1 2 3

All runs have the same model, data and steps, so as many samples; figures are means over the seeds, on the manifest's
held-out prompts. ``sync``: one step after another. ``shuffled``: rewards are permuted within each group. Staleness: the
greatest of a sample's oldest and newest token, and the mean of tokens, in steps, of the run that has most.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from asyncflow.api.job import RLJob
from asyncflow.api.load import load

QUICKSTART = Path("examples/quickstart.yaml")
SYNC = ["schedule.update=sync", "schedule.maxStaleness=0"]
STAGGERED = ["schedule.update=staggered", "schedule.stalenessThreshold=0.5"]
VARIANTS = {
    "sync": (QUICKSTART, ["schedule.mode=sync", *SYNC]),
    "periodic": (QUICKSTART, ["schedule.mode=periodic", *SYNC]),
    "quickstart": (QUICKSTART, []),
    "staggered": (QUICKSTART, [*STAGGERED, "schedule.swapAt=sequence"]),
    "staggered token": (QUICKSTART, [*STAGGERED, "schedule.swapAt=token"]),
    **{f"verl {mode}": (Path(f"examples/verl/mode-{mode}.yaml"), []) for mode in range(1, 5)},
    "shuffled": (QUICKSTART, ["reward.shuffle=true"]),
}
"""By name: manifest, and fields that are set."""
KINDS = ("accuracy", "greedy")
MEANS = (*(f"eval_{kind}_{end}" for kind in KINDS for end in ("first", "last")), "wall_s")
STALENESS = ("staleness_start_max", "staleness_end_max", "staleness_token_mean")
WITHIN = 0.03
NOISE = 0.05
"""Most that may seem to be learned from shuffled rewards."""


def run(name: str, seed: int, output: Path) -> dict[str, float]:
    """Run one variant and give its summary."""
    folder = output / f"{name}-{seed}"
    manifest, fields = VARIANTS[name]
    settings = [*fields, f"algorithm.seed={seed}", f"data.train.seed={seed}"]
    command = [sys.executable, "-m", "asyncflow", "run", str(manifest), "--output", str(folder), "--fresh"]
    command += [word for setting in settings for word in ("--set", setting)]
    log = output / f"{name}-{seed}.log"
    with log.open("w") as stream:
        subprocess.run(command, check=True, stdout=stream, stderr=stream, timeout=600)
    summary: dict[str, float] = json.loads((folder / "summary.json").read_text())
    return summary


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
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    means: dict[str, dict[str, float]] = {}
    stale: dict[str, dict[str, float]] = {}
    print("| run | accuracy first | last | greedy first | last | oldest token | newest | mean | wall s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in VARIANTS:
        summaries = [run(name, seed, options.output) for seed in options.seeds]
        means[name] = {field: statistics.fmean(summary[field] for summary in summaries) for field in MEANS}
        stale[name] = {field: max(summary[field] for summary in summaries) for field in STALENESS}
        cells = [f"{means[name][field]:.3f}" for field in MEANS[:-1]]
        cells += [f"{stale[name][field]:.3g}" for field in STALENESS] + [f"{means[name]['wall_s']:.0f}"]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    rise = max(means["shuffled"][f"eval_{kind}_last"] - means["shuffled"][f"eval_{kind}_first"] for kind in KINDS)
    ends = {name: means[name]["eval_accuracy_last"] for name in VARIANTS if name != "shuffled"}
    apart = max(abs(end - ends["sync"]) for end in ends.values())
    broken = [name for name, variant in VARIANTS.items() if stale[name]["staleness_start_max"] > allowed(*variant)]
    prompts = summaries[0]["eval_prompts"]
    print(f"\n{prompts} held-out prompts, seeds {options.seeds}")
    print(f"shuffled rewards: {rise:+.3f} (at most +{NOISE})")
    print(f"the modes end within {apart:.3f} of sync (at most {WITHIN})")
    print(f"staler than promised: {', '.join(broken) or 'none'}")
    return 0 if rise <= NOISE and apart <= WITHIN and not broken and prompts >= 500 else 1


if __name__ == "__main__":
    sys.exit(main())
