"""A run that is ended in order keeps the counts of what it did until then."""

import json
import signal
from pathlib import Path

import pytest
from one_run import start, wait_for_step

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


def test_a_run_that_is_interrupted_keeps_its_counts(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = start("counting.yaml", folder, ["algorithm.steps=2000", "evaluation.every=0"])
    wait_for_step(folder, 3, run)
    run.send_signal(signal.SIGINT)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGINT, said.decode()
    trained = sum(json.loads(line)["samples"] for line in (folder / "metrics.jsonl").read_text().splitlines())
    assert json.loads((folder / "rewards.json").read_text())["scored"] >= trained
