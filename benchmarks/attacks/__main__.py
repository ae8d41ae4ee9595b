"""Attack queues and jobs, which must never lose a row or a run; each attack is repeated with other seeds.

    python benchmarks/attacks --seeds 1 20                      # all of them
    python benchmarks/attacks full-disk only-read --seeds 1 5
    make attacks SEEDS="1 20"

A queue or job survives an attack if no row is lost or duplicated, and the run continues or reports in one sentence why
it cannot. Prints a line for each attack, and a table; the exit status is 1 if an attack did harm. Needs a C compiler.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import on_jobs
import on_queues
from jobs import Harmed, Job
from shim import Shim, build


def attack(name: str, seed: int, folder: Path, made: Path) -> tuple[str, str]:
    """Carry out one attack; return a description of its actions and of its harm, "" for no harm."""
    shim, dice = Shim(made, folder), random.Random(f"{name} {seed}")
    if name in on_queues.ATTACKS:
        try:
            return on_queues.ATTACKS[name](folder, dice, shim), ""
        except Harmed as harm:
            return "", str(harm)
    job = Job(folder, dice, env=shim.env)
    try:
        on_jobs.ATTACKS[name](job, shim)
    except Harmed as harm:
        return "; ".join(job.done), str(harm)
    finally:
        shim.heal()
        job.end()
    return "; ".join(job.done), ""


def main() -> int:
    """Carry out the attacks that the command line names."""
    names = [*on_queues.ATTACKS, *on_jobs.ATTACKS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"one of {', '.join(names)}; all by default")
    parser.add_argument("--seeds", type=int, nargs=2, default=(1, 20), metavar=("FIRST", "LAST"))
    parser.add_argument("--keep", type=Path, help="keep the folders of harmful attacks here")
    options = parser.parse_args()
    if unknown := set(options.attacks) - set(names):
        parser.error(f"there is no attack {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    seeds = range(options.seeds[0], options.seeds[1] + 1)
    succeeded: dict[str, list[int]] = {name: [] for name in options.attacks or names}
    took: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="asyncflow-attacks-") as place:
        made = build(Path(place))
        for name, harmful in succeeded.items():
            began = time.monotonic()
            for seed in seeds:
                folder = Path(place) / f"{name}-{seed}"
                folder.mkdir()
                done, harm = attack(name, seed, folder, made)
                print(f"{name} {seed}: {done}: {harm or 'survived'}", flush=True)
                if harm:
                    harmful.append(seed)
                    if options.keep is not None:
                        shutil.copytree(folder, options.keep / folder.name, dirs_exist_ok=True)
                shutil.rmtree(folder)
            took[name] = time.monotonic() - began
    print(_table(succeeded, seeds, took))
    return int(any(succeeded.values()))


def _table(succeeded: dict[str, list[int]], seeds: Sequence[int], took: dict[str, float]) -> str:
    lines = ["| attack | times | survived | seeds that did not | minutes |", "|---|---|---|---|---|"]
    for name, harmful in succeeded.items():
        survived = len(seeds) - len(harmful)
        lines.append(f"| {name} | {len(seeds)} | {survived} | {harmful or ''} | {took[name] / 60:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
