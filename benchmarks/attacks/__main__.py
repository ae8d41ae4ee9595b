"""Attacks what must never lose a row, or a run: each attack again and again, with other seeds.

    python benchmarks/attacks --seeds 1 20                      # all of them
    python benchmarks/attacks full-disk only-read --seeds 1 5
    make attacks SEEDS="1 20"

An attack has failed when no row is lost, none comes twice, and the run goes on, or says in one sentence why not. Prints
a line for each that was done, and a table; ends with status 1 where one succeeded. Needs a C compiler.
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
    """Do one attack; return what was done, and the harm that it did, nothing if it failed."""
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
    """Do the attacks that were asked for."""
    names = [*on_queues.ATTACKS, *on_jobs.ATTACKS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"of {', '.join(names)}; all by default")
    parser.add_argument("--seeds", type=int, nargs=2, default=(1, 20), metavar=("FIRST", "LAST"))
    parser.add_argument("--keep", type=Path, help="keep the folders of attacks that succeeded here")
    options = parser.parse_args()
    if unknown := set(options.attacks) - set(names):
        parser.error(f"there is no attack {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    seeds = range(options.seeds[0], options.seeds[1] + 1)
    succeeded: dict[str, list[int]] = {name: [] for name in options.attacks or names}
    took: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="asyncflow-attacks-") as place:
        made = build(Path(place))
        for name, wins in succeeded.items():
            began = time.monotonic()
            for seed in seeds:
                folder = Path(place) / f"{name}-{seed}"
                folder.mkdir()
                done, harm = attack(name, seed, folder, made)
                print(f"{name} {seed}: {done}: {harm or 'survived'}", flush=True)
                if harm:
                    wins.append(seed)
                    if options.keep is not None:
                        shutil.copytree(folder, options.keep / folder.name, dirs_exist_ok=True)
                shutil.rmtree(folder)
            took[name] = time.monotonic() - began
    print(_table(succeeded, seeds, took))
    return int(any(succeeded.values()))


def _table(succeeded: dict[str, list[int]], seeds: Sequence[int], took: dict[str, float]) -> str:
    lines = ["| attack | times | survived | seeds that did not | minutes |", "|---|---|---|---|---|"]
    for name, wins in succeeded.items():
        survived = len(seeds) - len(wins)
        lines.append(f"| {name} | {len(seeds)} | {survived} | {wins or ''} | {took[name] / 60:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
