"""Samples of several turns through a whole run: a rollout that is told to end between two turns hands on all."""

import hashlib
import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from one_run import EXAMPLES, counted_once, finish, kill, start, untrained, wait_for_step

from asyncflow.api.document import dump, parse

pytestmark = pytest.mark.process

ENVIRONMENT = """import time

def answer(*, transcript, prompt, answer, meta, config):
    time.sleep(config["seconds"])
    return f"\\n{len(transcript)}\\n"
"""
JUDGE = """def steps(*, transcript):
    said = [turn["content"] for turn in transcript if turn["role"] == "assistant"]
    return {"turns": [float(len(text)) for text in said]}
"""
LEFT = re.compile(r"leaving; (\d+) rows are given back, (\d+) are handed on unfinished")
MADE = re.compile(r"left; (\d+) tokens were made here")


def begun(folder: Path, name: str, *settings: str, spec: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Begin a run of an example with an environment that takes its time, and without evaluation."""
    manifest = parse((EXAMPLES / name).read_text(), source=name).data
    del manifest["spec"]["evaluation"], manifest["spec"]["data"]["eval"]
    manifest["spec"] |= {"environment": {"function": "slow:answer", "maxTurns": 3, "config": {"seconds": 0.2}}, **spec}
    folder.mkdir()
    (folder / "slow.py").write_text(ENVIRONMENT)
    (folder / "judge.py").write_text(JUDGE)
    (folder / "job.yaml").write_text(dump(manifest))
    return start(str(folder / "job.yaml"), folder / "run", list(settings))


def rollout_logs(folder: Path) -> str:
    return "".join(file.read_text() for file in (folder / "run" / "logs").glob("rollout-*.log"))


@pytest.mark.timeout(200)
def test_a_drain_between_turns_loses_nothing(tmp_path: Path) -> None:
    steps, samples = 4, 16
    folder = tmp_path / "drained"
    spec = {"algorithm": {"name": "grpo", "groupSize": 4, "promptsPerStep": 4, "steps": steps, "learningRate": 0.001}}
    busy = ("reward.workers={min: 1, max: 1}", "rollout.engine.slots=4")  # so that both rollouts always work
    engine = "rollout.engine.options={tokens: 4, sigma: 0.3, token_s: 0.002}"
    run = begun(folder, "counting.yaml", engine, "sampling.maxTokens=40", *busy, spec=spec)
    for step, rollout in ((1, 0), (2, 1)):
        wait_for_step(folder / "run", step, run)
        kill(folder / "run", "rollout", rollout, by=signal.SIGTERM)
    finish(run, within_s=120)
    counted_once(folder / "run", steps * samples)
    said = rollout_logs(folder)
    handed_on = sum(int(count) for _, count in LEFT.findall(said))
    assert handed_on > 0, "between turns, as most of the time was"
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["observation_tokens"] for line in lines] == [samples * 2 * 3] * steps
    trained = sum(line["response_tokens"] for line in lines)
    made = sum(map(int, MADE.findall(said)))
    assert trained <= made <= trained + handed_on, "the token that ends a turn is made again, and no other"


@pytest.mark.timeout(200)
def test_turns_are_trained_by_what_each_of_them_has_earned(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    spec = {
        "model": {"source": str(untrained(tmp_path))},
        "reward": {"function": "judge:steps"},
        "environment": {"function": "slow:answer", "maxTurns": 3, "config": {"seconds": 0}},
        "sampling": {"maxTokens": 32, "maxPromptTokens": 16, "stop": list("abcdefghijklmnop")},
    }
    sizes = [
        "algorithm.steps=2",
        "algorithm.promptsPerStep=4",
        "algorithm.learningRate=0.001",
        "algorithm.advantage=dr-grpo",
    ]
    run = begun(folder, "tools.yaml", "algorithm.credit=turn", *sizes, spec=spec)
    finish(run, within_s=150)
    texts = [json.loads(line) for file in (folder / "run" / "samples").glob("*.jsonl") for line in file.open()]
    several = [text for text in texts if text["details"].get("turns", 1) > 1]
    assert several
    for text in texts:
        turns = json.loads(text["details"]["turn_rewards"])
        assert len(turns) == text["details"].get("turns", 1)
        assert text["reward"] == pytest.approx(sum(turns))
    assert len({text["advantage"] for text in texts}) > 1
    assert all(
        json.loads(line)["grad_norm"] > 0 for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_drain_between_turns_changes_no_bit_of_the_weights(tmp_path: Path) -> None:
    digests = []
    for hits in (0, 2):
        folder = tmp_path / str(hits)
        model = {"model": {"source": "tiny://reverse-digits"}, "reward": {"function": "task"}}
        settings = ["schedule.deterministic=true", "algorithm.steps=4", "algorithm.promptsPerStep=4"]
        run = begun(folder, "tools.yaml", *settings, "data.train.source=tiny://reverse-digits", spec=model)
        for rollout in range(hits):
            wait_for_step(folder / "run", 1 + rollout, run, within_s=180)
            kill(folder / "run", "rollout", rollout, by=signal.SIGTERM)
        finish(run, within_s=300)
        digests.append(hashlib.sha256((folder / "run" / "export" / "model.safetensors").read_bytes()).hexdigest())
    assert digests[0] == digests[1]
    assert any(int(count) for _, count in LEFT.findall(rollout_logs(tmp_path / "2")))
