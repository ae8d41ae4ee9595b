"""Two of the runs of ``benchmarks/doctor``: a fault in a run that is over, and one of a live job, at its address."""

from __future__ import annotations

import dataclasses
import io
import os
import select
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from cases import FAULTS
from rich.console import Console
from runs import examined, started

from asyncflow.doctor.reading import read
from asyncflow.view.render import screen
from asyncflow.view.watch import WatchedDriver, WatchedFolder

pytestmark = pytest.mark.process


def test_leases_that_expire_are_found_in_a_run_that_is_over(tmp_path: Path) -> None:
    planted = FAULTS["stopped-rollout"]
    planted = dataclasses.replace(planted, stops=1, settings={**planted.settings, "algorithm.steps": "4"})
    assert "lease-timeouts" in [finding["name"] for finding in examined(planted, tmp_path / "stopped")]
    known = read(str(tmp_path / "stopped" / "run"))
    assert known.lived["rollout"] > known.lived["trainer"] > 0.0, "two rollouts live longer than one trainer"
    assert sum(known.causes["trainer"].values()) <= known.lived["trainer"]


def test_a_paused_job_is_found_at_its_address_and_shown_by_top(tmp_path: Path) -> None:
    with started(FAULTS["paused"], tmp_path / "paused") as run:
        address = run.address("stalled")
        folder = WatchedFolder(run.folder).frame()
        driver = WatchedDriver(f"http://{address}").frame()
        left = left_by_q(address)
    assert left == (0, True)
    assert folder.name == driver.name == "pace"
    assert {(each.role, each.index) for each in driver.placed} < {(each.role, each.index) for each in folder.placed}
    for frame in (folder, driver):
        console = Console(width=160, record=True, file=io.StringIO(), force_terminal=False)
        console.print(screen(frame))
        shown = console.export_text()
        assert "pace  paused" in shown
        assert "train/rollout" in shown
        assert "ValueError: no such server" in shown


def left_by_q(address: str) -> tuple[int, bool]:
    """Press q in ``asyncflow top`` on a terminal as soon as it shows the run; its status, and whether the terminal is
    as it was."""
    ours, theirs = os.openpty()
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(
        [sys.executable, "-m", "asyncflow", "top", address],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "50"},
    )
    try:
        seen = b""
        while b"train/rollout" not in seen:
            assert select.select([ours], [], [], 60.0)[0], seen
            seen += os.read(ours, 1 << 16)
        os.write(ours, b"q")
        while process.poll() is None:
            if select.select([ours], [], [], 0.1)[0]:
                os.read(ours, 1 << 16)
        return process.returncode, termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)
