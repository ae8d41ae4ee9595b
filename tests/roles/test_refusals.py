"""How a role ends that cannot go on: by its exit status, and with its words."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncflow.api import load
from asyncflow.errors import AsyncFlowError, CheckpointError, PeerLost, RowsLost
from asyncflow.plan.roles import REFUSED
from asyncflow.roles import context
from asyncflow.roles.context import JobContext, RoleOptions, run_role

COUNTING = Path(__file__).parents[2] / "examples" / "counting.yaml"


def run(folder: Path, *settings: str, manifest: str = COUNTING.name) -> subprocess.CompletedProcess[str]:
    words = [word for setting in settings for word in ("--set", setting)]
    command = [
        sys.executable,
        "-m",
        "asyncflow",
        "run",
        str(COUNTING.with_name(manifest)),
        "--output",
        str(folder),
        *words,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


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

    async def serve(_: JobContext) -> None:
        raise ExceptionGroup("all of it", errors)

    options = RoleOptions(role="trainer", job=COUNTING, driver="tcp://a:1", index=0, attempt=0, workdir=tmp_path)
    assert run_role(serve, options) == status


@pytest.mark.process
@pytest.mark.parametrize("place", ["trainer.backend.options", "rollout.engine.options"])
def test_an_unknown_option_of_a_plugin_is_refused_before_the_start(tmp_path: Path, place: str) -> None:
    ended = run(tmp_path / "run", f"{place}={{quick: true}}", "rollout.replicas=1")
    assert ended.returncode == 2
    assert f"spec.{place}: unknown option quick. Known: " in ended.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.process
def test_what_only_a_role_can_tell_is_refused_by_it(tmp_path: Path) -> None:
    ended = run(tmp_path / "run", "trainer.backend.options={capacity: 8}", "rollout.replicas=1")
    assert ended.returncode == 1
    assert "trainer-0 ended with exit status 2" in ended.stderr
    assert "spec.trainer.backend.options.capacity: sample " in ended.stderr
    assert "again in" not in ended.stdout, "it was started again"


@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("visible", "accelerator", "lacks"),
    [
        ("CUDA_VISIBLE_DEVICES", "{profile: nvidia, count: 2}", "there is no cuda device here"),
        ("ASCEND_RT_VISIBLE_DEVICES", "{profile: ascend-a2, count: 1}", "torch_npu is not installed"),
    ],
)
def test_a_device_that_torch_does_not_see_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, accelerator: str, lacks: str
) -> None:
    monkeypatch.setenv(visible, "0,1")
    device = f"trainer.accelerator={accelerator}"
    rollout = "rollout={replicas: 1, minReplicas: 1, maxReplicas: 1, engine: {name: simulated}}"
    ended = run(tmp_path / "run", device, rollout, manifest="quickstart.yaml")
    assert ended.returncode == 1
    assert "trainer-0 ended with exit status 2" in ended.stderr
    assert f"spec.trainer.accelerator: {lacks}" in ended.stderr
    assert "again in" not in ended.stdout, "it was started again"


@pytest.mark.process
def test_a_task_without_variance_ends_the_run_with_that_reason(tmp_path: Path) -> None:
    ended = run(tmp_path / "run", "algorithm.filterZeroVariance=drop", "algorithm.maxFilteredBatches=2")
    assert ended.returncode == 1
    assert "17 groups of step 1 were dropped: within each, all rewards were equal, the last time 0" in ended.stderr


@pytest.mark.parametrize(
    ("number", "status"),
    [(errno.EIO, 1), (errno.ENOSPC, 1), (errno.EACCES, REFUSED), (errno.ENOENT, REFUSED)],
)
def test_a_disk_that_fails_for_a_moment_is_no_wrong_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(load.Path, "open", fail)
    monkeypatch.setattr(context, "setup_logging", lambda *_: None)
    options = RoleOptions(role="driver", index=0, attempt=0, driver="", job=tmp_path / "job.yaml", workdir=tmp_path)
    assert context.run_role(lambda _: pytest.fail("nothing is to be served"), options) == status
