"""Two of the runs of ``benchmarks/doctor``: a fault in a run that is over, and one of a live job, at its address."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from faults import FAULTS
from runs import doctor, examined, started

pytestmark = pytest.mark.process


def test_leases_that_expire_are_found_in_a_run_that_is_over(tmp_path: Path) -> None:
    planted = FAULTS["stopped-rollout"]
    planted = dataclasses.replace(planted, stops=1, settings={**planted.settings, "algorithm.steps": "4"})
    assert "lease-timeouts" in [finding["name"] for finding in examined(planted, tmp_path / "stopped")]


def test_a_paused_job_is_found_at_its_address_and_shown_by_top(tmp_path: Path) -> None:
    with started(FAULTS["paused"], tmp_path / "paused") as run:
        address = run.address("stalled")
        assert "stalled" in [finding["name"] for finding in doctor(address)]
        shown = [
            subprocess.run(
                [sys.executable, "-m", "asyncflow", "top", target, "--once"],
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            ).stdout
            for target in (address, str(run.folder))
        ]
    for text in shown:
        assert "pace  paused" in text
        assert "rollout-0" in text
        assert "train/rollout" in text
        assert "ValueError: no such server" in text
    assert str(run.folder) in shown[1]
