"""One small job whose rollout is a real vLLM server, which is killed in the middle of it."""

import json
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from one_run import all_that_was_done_is_recorded, every_second_has_a_cause, finish, start, untrained, wait_for_step

from asyncflow.queue.ledger.audit import audit_ledgers

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm"),
]

STEPS, PROMPTS, GROUP = 4, 4, 8
SETTINGS = [
    f"algorithm.steps={STEPS}",
    f"algorithm.promptsPerStep={PROMPTS}",
    f"algorithm.groupSize={GROUP}",
    "evaluation.every=0",
    "data.eval.size=64",
    "rollout.replicas=1",
    "algorithm.entropy=0.1",  # untrained, the model earns nothing
]


def servers() -> list[psutil.Process]:
    """Return the vLLM servers that run in this test's name."""
    mine = psutil.Process().children(recursive=True)
    return [each for each in mine if "engines.vllm.program" in " ".join(each.cmdline())]


def test_a_job_through_vllm_loses_nothing_when_the_server_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = start("quickstart-vllm.yaml", folder, [*SETTINGS, f"model.source={untrained(tmp_path)}"])
    wait_for_step(folder, 2, run, within_s=240)
    (server,) = servers()
    processes = [server, *server.children(recursive=True)]
    server.kill()
    finish(run, within_s=300)
    assert not [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    assert not servers()
    all_that_was_done_is_recorded(every_second_has_a_cause(folder), server_killed_in={0})
    report = audit_ledgers(folder / "ledger")
    assert report.ok, report.problems
    samples = STEPS * PROMPTS * GROUP
    assert (report.dispatched, report.trained, report.lost, report.duplicated) == (samples, samples, 0, 0)
    gaps = [json.loads(line)["logprob_gap_p99"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(gaps) == STEPS
    assert max(gaps) < 1e-4
    log = (folder / "logs" / "rollout-0.log").read_text()
    assert "the vLLM server ended with status -9" in log
    assert log.count("log-probs of 22 tokens differ by") >= STEPS
