"""One job through what it must survive, in small: it is stopped and killed whole, its clock set, its files damaged."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from one_run import counted_once, finish, start, wait_for_step

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "attacks"))
from shim import Shim, build

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

STEPS = 12
DAY_S = 86_400
SETTINGS = [
    f"algorithm.steps={STEPS}",
    "algorithm.promptsPerStep=4",
    "evaluation.every=6",
    "storage.checkpoints.every=2",
    "rollout.leaseSeconds=2",
    "rollout.engine.options={token_s: 0.02}",
    "limits.activeDeadlineSeconds=200",
]


def pids(folder: Path) -> list[int]:
    record = json.loads((folder / "run" / "processes.json").read_text())
    return [record["supervisor"], *(entry["pid"] for entry in record["processes"] if entry["pid"])]


def test_a_job_goes_on_after_its_tree_was_stopped_and_killed_and_its_files_were_damaged(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    clock = Shim(build(tmp_path), tmp_path) if shutil.which("cc") else None
    run = start("counting.yaml", folder, SETTINGS, env=clock.env if clock else None)
    wait_for_step(folder, 2, run)
    if clock:
        clock.set_clock(30 * DAY_S)
    tree = pids(folder)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in tree:
            os.kill(pid, number)
        time.sleep(3.0 if number == signal.SIGSTOP else 0.0)
    wait_for_step(folder, 5, run)
    run.kill()
    run.communicate(timeout=30)
    lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    (folder / "metrics.jsonl").write_bytes(b"\n".join([lines[0], b"\xff no line", *lines[2:]])[:-40])
    (folder / "events.jsonl").write_bytes((folder / "events.jsonl").read_bytes() + b'{"event":"evaluation","at":1}\n')
    (folder / "lives.json").write_bytes(b"{" * 99)
    (folder / "run" / "processes.json").write_bytes(bytes(4096))
    finish(start("counting.yaml", folder, [*SETTINGS, "transferQueue.storageUnits=1"], "--resume"), within_s=150)
    counted_once(folder, STEPS * 4 * 4)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert 0 < summary["wall_s"] < DAY_S / 24, "the clock went forward by a month meanwhile, and back"
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        json.loads(line)
    assert (folder / "metrics.jsonl.bad").read_bytes() == b"\xff no line\n"
