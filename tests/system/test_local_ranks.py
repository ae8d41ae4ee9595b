"""Several ranks of one replica of the trainer: a pod's worth of processes that live and die together."""

import json
import os
import signal
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
from one_run import counted_once, finish, start, wait_for_step

pytestmark = [pytest.mark.process, pytest.mark.timeout(420)]

STEPS = 30
SETTINGS = [
    f"algorithm.steps={STEPS}",
    "algorithm.promptsPerStep=4",
    "trainer.ranksPerReplica=2",
    "trainer.backend.options={capacity: 1024}",
    "evaluation.every=30",
    "storage.checkpoints.every=3",
    "rollout.leaseSeconds=2",
]


def replica(folder: Path) -> tuple[psutil.Process, str]:
    """Return the process that the supervisor started for the trainer, and where it serves HTTP."""
    record = json.loads((folder / "run" / "processes.json").read_text())
    (entry,) = (each for each in record["processes"] if each["role"] == "trainer")
    return psutil.Process(entry["pid"]), entry["http"]


def ask(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        text: str = answer.read().decode()
        return text


def until_ready(folder: Path, *, other_than: psutil.Process) -> tuple[psutil.Process, str]:
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline:
        try:
            process, http = replica(folder)
            if process != other_than and ask(f"{http}/readyz") == "ready\n":
                return process, http
        except (psutil.NoSuchProcess, OSError):  # it may end while it answers
            time.sleep(0.1)
    logs = [f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted((folder / "logs").iterdir())]
    raise AssertionError("no other replica became ready\n" + "\n".join(logs))


def test_ranks_of_one_replica_fail_together_and_lose_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = start("counting.yaml", folder, SETTINGS)
    wait_for_step(folder, 3, run)
    launcher, http = replica(folder)
    ranks = launcher.children()
    assert [[rank.environ()[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] for rank in ranks] == [
        ["0", "0", "2"],
        ["1", "1", "2"],
    ]
    assert (ask(f"{http}/healthz"), ask(f"{http}/readyz")) == ("ok\n", "ready\n")
    metrics = ask(f"{http}/metrics")
    assert all(f'asyncflow_trainer_step{{rank="{rank}"}}' in metrics for rank in "01")

    ranks[1].kill()
    _, alive = psutil.wait_procs([launcher, *ranks], timeout=20)
    assert not alive, "a rank is left, or its launcher"
    second, _ = until_ready(folder, other_than=launcher)
    assert "rank 1 ended with SIGKILL" in (folder / "logs" / "trainer-0.log").read_text()

    ranks = second.children()
    second.kill()
    _, alive = psutil.wait_procs(ranks, timeout=20)
    assert not alive, "a rank outlived its launcher"
    third, _ = until_ready(folder, other_than=second)

    ranks = third.children()
    tree = [process for process in psutil.Process(run.pid).children(recursive=True) if process.pid != run.pid]
    assert {rank.pid for rank in ranks} <= {process.pid for process in tree}
    os.kill(run.pid, signal.SIGINT)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGINT, said.decode()
    assert not [process for process in tree if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]

    finish(start("counting.yaml", folder, ["trainer.ranksPerReplica=1"], "--resume"), within_s=150)
    counted_once(folder, STEPS * 4 * 4)
