"""A whole job some of whose prompts are too long: they are left out for ever, counted, and never called lost."""

import json
from pathlib import Path

import pytest
from one_run import finish, kill, start, wait_for_step

from asyncflow.queue.ledger.audit import audit_ledgers

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

STEPS, PER_STEP, GROUP = 8, 8, 4


def test_a_prompt_that_is_too_long_is_no_lost_sample_whoever_dies(tmp_path: Path) -> None:
    rows = [{"prompt": str(number).ljust(60 if number % 3 == 1 else 6), "answer": "1"} for number in range(120)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [
        f"data.train.source=jsonl://{tmp_path / 'prompts.jsonl'}",
        f"algorithm.steps={STEPS}",
        "evaluation.every=0",
        "rollout.engine.options={token_s: 0.02}",
    ]
    folder = tmp_path / "run"
    run = start("counting.yaml", folder, settings)
    wait_for_step(folder, 2, run)
    kill(folder, "driver")
    wait_for_step(folder, 4, run)
    kill(folder, "controller")
    finish(run, within_s=150)
    report = audit_ledgers(folder / "ledger")
    assert report.ok, report.problems
    assert (report.dispatched, report.trained) == (STEPS * PER_STEP * GROUP, report.dispatched)
    assert report.skipped > STEPS, "a third of the prompts"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["samples_lost"] == 0
    assert report.skipped <= summary["prompts_skipped"] <= report.skipped + PER_STEP, (
        "behind the last put there may be more"
    )
