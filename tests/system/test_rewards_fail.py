"""Whole jobs whose reward function is somebody's mistake: samples without a reward are dropped, many pause the job."""

import json
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from one_run import EXAMPLES, direct, finish, start

from asyncflow.queue.ledger.audit import audit_ledgers

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

REWARD = """
import time
import zlib

def score(*, response, prompt):
    draw = zlib.crc32(f"{prompt} {response}".encode()) % 100
    if draw < RAISES:
        raise KeyError(f"no answer for {prompt}")
    if draw < RAISES + HANGS:
        time.sleep(60)
    if draw < RAISES + HANGS + WRONG:
        return (None, float("nan"), "1.0", [1.0], 1e9)[draw % 5]
    return 1.0
"""
DETAILS = {
    "raised": "KeyError: 'no answer for",
    "timeout": " 1 s",
    "invalid": "the reward function returned",
    "out_of_range": "1e+09 is not between reward.min",
}
STEPS = 6
NEEDED = 8 * 4
SETTINGS = [f"algorithm.steps={STEPS}", "reward.function=mine:score", "rollout.engine.options={token_s: 0.002}"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text((EXAMPLES / "counting.yaml").read_text())
    return tmp_path


def write_reward(place: Path, *, raises: int, hangs: int = 0, wrong: int = 0) -> None:
    shares = f"RAISES, HANGS, WRONG = {raises}, {hangs}, {wrong}\n"
    (place / "mine.py").write_text(shares + REWARD)


def status_of(place: Path) -> dict[str, Any]:
    record = json.loads((place / "run" / "run" / "processes.json").read_text())
    with urllib.request.urlopen(f"{record['http']}/v1/status", timeout=60) as answer:
        said: dict[str, Any] = json.loads(answer.read())
        return said


def wait_until_paused(place: Path) -> dict[str, Any]:
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        try:
            status = status_of(place)
        except (OSError, KeyError, ValueError):
            status = {}
        if status.get("phase") == "Paused":
            return status
        time.sleep(0.2)
    raise AssertionError("the job did not pause")


def said_until(run: subprocess.Popen[bytes], words: bytes) -> bytes:
    """Return what a run says up to the line with ``words``."""
    assert run.stdout is not None
    said = b""
    for line in run.stdout:
        said += line
        if words in line:
            return said
    raise AssertionError(said.decode())


def test_what_has_no_reward_is_named_counted_and_not_trained(place: Path) -> None:
    """Of a hundred samples five raise, one hangs, and ten return NaN, nothing, another type or too much."""
    write_reward(place, raises=5, hangs=1, wrong=10)
    settings = [*SETTINGS, "reward.timeoutSeconds=1", "reward.workers={min: 2, max: 4}"]
    finish(start(str(place / "job.yaml"), place / "run", settings), within_s=200)
    summary = json.loads((place / "run" / "summary.json").read_text())
    report = audit_ledgers(place / "run" / "ledger")
    assert report.ok, report.problems
    failed = summary["rewards_failed"]
    assert set(failed) == {"raised", "timeout", "invalid", "out_of_range"}
    assert min(failed.values()) > 0
    assert 0 < summary["samples_dropped"] <= sum(failed.values()), "evaluations are judged too, and drop nothing"
    assert summary["samples_trained"] + summary["samples_dropped"] == summary["samples_dispatched"]
    assert summary["samples_trained"] < STEPS * NEEDED
    kind, _, detail = summary["first_failed_reward"].partition(": ")
    assert DETAILS[kind] in detail
    lines = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["samples"] for line in lines) == summary["samples_trained"]
    assert {line["reward"] for line in lines} == {1.0}, "nothing was trained as if its reward were another"
    newest = max((place / "run" / "checkpoints").glob("step-*/manifest.json")).parent
    counts = np.load(newest / "counts.npy", allow_pickle=False)
    assert set(counts.tolist()) == {0, 1}
    assert counts.sum() == summary["samples_trained"]


def test_a_job_whose_rewards_mostly_fail_pauses_and_goes_on_when_they_are_mended(place: Path) -> None:
    write_reward(place, raises=60)
    run = start(str(place / "job.yaml"), place / "run", SETTINGS)
    status = wait_until_paused(place)
    assert status["step"] <= 1, "it pauses while a step is judged, which samples on their way may complete"
    assert "samples of step" in status["waitingFor"]
    assert "KeyError: 'no answer for" in status["waitingFor"]
    assert "Traceback" in status["rewards"]["firstFailure"]
    said = said_until(run, b"waiting for the reward to be fixed")
    assert direct(place / "run", "/v1/suspend", certificate="operator-0") == 202
    run.communicate(timeout=100)
    assert run.returncode == 0, said.decode()
    assert audit_ledgers(place / "run" / "ledger").trained <= NEEDED
    assert b"a sample has no reward: raised: Traceback" in said
    assert b"the first sample without a reward: raised: Traceback" in said
    write_reward(place, raises=0)
    finish(start(str(place / "job.yaml"), place / "run", SETTINGS, "--resume"), within_s=200)
    summary = json.loads((place / "run" / "summary.json").read_text())
    assert (summary["phase"], summary["steps"], summary["samples_lost"]) == ("Succeeded", STEPS, 0)
    assert summary["rewards_failed"]["raised"] > NEEDED / 2


def test_a_paused_job_goes_on_when_it_is_told_to(place: Path) -> None:
    write_reward(place, raises=70)
    run = start(str(place / "job.yaml"), place / "run", [*SETTINGS, "reward.workers={min: 1, max: 1}"])
    wait_until_paused(place)
    assert direct(place / "run", "/v1/resume", certificate="operator-0") == 202
    wait_until_paused(place)
    run.terminate()
    run.communicate(timeout=100)
