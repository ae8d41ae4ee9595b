"""A job whose reward and critic are roles: they are killed, some samples fail, and every sample is accounted for."""

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
from faults import count_errors, task_errors

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

STEPS = 7
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
    "algorithm.name=ppo",
    "critic.role={}",
    "storage.checkpoints.every=2",
    f"algorithm.steps={STEPS}",
    "algorithm.promptsPerStep=4",
    "evaluation.every=3",
    "reward.function=null",
    "reward.components=[{name: group, function: 'judges:group'}, {name: alone, function: 'judges:alone', weight: 2}]",
    "reward.role={replicas: 2, groups: true, leaseSeconds: 2, batch: 8}",
]


def test_each_sample_is_scored_and_learned_once_whoever_is_killed(tmp_path: Path) -> None:
    (tmp_path / "judges.py").write_text(FUNCTIONS)
    manifest = tmp_path / "job.yaml"
    manifest.write_text((EXAMPLES / "counting.yaml").read_text())
    folder = tmp_path / "run"
    run = start(str(manifest), folder, SETTINGS)
    for step, role, index in ((1, "reward", 0), (2, "reward", 1), (3, "critic", 0), (4, "trainer", 0)):
        wait_for_step(folder, step, run, within_s=150)
        kill(folder, role, index)
    finish(run, within_s=240)
    job = load_job(manifest, SETTINGS)
    assert task_errors(job, folder) == []
    assert [error for error in count_errors(job, folder) if "not counted once" not in error] == [], "some were dropped"
    audit = audit_ledgers(folder / "ledger")
    assert audit.ok, audit.problems
    summary = json.loads((folder / "summary.json").read_text())
    assert audit.dropped > 0
    assert set(summary["rewards_failed"]) == {"invalid"}
    assert audit.trained + audit.dropped == STEPS * 4 * 4
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines} == {*range(1, STEPS + 1)}, "some of them twice, by each attempt"
    assert all(line["reward_components"] == {"group": 1.0, "alone": 0.5} for line in lines)
    assert {line["reward"] for line in lines} == {2.0}
    assert summary["eval_reward_last"] == 2.0, "evaluations are judged by the role, too"
    texts = [text for step in range(1, STEPS + 1) for text in read_step(folder, purpose="train", step=step)]
    assert Counter(str(text.details["group"]) for text in texts if not text.failure) == {"{'of': 4}": len(texts)}
    for name in ("reward-0", "critic-0"):
        assert "attempt 1" in (folder / "logs" / f"{name}.log").read_text(), "it was started again"
