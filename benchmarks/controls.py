"""Run the quickstart in every mode, and controls: each mode must learn equally well, and noise must teach nothing.

    python benchmarks/controls.py --seeds 1 2 3
    python benchmarks/controls.py --seeds 1 2 3 --runs sync "verl 4, decoupled"

All runs except ``half`` have the same model, data and steps, and so the same number of samples. Figures are means over
the seeds, on the manifest's held-out prompts. The runs and columns are:

* ``sync``: generation and training take turns.
* ``shuffled``: rewards are permuted within each group.
* ``decoupled``: ``old: recompute`` with truncated importance weights of tokens.
* ``lagged``: the old policy is that of one step before.
* ``lag 8``: weights are published every 8 steps, so that tokens are 6 to 8 steps stale on average.
* ``half``: half of the samples, before every run has learned everything.
* staleness: the maximum of a sample's oldest and newest token, and the mean of tokens, in steps, of the stalest run.
* effective: the mean of ``correction_ess`` over the steps, 1 without a correction.

For every run, the recorded version of each token is compared with the window of its mode, and the trained samples with
those in the ledger.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from run_lines import lines

from asyncflow.api.load import load_job
from asyncflow.api.names import TRAIN
from asyncflow.flow.schedule import Schedule
from asyncflow.queue.ledger.audit import Auditor
from asyncflow.queue.ledger.log import read_ledger
from asyncflow.replay.history import RunHistory
from asyncflow.training.recording import ranks_of, read_records

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
"""The manifest and the fields to set, by the name of the run."""
KINDS = ("accuracy", "greedy")
MEANS = (*(f"eval_{kind}_{end}" for kind in KINDS for end in ("first", "last")), "effective", "wall_s")
STALENESS = ("staleness_start_max", "staleness_end_max", "staleness_token_mean")
WITHIN = 0.03
NOISE = 0.05
"""The largest accepted rise of accuracy with shuffled rewards."""
WORSE = 0.10
"""The least loss of accuracy that such stale samples must show after half of the samples."""


def run(name: str, manifest: Path, fields: Sequence[str], *, seed: int, output: Path) -> dict[str, float]:
    """Run a manifest with fields and a seed, in a folder named after both, and return its summary."""
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


def broken_promises(folder: Path) -> list[str]:
    """Return the violations of the mode's guarantees by tokens and samples of a run, one of each kind.

    A sample of D_k has only tokens of versions in the window of k, older before newer versions. It has tokens of one
    version unless ``swapAt`` is ``token``. The samples of all D_k are exactly those that the ledger counts as trained.
    """
    spec = load_job(folder / "job.yaml").spec
    schedule, auditor = Schedule.of(spec), Auditor()
    for event in read_ledger(folder / "ledger"):
        auditor.see(event)
    history = RunHistory.of([list(read_records(folder, rank)) for rank in ranks_of(folder)])
    wrong = {}
    for step, recorded in history.steps.items():
        window = schedule.window(step)
        for sample in recorded.samples:
            made = [run.step for run in sample.runs] or [window.oldest]
            if not window.oldest <= min(made) <= max(made) <= min(window.newest, step - 1):
                wrong["window"] = f"{sample.key} of step {step} has tokens of versions {made}"
            if made != sorted(made):
                wrong["order"] = f"{sample.key} of step {step} has tokens of versions {made}, one before an older one"
            if any(each % schedule.sync_every for each in made):
                wrong["published"] = f"{sample.key} of step {step} has tokens of versions {made}, one never published"
            if spec.schedule.swap_at != "token" and len(set(made)) > 1:
                wrong["mixed"] = f"{sample.key} of step {step} has tokens of several versions, {made}"
    trained = Counter(sample.key for recorded in history.steps.values() for sample in recorded.samples)
    if trained != +auditor.trained(TRAIN):
        wrong["ledger"] = "the samples of the trainer's records are not those that the ledger counts as trained"
    oldest = max(
        step - 1 - min((run.step for run in sample.runs), default=step - 1)
        for step, recorded in history.steps.items()
        for sample in recorded.samples
    )
    reported = max(line["staleness_start_max"] for line in lines(folder))
    if oldest != reported:
        wrong["reported"] = f"the oldest token is {oldest} steps stale, and the driver reports {reported:g}"
    return list(wrong.values())


def main() -> int:
    """Run the controls, print the table, and return 0 if all limits are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--output", type=Path, default=Path("runs/controls"))
    parser.add_argument("--runs", metavar="RUN", choices=VARIANTS, nargs="+", default=list(VARIANTS))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    broken: list[str] = []
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
        for seed in options.seeds:
            broken += [f"{name}, seed {seed}: {what}" for what in broken_promises(options.output / f"{name}-{seed}")]
    prompts = summaries[0]["eval_prompts"]
    print(f"\n{prompts} held-out prompts, seeds {options.seeds}")
    print("\n".join(broken) or "every token is of a version that its mode promises, and every sample was trained once")
    return 0 if judged(means) and prompts >= 500 and not broken else 1


def judged(means: dict[str, dict[str, float]]) -> bool:
    """Print the results with their limits, and return whether all are met."""
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
    return all(kept)


if __name__ == "__main__":
    sys.exit(main())
