"""``import asyncflow``: a job from Python, and the names that users import."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import asyncflow
from asyncflow.errors import AsyncFlowError, ManifestError
from asyncflow.local.record import load_record

SCRIPT = str(Path(__file__).with_name("standin_train.py"))


def start(manifest, folder, *raise_at, steps, pause_s=0.7):
    words = [sys.executable, SCRIPT, str(steps), str(pause_s), str(manifest), str(folder), *raise_at]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder.parent)


def ended(run):
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def nothing_runs(folder):
    record = load_record(folder)
    return not any(Path(f"/proc/{placed.pid}").exists() for placed in record.processes if placed.pid)


@pytest.mark.process
def test_a_job_is_trained_and_its_summary_returned(manifest, tmp_path):
    came = ended(start(manifest, tmp_path / "out", steps=3, pause_s="asked"))
    assert came["summary"]["reward_last"] == 0.5
    assert came["summary"]["steps"] == 3
    assert came["seen"] == sorted(came["seen"])
    assert {1, 2, 3} <= set(came["seen"])
    assert (came["logging"], came["signals"]) == (True, True)
    assert nothing_runs(tmp_path / "out")
    assert not (tmp_path / "out" / "run" / "token").exists()


@pytest.mark.process
def test_what_progress_raises_ends_the_run_and_is_raised(manifest, tmp_path):
    came = ended(start(manifest, tmp_path / "out", "2", steps=600))
    assert came["error"] == ["SystemExit", "that is enough"]
    assert came["seen"][-1] in (2, 3)
    assert (came["logging"], came["signals"]) == (True, True)
    assert nothing_runs(tmp_path / "out")


@pytest.mark.process
def test_ctrl_c_ends_the_run_in_order(manifest, tmp_path):
    run = start(manifest, tmp_path / "out", steps=600)
    metrics, deadline = tmp_path / "out" / "metrics.jsonl", time.monotonic() + 40
    while not metrics.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(run.pid, signal.SIGINT)
    came = ended(run)
    assert came["error"] == ["KeyboardInterrupt", ""]
    assert nothing_runs(tmp_path / "out")


@pytest.mark.process
def test_a_job_that_a_role_refuses_raises_that_and_leaves_nothing(manifest, tmp_path):
    came = ended(start(manifest, tmp_path / "out", steps=-1))
    name, words = came["error"]
    assert name == "RoleFailed"
    assert "spec.trainer: it cannot be" in words
    assert not (tmp_path / "out").exists()


def test_a_run_is_refused_in_a_thread_and_in_an_event_loop(manifest):
    raised = []

    def call():
        try:
            asyncflow.train(manifest)
        except AsyncFlowError as error:
            raised.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()

    async def inside():
        call()

    asyncio.run(inside())
    assert raised == [
        "asyncflow.train: called in a thread. Call it in the main thread of a process",
        "asyncflow.train: called in an event loop. Call it outside; in a notebook use !asyncflow run or init_engines",
    ]
    with pytest.raises(ManifestError, match="exclude each other"):
        asyncflow.train(manifest, resume=True, fresh=True)


@pytest.mark.parametrize("call", [asyncflow.load, asyncflow.train])
def test_one_text_in_place_of_a_list_of_overrides_is_refused(manifest, call):
    with pytest.raises(ManifestError, match=r"overrides is the text 'algorithm.steps=9'. Pass \['algorithm.steps=9'\]"):
        call(manifest, overrides="algorithm.steps=9")


def test_a_job_made_in_python_means_the_same_as_its_manifest(manifest, monkeypatch):
    (manifest.parent / "tasks.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    job = asyncflow.load(manifest, ["data.train.source=tasks.jsonl"])
    assert job.spec.data.train.source == str(manifest.parent / "tasks.jsonl")
    monkeypatch.chdir("/")
    assert asyncflow.load(job) == job
    made = asyncflow.RLJob.model_validate(
        {"metadata": {"name": "made"}, "spec": job.spec.model_copy(update={"suspend": True}).model_dump()}
    )
    with pytest.raises(ManifestError, match="job made: the job is suspended"):
        asyncflow.train(made)


def test_what_load_returns_is_run_where_it_is_a_job(tmp_path):
    queue = asyncflow.load(Path(__file__).parents[2] / "examples" / "kubernetes" / "transfer-queue.yaml")
    for resume in (False, True):
        with pytest.raises(ManifestError, match="TransferQueue shared: kind = 'TransferQueue': not a job"):
            asyncflow.train(queue, output=tmp_path / "out", resume=resume)
    assert not (tmp_path / "out").exists()


def test_importing_asyncflow_loads_nothing_heavy():
    code = (
        "import sys, asyncflow; heavy = ('pydantic', 'numpy', 'asyncio', 'torch', 'aiohttp', 'rich');"
        "print([name for name in heavy if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout == "[]\n"


def test_every_public_name_is_there():
    assert set(asyncflow.__all__) <= set(dir(asyncflow))
    for name in asyncflow.__all__:
        assert getattr(asyncflow, name) is not None
    with pytest.raises(AttributeError, match="absent"):
        asyncflow.absent  # noqa: B018
