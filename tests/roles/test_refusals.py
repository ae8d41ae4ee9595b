"""How a role ends that cannot go on: by its exit status, and with its words."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from asyncflow.errors import AsyncFlowError, CheckpointError, PeerLost, RowsLost
from asyncflow.roles.base import run_role
from asyncflow.roles.post import JobPost, RoleOptions

COUNTING = Path(__file__).parents[2] / "examples" / "counting.yaml"


@pytest.mark.parametrize(
    ("errors", "status"),
    [
        ([PeerLost("gone")], 1),
        ([CheckpointError("cut short")], 2),
        ([RowsLost("row 7 is not there")], 3),
        ([PeerLost("gone"), RowsLost("row 7 is not there")], 3),
        ([RowsLost("row 7 is not there"), CheckpointError("cut short")], 2),
    ],
)
def test_the_exit_status_says_whether_another_attempt_helps_and_whose_fault_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: list[AsyncFlowError], status: int
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])

    async def serve(_: JobPost) -> None:
        raise ExceptionGroup("all of it", errors)

    options = RoleOptions(role="trainer", job=COUNTING, driver="tcp://a:1", index=0, attempt=0, workdir=tmp_path)
    assert run_role(serve, options) == status


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
