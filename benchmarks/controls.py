"""The quickstart and its controls: what it learns, that noise teaches nothing, that asynchrony changes nothing.

    python benchmarks/controls.py --seeds 1 2 3

Each run is the quickstart's manifest with a few fields set; figures are means over the seeds, on the manifest's
held-out prompts. ``shuffled``: rewards are permuted within each group. ``sync``: the same steps, so as many samples,
one after another.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

MANIFEST = Path("examples/quickstart.yaml")
VARIANTS = {
    "quickstart": [],
    "shuffled": ["reward.shuffle=true"],
    "sync": ["schedule.mode=sync", "schedule.update=sync", "schedule.maxStaleness=0"],
}
WITHIN = 0.05


def run(name: str, seed: int, output: Path) -> dict[str, float]:
    """Run one variant and give its summary."""
    folder = output / f"{name}-{seed}"
    settings = [*VARIANTS[name], f"algorithm.seed={seed}", f"data.train.seed={seed}"]
    command = [sys.executable, "-m", "asyncflow", "run", str(MANIFEST), "--output", str(folder), "--fresh"]
    command += [word for setting in settings for word in ("--set", setting)]
    log = output / f"{name}-{seed}.log"
    with log.open("w") as stream:
        subprocess.run(command, check=True, stdout=stream, stderr=stream, timeout=600)
    summary: dict[str, float] = json.loads((folder / "summary.json").read_text())
    return summary


def main() -> int:
    """Run everything, print the table, and give 0 where the controls hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--output", type=Path, default=Path("runs/controls"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    means: dict[str, dict[str, float]] = {}
    print("| run | accuracy first | accuracy last | greedy first | greedy last | wall s |\n|---|---|---|---|---|---|")
    fields = ["eval_accuracy_first", "eval_accuracy_last", "eval_greedy_first", "eval_greedy_last", "wall_s"]
    for name in VARIANTS:
        summaries = [run(name, seed, options.output) for seed in options.seeds]
        means[name] = {field: statistics.fmean(summary[field] for summary in summaries) for field in fields}
        cells = [f"{means[name][field]:.3f}" for field in fields[:-1]] + [f"{means[name]['wall_s']:.0f}"]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    prompts = summaries[0]["eval_prompts"]
    rise = {
        kind: means["shuffled"][f"eval_{kind}_last"] - means["shuffled"][f"eval_{kind}_first"]
        for kind in ("accuracy", "greedy")
    }
    apart = abs(means["sync"]["eval_accuracy_last"] - means["quickstart"]["eval_accuracy_last"])
    print(f"\n{prompts} held-out prompts, seeds {options.seeds}")
    print(f"shuffled rewards: accuracy {rise['accuracy']:+.3f}, greedy {rise['greedy']:+.3f} (at most +{WITHIN})")
    print(f"sync and asynchronous end {apart:.3f} apart (at most {WITHIN})")
    return 0 if max(rise.values()) <= WITHIN and apart <= WITHIN and prompts >= 500 else 1


if __name__ == "__main__":
    sys.exit(main())
