"""The end of a role that cannot go on: by its exit status, and with its words."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncflow import cli
from asyncflow.api import load
from asyncflow.api.load import to_yaml
from asyncflow.commands.preflight import runnable_job
from asyncflow.errors import AsyncFlowError, CheckpointError, ManifestError, PeerLost, RowsLost
from asyncflow.plan.roles import REFUSED
from asyncflow.roles import context, trainer
from asyncflow.roles.context import JobContext, RoleOptions, run_role

EXAMPLES = Path(__file__).parents[2] / "examples"
COUNTING, QUICKSTART = EXAMPLES / "counting.yaml", EXAMPLES / "quickstart.yaml"


def run(folder: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    small = ("rollout.replicas=1", "transferQueue.storageUnits=1", "evaluation=null")
    words = [word for setting in (*small, *settings) for word in ("--set", setting)]
    command = [sys.executable, "-m", "asyncflow", "run", str(COUNTING), "--output", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.parametrize(
    ("errors", "status"),
    [
        ([PeerLost("gone")], 1),
        ([CheckpointError("cut short")], 2),
        ([ManifestError("no such device", where="spec.trainer.accelerator")], 2),
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


@pytest.mark.parametrize("code", [None, 0, REFUSED, "enough"])
def test_a_role_whose_code_exits_has_failed_whatever_the_code_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int | str | None
) -> None:
    monkeypatch.setattr(context, "setup_logging", lambda *_: None)

    async def end() -> None:
        sys.exit(code)

    async def serve(_: JobContext) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(end())

    options = RoleOptions(role="trainer", job=COUNTING, driver="tcp://a:1", index=0, attempt=0, workdir=tmp_path)
    assert run_role(serve, options) == 1
    assert "has ended the process" in caplog.text
    assert "sys.exit(code)" in caplog.text


@pytest.mark.parametrize("place", ["trainer.backend.options", "rollout.engine.options"])
def test_an_unknown_option_of_a_plugin_is_refused_before_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    words = ("--set", f"{place}={{quick: true}}", "--output", str(tmp_path / "run"))
    assert cli.invoke(["run", str(COUNTING), *words]) == 2
    assert f"spec.{place}: unknown option quick. Known: " in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.process
def test_what_only_a_role_can_tell_is_refused_by_it(tmp_path: Path) -> None:
    ended = run(tmp_path / "run", "trainer.backend.options={capacity: 8}")
    assert ended.returncode == 1
    assert "trainer-0 ended with exit status 2" in ended.stderr
    assert "spec.trainer.backend.options.capacity: sample " in ended.stderr
    assert "restart in" not in ended.stdout, "it was started again"


@pytest.mark.process
def test_what_a_rank_of_a_replica_refuses_its_replica_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    ranks = ["trainer.accelerator={profile: nvidia, count: 2}", "trainer.backend.name=absent"]
    (tmp_path / "job.yaml").write_text(to_yaml(load.load_job(QUICKSTART, ranks)))
    options = RoleOptions(
        role="trainer", job=tmp_path / "job.yaml", driver="tcp://a:1", index=0, attempt=0, workdir=tmp_path
    )
    assert trainer.main(options) == REFUSED
    said = capfd.readouterr()
    assert "spec.trainer.backend.name: no installed package offers 'absent'" in said.out + said.err


async def test_a_trainer_whose_device_needs_what_is_not_installed_is_refused_before_it_joins(tmp_path: Path) -> None:
    job = runnable_job(QUICKSTART, ["trainer.accelerator={profile: ascend-a2, count: 1}"])
    options = RoleOptions(role="trainer", job=QUICKSTART, driver="tcp://a:1", index=0, attempt=0, workdir=tmp_path)
    with pytest.raises(ManifestError, match=r"spec\.trainer\.accelerator: torch_npu is not installed"):
        await trainer.serve(JobContext(options=options, job=job))


@pytest.mark.process
def test_a_task_without_variance_ends_the_run_with_that_reason(tmp_path: Path) -> None:
    ended = run(tmp_path / "run", "algorithm.filterZeroVariance=drop", "algorithm.maxFilteredBatches=2")
    assert ended.returncode == 1
    assert "17 groups of step 1 were dropped: within each, all rewards were equal, the last time 0" in ended.stderr


@pytest.mark.parametrize(
    ("number", "status"),
    [(errno.EIO, 1), (errno.ENOSPC, 1), (errno.EACCES, REFUSED), (errno.ENOENT, REFUSED)],
)
def test_a_disk_that_fails_for_a_short_time_is_no_wrong_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(load.Path, "open", fail)
    monkeypatch.setattr(context, "setup_logging", lambda *_: None)
    options = RoleOptions(role="driver", index=0, attempt=0, driver="", job=tmp_path / "job.yaml", workdir=tmp_path)
    assert context.run_role(lambda _: pytest.fail("nothing is to be served"), options) == status
