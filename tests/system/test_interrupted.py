"""A run that is ended in order keeps the counts of what it did until then, also in its sinks."""

import json
import signal
import sys
import time
from pathlib import Path

import pytest
from one_run import start, wait_for_step

sys.path.insert(0, str(Path(__file__).parents[1] / "telemetry"))
from sinks_world import wandb_records

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


def test_a_run_that_is_interrupted_keeps_its_counts(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    sinks = "telemetry.sinks=[{kind: wandb, options: {mode: offline}}]"
    settings = ["algorithm.steps=20000", "evaluation.every=0", "limits.stopSeconds=60", sinks]
    run = start("counting.yaml", folder, settings)
    wait_for_step(folder, 3, run)
    while not (folder / "sinks" / "wandb" / "cursor.json").exists():
        assert run.poll() is None
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    said, _ = run.communicate(timeout=120)
    assert run.returncode == 128 + signal.SIGINT, said.decode()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert json.loads((folder / "rewards.json").read_text())["scored"] >= sum(line["samples"] for line in lines)
    (file,) = folder.glob("sinks/wandb/wandb/offline-run-*/run-*.wandb")
    items = [item for record in wandb_records(file) for item in record.history.item]
    steps = {int(item.value_json) for item in items if (item.key or "/".join(item.nested_key)) == "asyncflow/step"}
    assert steps >= {line["step"] for line in lines}
