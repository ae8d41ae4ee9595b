"""A role that refuses its input ends the run at once, with its words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

COUNTING = Path(__file__).parents[2] / "examples" / "counting.yaml"


@pytest.mark.process
@pytest.mark.parametrize(
    ("role", "place"), [("trainer", "trainer.backend.options"), ("rollout", "rollout.engine.options")]
)
def test_an_unknown_option_of_a_plugin_is_refused(tmp_path: Path, role: str, place: str) -> None:
    settings = ["--set", f"{place}={{quick: true}}", "--set", "rollout.replicas=1"]
    command = [sys.executable, "-m", "asyncflow", "run", str(COUNTING), "--output", str(tmp_path / "run"), *settings]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 1
    assert f"{role}-0 ended with exit status 2" in run.stderr
    assert f"spec.{place}: unknown option quick. Known: " in run.stderr
    record = json.loads((tmp_path / "run" / "run" / "processes.json").read_text())
    assert {placed["restarts"] for placed in record["processes"]} == {0}


@pytest.mark.process
def test_a_device_that_the_machine_does_not_have_ends_the_run(tmp_path: Path) -> None:
    quickstart = COUNTING.with_name("quickstart.yaml")
    settings = ["--set", "trainer.accelerator={profile: ascend-a2, count: 1}", "--set", "rollout.replicas=1"]
    command = [sys.executable, "-m", "asyncflow", "run", str(quickstart), "--output", str(tmp_path / "run"), *settings]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 1
    assert "trainer-0 ended with exit status 2" in run.stderr
    assert "spec.trainer.accelerator: there is no npu device here" in run.stderr


@pytest.mark.process
def test_a_task_without_variance_ends_the_run_with_that_reason(tmp_path: Path) -> None:
    settings = ["--set", "algorithm.filterZeroVariance=drop", "--set", "algorithm.maxFilteredBatches=2"]
    command = [sys.executable, "-m", "asyncflow", "run", str(COUNTING), "--output", str(tmp_path / "run"), *settings]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 1
    assert "17 groups of step 1 were dropped: within each, all rewards were equal, the last time 0" in run.stderr
