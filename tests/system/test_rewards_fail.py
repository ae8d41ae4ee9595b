"""Whole jobs whose reward function is somebody's mistake: samples without a reward are dropped, many pause the job."""

import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from one_run import EXAMPLES, direct, finish, start

from asyncflow.queue.ledger.audit import audit_ledgers

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

REWARD = """
import zlib

def score(*, response, prompt, answer, meta):
    draw = zlib.crc32(f"{prompt} {response}".encode()) %% 100
    if draw < %d:
        raise KeyError(f"no answer for {prompt}")
    if draw > %d:
        return None
    return float(draw %% 2)
"""
STEPS = 6
NEEDED = 8 * 4
SETTINGS = [f"algorithm.steps={STEPS}", "reward.function=mine:score", "rollout.engine.options={token_s: 0.002}"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text((EXAMPLES / "counting.yaml").read_text())
    return tmp_path


def write_reward(place: Path, *, raises: int, none_above: int = 100) -> None:
    (place / "mine.py").write_text(REWARD % (raises, none_above))


def status_of(place: Path) -> dict[str, Any]:
    record = json.loads((place / "run" / "run" / "processes.json").read_text())
    with urllib.request.urlopen(f"{record['http']}/v1/status", timeout=10) as answer:
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


def test_a_few_failures_are_dropped_and_told(place: Path) -> None:
    write_reward(place, raises=10, none_above=95)
    finish(start(str(place / "job.yaml"), place / "run", SETTINGS), within_s=200)
    summary = json.loads((place / "run" / "summary.json").read_text())
    report = audit_ledgers(place / "run" / "ledger")
    assert report.ok, report.problems
    failed = summary["rewards_failed"]
    assert set(failed) == {"raised", "invalid"}
    assert 0 < summary["samples_dropped"] <= sum(failed.values()), "evaluations are judged too, and drop nothing"
    assert summary["samples_trained"] + summary["samples_dropped"] == summary["samples_dispatched"]
    assert summary["samples_trained"] < STEPS * NEEDED
    assert "KeyError: 'no answer for" in summary["first_failed_reward"] or "NoneType" in summary["first_failed_reward"]
    lines = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["samples"] for line in lines) == summary["samples_trained"]


def test_a_job_whose_rewards_mostly_fail_pauses_and_goes_on_when_they_are_mended(place: Path) -> None:
    write_reward(place, raises=70)
    run = start(str(place / "job.yaml"), place / "run", SETTINGS)
    status = wait_until_paused(place)
    assert status["step"] <= 2, "prompts of the first two steps go out at once"
    assert "samples of step" in status["waitingFor"]
    assert "KeyError: 'no answer for" in status["waitingFor"]
    assert "Traceback" in status["rewards"]["firstFailure"]
    assert direct(place / "run", "/v1/suspend", certificate="operator-0") == 202
    said, _ = run.communicate(timeout=100)
    assert run.returncode == 0, said.decode()
    assert b"a sample has no reward: raised: Traceback" in said
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
