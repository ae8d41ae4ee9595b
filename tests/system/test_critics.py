"""PPO with several processes of its critic: they learn what one learns, and begin again together when one is killed."""

import json
from pathlib import Path
from typing import Any

import pytest
from one_run import finish, kill, start, untrained, wait_for_step

from asyncflow.queue.ledger.audit import audit_ledgers

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

STEPS, PROMPTS, GROUP = 4, 4, 8
SETTINGS = [
    f"algorithm.steps={STEPS}",
    f"algorithm.promptsPerStep={PROMPTS}",
    "trainer.replicas=2",
    "rollout.replicas=1",
    "transferQueue.storageUnits=1",
    "evaluation=null",
    "reward={function: length, config: {width: 8}}",
    "schedule={mode: sync, deterministic: true}",
    "storage.checkpoints={every: 1, keep: 2}",
    "trainer.backend.options={collective_timeout_s: 20}",
]
FIGURES = ("value_loss", "critic_grad_norm", "explained_variance", "return_mean", "loss", "grad_norm")


def lines(folder: Path) -> dict[int, dict[str, Any]]:
    """Return what each step says, as it was made last."""
    return {line["step"]: line for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())}


def test_two_critics_learn_what_one_learns_whichever_is_killed(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    settings = [*SETTINGS, f"model.source={untrained(tmp_path)}"]
    finish(start("ppo.yaml", one, [*settings, "critic.role={}"]), within_s=150)
    run = start("ppo.yaml", two, [*settings, "critic.role={replicas: 2}"])
    wait_for_step(two, 2, run, within_s=120)
    kill(two, "critic", 1)
    wait_for_step(two, 3, run, within_s=120)
    kill(two, "critic", 0)
    finish(run, within_s=200)
    alone, together = lines(one), lines(two)
    assert alone.keys() == together.keys() == set(range(1, STEPS + 1))
    for step, figures in alone.items():
        assert figures["critic_grad_norm"] > 0
        for name in FIGURES:
            assert together[step][name] == pytest.approx(figures[name], rel=1e-3, abs=1e-5), (step, name)
    report = audit_ledgers(two / "ledger")
    assert report.ok, report.problems
    assert (report.trained, report.lost, report.duplicated) == (STEPS * PROMPTS * GROUP, 0, 0)
    assert report.attempts == 3, "the trainer went on from its checkpoint, and both critics with it"
