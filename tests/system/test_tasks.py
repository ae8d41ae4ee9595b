"""A job with a task of the user's: its processes are killed, its function fails, and each sample is accounted for."""

import json
import sys
from pathlib import Path

import pytest
from one_run import EXAMPLES, finish, kill, start, wait_for_step

from asyncflow.api.load import load_job
from asyncflow.queue.ledger.audit import audit_ledgers

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from faults import task_errors

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

STEPS = 8
FUNCTIONS = """
import asyncio

def measure(rows, config):
    if any(row.serial % 10 == 3 and row.sample == 1 for row in rows):
        raise ValueError(f"{config['word']} {rows[0].question}")
    return [{"length": len(row["response_ids"])} for row in rows]

async def ask(rows, config):
    await asyncio.sleep(0.01)
    return [{"mark": [1.0] * int(sum(row["length"]))} for row in rows]
"""
TASKS = """[
  {name: measure, function: "measures:measure", reads: [response_ids, task], config: {word: odd}, replicas: 2,
   retries: 4, leaseSeconds: 2, writes: [{name: length, dtype: int32, most: 1}]},
  {name: ask, function: "measures:ask", reads: [length], writes: [{name: mark}], parallel: 2, retries: 20,
   order: oldest, leaseSeconds: 2}]"""


def test_each_sample_passes_each_task_once_although_its_processes_are_killed(tmp_path: Path) -> None:
    (tmp_path / "measures.py").write_text(FUNCTIONS)
    manifest = tmp_path / "job.yaml"
    manifest.write_text((EXAMPLES / "counting.yaml").read_text())
    settings = [f"algorithm.steps={STEPS}", "evaluation=null", f"tasks={' '.join(TASKS.split())}"]
    folder = tmp_path / "run"
    run = start(str(manifest), folder, settings)
    for step, role, index in ((1, "task-measure", 0), (2, "task-ask", 0), (3, "task-measure", 1)):
        wait_for_step(folder, step, run, within_s=150)
        kill(folder, role, index)
    finish(run, within_s=240)
    job = load_job(manifest, settings)
    assert task_errors(job, folder) == []
    audit = audit_ledgers(folder / "ledger")
    assert audit.ok, audit.problems
    summary = json.loads((folder / "summary.json").read_text())
    failing = [serial for serial in range(STEPS * 8) if serial % 10 == 3]
    # The last try of a row may be one whose lease ended: with its process, or on a busy machine.
    failures = summary["rewards_failed"]
    assert failures.keys() <= {"measure: raised", "measure: died"}
    assert audit.dropped == len(failing) == sum(failures.values())
    assert audit.trained == STEPS * 8 * 4 - len(failing)
    assert "ValueError: odd" in (folder / "rewards.json").read_text()
    assert "attempt 1" in (folder / "logs" / "task-measure-0.log").read_text(), "it was started again"


@pytest.mark.slow
def test_the_reference_as_a_role_changes_no_figure_of_a_run(tmp_path: Path) -> None:
    """Two runs of the quickstart with a KL penalty, whose reference is the trainer's own, and then a role."""
    settings = ["algorithm.steps=4", "algorithm.kl.coefficient=0.05", "evaluation.every=4"]
    figures = []
    for name, more in (("own", []), ("role", ["reference={}"])):
        folder = tmp_path / name
        finish(start("quickstart.yaml", folder, [*settings, *more]), within_s=280)
        assert audit_ledgers(folder / "ledger").ok
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        figures.append([line[figure] for line in lines for figure in ("loss", "grad_norm", "kl")])
    # Log-probs in float32 are rounded by up to 1e-7, whatever the KL between them: its mean of 3e-4 by up to 1e-8.
    assert figures[1] == pytest.approx(figures[0], rel=1e-5, abs=1e-8)
    assert figures[0][-1] > 1e-4, "the policy has left the reference"
