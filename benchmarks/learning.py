"""Check that the examples of algorithms and tools learn their task in time, and learn nothing from shuffled rewards.

    python benchmarks/learning.py --seeds 1
    python benchmarks/learning.py --seeds 1 2 3 --only ppo tools

Each example runs unchanged, and as a control with rewards that are permuted within each group. Figures are on the
manifest's held-out prompts. The exit status is 1 if an example ends below its limit or takes too long, or if a control
learns.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from controls import NOISE, run

SHUFFLED = ["reward.shuffle=true"]
LEARNS = {"ppo": 0.80, "dapo": 0.80, "gspo": 0.80, "dpo": 0.80, "tools": 0.80}
"""The least accuracy at the end of a run."""
BEGINS = {"ppo": 0.40, "dapo": 0.40, "gspo": 0.40, "dpo": 0.40, "tools": 0.30}
"""The largest accuracy at the start of a run."""
WITHIN_S = 180.0
"""The largest duration of a run, in seconds, on two otherwise idle cores."""


def main() -> int:
    """Run the examples, print the table, and return 0 if every limit is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--output", type=Path, default=Path("runs/learning"))
    parser.add_argument("--only", metavar="EXAMPLE", choices=LEARNS, nargs="+", default=list(LEARNS))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    met = True
    print("| example | seed | accuracy first | last | greedy last | wall s | shuffled first | last | met |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in options.only:
        manifest = Path(f"examples/{name}.yaml")
        for seed in options.seeds:
            learned = run(name, manifest, [], seed=seed, output=options.output)
            control = run(f"{name}, shuffled", manifest, SHUFFLED, seed=seed, output=options.output)
            good = (
                learned["eval_accuracy_first"] <= BEGINS[name]
                and learned["eval_accuracy_last"] >= LEARNS[name]
                and learned["wall_s"] <= WITHIN_S
                and control["eval_accuracy_last"] - control["eval_accuracy_first"] <= NOISE
            )
            figures = [learned[f"eval_{field}"] for field in ("accuracy_first", "accuracy_last", "greedy_last")]
            cells = [f"{figure:.3f}" for figure in figures] + [f"{learned['wall_s']:.0f}"]
            cells += [f"{control[f'eval_accuracy_{end}']:.3f}" for end in ("first", "last")]
            print(f"| {name} | {seed} | {' | '.join(cells)} | {'yes' if good else 'NO'} |", flush=True)
            met = met and good
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
