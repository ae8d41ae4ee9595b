"""A whole job whose samples lie in Mooncake Store, or in Redis, and whose holders are killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import debian
from asyncflow.queue.ledger.audit import audit_ledger

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "counting.yaml"
STEPS, SAMPLES = 20, 20 * 8 * 4
SETTINGS = [f"algorithm.steps={STEPS}", "evaluation.every=10", "rollout.engine.options={token_s: 0.02}"]


def start(folder: Path, *settings: str, env: dict[str, str]) -> subprocess.Popen[bytes]:
    words = [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]
    command = [sys.executable, "-m", "asyncflow", "run", str(EXAMPLE), "--output", str(folder), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **env})


def kill(folder: Path, role: str) -> None:
    record = json.loads((folder / "run" / "processes.json").read_text())
    os.kill(next(entry["pid"] for entry in record["processes"] if entry["role"] == role), signal.SIGKILL)


def wait_for_step(folder: Path, step: int, run: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
        assert run.poll() is None, "the run ended too early"
        assert time.monotonic() < deadline, f"step {step} did not come"
        time.sleep(0.05)


@pytest.mark.parametrize(("backend", "victims"), [("mooncake", ["holder", "master"]), ("redis", ["holder"])])
def test_every_sample_counts_once_although_its_holder_is_killed(
    tmp_path: Path, backend: str, victims: list[str]
) -> None:
    folder = tmp_path / "run"
    run = start(folder, f"transferQueue.backend={backend}", env=debian.environment())
    for number, role in enumerate(victims):
        wait_for_step(folder, 3 + 8 * number, run)
        kill(folder, role)
    said, _ = run.communicate(timeout=200)
    assert run.returncode == 0, said.decode()
    report = audit_ledger(folder / "ledger")
    assert report.ok, report.problems
    assert (report.dispatched, report.trained, report.lost, report.duplicated) == (SAMPLES, SAMPLES, 0, 0)
    newest = max((folder / "checkpoints").glob("step-*/manifest.json")).parent
    counts = np.load(newest / "counts.npy", allow_pickle=False)
    assert (counts[:SAMPLES] == 1).all()
    assert not counts[SAMPLES:].any()


def test_a_store_that_is_not_installed_is_said_once_and_before_anything_starts(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = start(folder, "transferQueue.backend=redis", env={"PATH": str(tmp_path)})
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 2
    assert b"there is no program 'redis-server'" in said
    assert not folder.exists()
