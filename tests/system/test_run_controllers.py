"""A whole job whose queue has three controllers, each of which is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from asyncflow.queue.ledger.audits import audit_ledgers

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "counting.yaml"
STEPS, SAMPLES = 20, 20 * 8 * 4
SETTINGS = [
    "transferQueue.controllers=3",
    f"algorithm.steps={STEPS}",
    "evaluation.every=10",
    "rollout.engine.options={token_s: 0.02}",
]


def kill(folder: Path, index: int) -> None:
    record = json.loads((folder / "run" / "processes.json").read_text())
    place = {"role": "controller", "index": index}
    os.kill(next(entry["pid"] for entry in record["processes"] if place.items() <= entry.items()), signal.SIGKILL)


def wait_for_step(folder: Path, step: int, run: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
        assert run.poll() is None, "the run ended too early"
        assert time.monotonic() < deadline, f"step {step} did not come"
        time.sleep(0.05)


def test_every_sample_counts_once_although_each_controller_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    command = [sys.executable, "-m", "asyncflow", "run", str(EXAMPLE), "--output", str(folder), *words]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    for step, index in ((2, 1), (6, 0), (10, 2)):
        wait_for_step(folder, step, run)
        kill(folder, index)
    said, _ = run.communicate(timeout=200)
    assert run.returncode == 0, said.decode()
    report = audit_ledgers(folder / "ledger")
    assert report.ok, report.problems
    assert (report.dispatched, report.trained, report.lost, report.duplicated) == (SAMPLES, SAMPLES, 0, 0)
    newest = max((folder / "checkpoints").glob("step-*/manifest.json")).parent
    counts = np.load(newest / "counts.npy", allow_pickle=False)
    assert (counts[:SAMPLES] == 1).all()
    assert not counts[SAMPLES:].any()
