"""A role that refuses its input ends the run at once, with its words."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncflow.api import load
from asyncflow.roles import base
from asyncflow.roles.post import RoleOptions

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


@pytest.mark.parametrize(
    ("number", "status"),
    [(errno.EIO, 1), (errno.ENOSPC, 1), (errno.EACCES, base.REFUSED), (errno.ENOENT, base.REFUSED)],
)
def test_a_disk_that_fails_for_a_moment_is_no_wrong_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(load.Path, "open", fail)
    monkeypatch.setattr(base, "setup_logging", lambda *_: None)
    options = RoleOptions(role="driver", index=0, attempt=0, driver="", job=tmp_path / "job.yaml", workdir=tmp_path)
    assert base.run_role(lambda _: pytest.fail("nothing is to be served"), options) == status
