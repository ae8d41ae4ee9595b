"""``asyncflow scale`` and a real run: rollouts join, hand on what runs and leave; each sample is trained once."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from one_run import counted_once, finish, start, wait_for_step

from asyncflow.cli import invoke
from asyncflow.local.record import Placed, load_record

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

STEPS = 12
SETTINGS = [
    f"algorithm.steps={STEPS}",
    "algorithm.promptsPerStep=4",
    "evaluation=null",
    "schedule.swapAt=token",
    "schedule.maxStaleness=2",
    "rollout.replicas=0",
    "rollout.maxReplicas=3",
    "rollout.engine.options={token_s: 0.1}",
    "storage.checkpoints.every=2",
]


def rollouts(folder: Path) -> list[Placed]:
    record = load_record(folder)
    return [placed for placed in record.processes if placed.role == "rollout"] if record else []


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited 60 s for {what}"
        time.sleep(0.05)


def test_rollouts_join_a_run_that_waits_for_some_leave_it_and_come_back(tmp_path, capsys) -> None:
    folder = tmp_path / "run"
    run = start("counting.yaml", folder, SETTINGS)
    until(lambda: (folder / "run" / "processes.json").exists(), "the run to begin")
    assert rollouts(folder) == []
    assert invoke(["scale", str(folder), "rollout=2"]) == 0
    wait_for_step(folder, 2, run)
    assert invoke(["scale", str(folder), "rollout=0"]) == 0
    until(lambda: {placed.state for placed in rollouts(folder)} == {"left"}, "both to leave")
    for index in range(2):
        assert "left; " in (folder / "logs" / f"rollout-{index}.log").read_text()
    assert run.poll() is None
    assert invoke(["scale", str(folder), "rollout=3"]) == 0
    finish(run, within_s=120)
    counted_once(folder, STEPS * 4 * 4)
    assert [placed.attempt for placed in rollouts(folder)] == [1, 1, 0]
    assert json.loads((folder / "summary.json").read_text())["trainer_attempts"] == 1
    told = capsys.readouterr().out
    invoke(["doctor", str(folder)])
    assert "lost-processes" not in capsys.readouterr().out
    assert re.search(
        r"rollout: 2 wanted of 0 to 3 \(requested by asyncflow scale\); (none exists|[12] (start|run))", told
    )
