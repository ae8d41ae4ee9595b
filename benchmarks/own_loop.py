"""Train the quickstart with ``examples/own/loop.py``; kill the loop with its job halfway, and start it again.

    python benchmarks/own_loop.py

The benchmark fails if the accuracy on held-out prompts stays below ``--least``, or if, by the ledgers, a sample is not
counted exactly once in the final weights.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from asyncflow.api.load import load_job
from asyncflow.local.folder import holds_run
from asyncflow.queue.ledger.audit import audit_ledgers

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "examples/quickstart.yaml"


def train(folder: Path, *, kill_at: int | None) -> None:
    """Run the loop to its end, or kill it after ``kill_at`` steps, which also ends its job.

    Raises RuntimeError if the loop ends in another way.
    """
    command = [sys.executable, str(ROOT / "examples/own/loop.py"), str(QUICKSTART), str(folder)]
    with subprocess.Popen(command) as loop:
        try:
            while loop.poll() is None and kill_at is not None and done(folder) < kill_at:
                time.sleep(0.1)
            if kill_at is not None:
                loop.send_signal(signal.SIGKILL)
            status = loop.wait()
        finally:
            loop.kill()
    if status != (0 if kill_at is None else -signal.SIGKILL):
        raise RuntimeError(f"the loop ended with exit status {status} after {done(folder)} steps; see {folder}.log")


def done(folder: Path) -> int:
    """Return the number of steps done by all attempts."""
    metrics = folder / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def main() -> int:
    """Run the benchmark and print the result; return 0 if all checks hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kill-at", type=int, default=33, help="steps after which the loop is killed")
    parser.add_argument("--least", type=float, default=0.95, help="accuracy that it must reach")
    parser.add_argument("--output", type=Path, default=Path("runs/own-loop"))
    options = parser.parse_args()
    folder = options.output.absolute()
    if holds_run(folder):
        shutil.rmtree(folder)
    began = time.monotonic()
    train(folder, kill_at=options.kill_at)
    killed_at = done(folder)
    train(folder, kill_at=None)
    took = time.monotonic() - began
    algorithm = load_job(QUICKSTART).spec.algorithm
    samples = algorithm.steps * algorithm.prompts_per_step * algorithm.group_size
    audit = audit_ledgers(folder / "ledger")
    once = audit.ok and (audit.trained, audit.lost, audit.duplicated) == (samples, 0, 0)
    summary = json.loads((folder / "summary.json").read_text())
    first, last = summary["eval_accuracy_first"], summary["eval_accuracy_last"]
    print(
        f"accuracy {first:.3f} to {last:.3f} in {algorithm.steps} steps and {took:.0f} s, killed after {killed_at};"
        f" {audit.trained} of {samples} samples trained, {audit.lost} lost, {audit.duplicated} twice"
    )
    for problem in audit.problems:
        print(problem)
    return 0 if once and last >= options.least else 1


if __name__ == "__main__":
    sys.exit(main())
