"""A loop of one's own as the trainer of a job: killed, started again, replaced, joined by folder and by address."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from one_run import EXAMPLES, finish, start

torch = pytest.importorskip("torch")

import asyncflow  # noqa: E402
from asyncflow.errors import Fenced, ManifestError, Refused  # noqa: E402
from asyncflow.queue.ledger.audit import audit_ledgers  # noqa: E402
from asyncflow.training.checkpoint import Checkpoints  # noqa: E402

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

STEPS, PROMPTS, GROUP = 6, 4, 4
SAMPLES = STEPS * PROMPTS * GROUP
SETTINGS = [
    f"algorithm.steps={STEPS}",
    f"algorithm.promptsPerStep={PROMPTS}",
    "evaluation=null",
    "storage.checkpoints.every=2",
    "transferQueue.storageUnits=1",
    "rollout.replicas=1",
    "rollout.engine.options={token_s: 0}",
]
COUNTING = """
import sys, time, torch, asyncflow

with asyncflow.init_engines(sys.argv[1], output=sys.argv[2], overrides=sys.argv[4:]) as engines:
    seen = torch.zeros(4096) if engines.state is None else engines.state["seen"]
    engines.weight_sync_notify({"seen": seen})
    while engines.step < engines.steps:
        while (batch := engines.get_experience_data()) is not None:
            for serial, sample in batch.keys:
                seen[serial * 4 + sample] += 1
            if engines.step == int(sys.argv[3]):
                print("in the middle of a step", flush=True)
                time.sleep(600)
        engines.weight_sync_notify({"seen": seen}, state={"seen": seen}, metrics={"seen": float(seen.sum())})
print(int(seen.sum()), int(seen.max()), flush=True)
"""


def count(engines: asyncflow.Engines, *, until: int) -> torch.Tensor:
    """Count samples up to step ``until``."""
    seen = torch.zeros(4096) if engines.state is None else engines.state["seen"]
    engines.weight_sync_notify({"seen": seen})
    return go_on(engines, seen, until=until)


def go_on(engines: asyncflow.Engines, seen: torch.Tensor, *, until: int = STEPS) -> torch.Tensor:
    while engines.step < until:
        while (batch := engines.get_experience_data(timeout=120)) is not None:
            for serial, sample in batch.keys:
                seen[serial * GROUP + sample] += 1
        engines.weight_sync_notify({"seen": seen}, state={"seen": seen})
    return seen


def trained_once(folder: Path) -> None:
    report = audit_ledgers(folder / "ledger")
    assert report.ok, report.problems
    assert (report.dispatched, report.trained, report.lost, report.duplicated) == (SAMPLES, SAMPLES, 0, 0)


def test_a_loop_that_is_killed_with_its_job_goes_on_and_trains_each_sample_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-c", COUNTING, str(EXAMPLES / "counting.yaml"), str(folder)]
    with subprocess.Popen([*command, "3", *SETTINGS], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "in the middle of a step\n"
        first.send_signal(signal.SIGKILL)
    again = subprocess.run([*command, "-1", *SETTINGS], stdout=subprocess.PIPE, text=True, check=True)
    assert again.stdout.split() == [str(SAMPLES), "1"]
    trained_once(folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == STEPS
    assert lines[-1]["seen"] == SAMPLES
    assert lines[-1]["attempt"] == 1


def test_sessions_by_folder_and_by_address_follow_one_another(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = start("counting.yaml", folder, [*SETTINGS, "trainer.external=true"])
    try:
        while not (folder / "run" / "processes.json").exists():
            assert run.poll() is None, run.communicate()
        with pytest.raises(Refused, match="no weights yet"), asyncflow.init_engines(folder) as hasty:
            hasty.get_experience_data()
        first = asyncflow.init_engines(folder)
        counted = count(first, until=1)
        assert first.get_experience_data(timeout=120) is not None
        with pytest.raises(Refused, match="not taken yet"):
            first.weight_sync_notify({"seen": torch.zeros(1)}, state=None)

        keys = tmp_path / "keys"
        for name in ("trainer-0", "client-0"):
            shutil.copytree(folder / "run" / "tls" / name, keys / name)
        driver = json.loads((folder / "run" / "processes.json").read_text())["driver"]
        with asyncflow.init_engines(
            EXAMPLES / "counting.yaml",
            overrides=[*SETTINGS, "trainer.external=true"],
            address=driver.rpartition("/")[0],
            tls=keys,
            workdir=folder,
        ) as second:
            with pytest.raises(Fenced):
                go_on(first, counted)
            count(second, until=3)
        assert Checkpoints(folder / "checkpoints").latest().manifest.step == 3
        with asyncflow.init_engines(folder) as third:
            assert third.step == 3
            seen = count(third, until=STEPS)
        finish(run, within_s=120)
    finally:
        run.kill()
    assert (seen[:SAMPLES] == 1).all()
    assert seen.sum() == SAMPLES
    trained_once(folder)


def test_a_job_with_a_trainer_of_its_own_is_not_joined(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "run").mkdir(parents=True)
    record = {"mark": "m", "supervisor": 1, "started": "", "driver": "tcp://127.0.0.1:1", "http": ""}
    (folder / "run" / "processes.json").write_text(json.dumps(record))
    shutil.copy(EXAMPLES / "counting.yaml", folder / "job.yaml")
    with pytest.raises(ManifestError, match="trainer of its own"):
        asyncflow.init_engines(folder)


def test_where_nothing_runs_there_is_nothing_to_join(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="nothing was run there"):
        asyncflow.init_engines(tmp_path)
