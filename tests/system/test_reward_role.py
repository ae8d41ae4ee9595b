"""A job whose reward is a role: its processes are killed, some samples fail, and every sample is accounted for."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from one_run import EXAMPLES, finish, kill, start, wait_for_step

from asyncflow.api.load import load_job
from asyncflow.driver.sample_files import read_step
from asyncflow.queue.ledger.audit import audit_ledgers

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from faults import task_errors

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

STEPS = 6
FUNCTIONS = """
def group(*, responses, prompt):
    values = [{"reward": 1.0, "details": {"of": len(responses)}} for _ in responses]
    if sum(map(ord, prompt)) % 5 == 3:
        values[1] = None
    return values

async def alone(*, response):
    return 0.5
"""
SETTINGS = [
    f"algorithm.steps={STEPS}",
    "evaluation.every=3",
    "reward.function=null",
    "reward.components=[{name: group, function: 'judges:group'}, {name: alone, function: 'judges:alone', weight: 2}]",
    "reward.role={replicas: 2, groups: true, leaseSeconds: 2, batch: 8}",
]


def test_each_sample_is_scored_once_although_those_that_score_are_killed(tmp_path: Path) -> None:
    (tmp_path / "judges.py").write_text(FUNCTIONS)
    manifest = tmp_path / "job.yaml"
    manifest.write_text((EXAMPLES / "counting.yaml").read_text())
    folder = tmp_path / "run"
    run = start(str(manifest), folder, SETTINGS)
    for step, index in ((1, 0), (2, 1), (3, 0)):
        wait_for_step(folder, step, run, within_s=150)
        kill(folder, "reward", index)
    finish(run, within_s=240)
    assert task_errors(load_job(manifest, SETTINGS), folder) == []
    audit = audit_ledgers(folder / "ledger")
    assert audit.ok, audit.problems
    summary = json.loads((folder / "summary.json").read_text())
    assert audit.dropped > 0
    assert set(summary["rewards_failed"]) == {"invalid"}
    assert audit.trained + audit.dropped == STEPS * 8 * 4
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["reward"], line["reward_components"]) for line in lines] == [
        (2.0, {"group": 1.0, "alone": 0.5})
    ] * STEPS
    assert summary["eval_reward_last"] == 2.0, "evaluations are judged by the role, too"
    texts = [text for step in range(1, STEPS + 1) for text in read_step(folder, purpose="train", step=step)]
    assert Counter(str(text.details["group"]) for text in texts if not text.failure) == {"{'of': 4}": len(texts)}
    assert "attempt 1" in (folder / "logs" / "reward-0.log").read_text(), "it was started again"
