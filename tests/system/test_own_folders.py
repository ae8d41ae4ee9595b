"""Jobs whose processes share nothing but the network, as in pods: from the manifest to the end, through every death."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from pod_world import TOLD_TO_END, Pod, Pods, pods

from asyncflow.api.load import load_job
from asyncflow.plan import plan
from asyncflow.queue.ledger.audit import audit_ledger
from asyncflow.queue.ledger.events import Returned
from asyncflow.queue.ledger.log import read_ledger

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

COUNTING = Path(__file__).parents[2] / "examples" / "counting.yaml"
GROUP, PROMPTS = 4, 4
GANG = [
    f"algorithm.promptsPerStep={PROMPTS}",
    "trainer.replicas=2",
    "trainer.backend.options={capacity: 1024}",
    "evaluation.every=6",
]


@contextmanager
def job(base: Path, *settings: str) -> Iterator[Pods]:
    words = [*GANG, *settings]
    with pods(base, COUNTING, words, leader="driver") as made:
        made.place(*plan(load_job(COUNTING, words)).roles)
        made.start()
        yield made


def exactly_once(made: Pods, *, steps: int) -> None:
    ledger = made.pods["controller-0"].folder / "ledger"
    report, samples = audit_ledger(ledger), steps * PROMPTS * GROUP
    assert report.ok, report.problems
    assert (report.dispatched, report.trained, report.lost, report.duplicated) == (samples, samples, 0, 0)
    newest = newest_checkpoint(made)
    assert newest.name == f"step-{steps:06d}"
    if (counted := newest / "counts.npy").exists():
        counts = np.load(counted, allow_pickle=False)
        assert (counts[:samples] == 1).all()
        assert not counts[samples:].any()


def newest_checkpoint(made: Pods) -> Path:
    return max((made.pods["trainer-0"].folder / "checkpoints").glob("step-*/manifest.json")).parent


def test_a_job_whose_processes_share_nothing_succeeds_and_leaves_its_weights(tmp_path: Path) -> None:
    torch = ["trainer.backend={name: torch}", "algorithm.steps=3"]
    with job(tmp_path, *torch) as made:
        ended = made.finish(within_s=120)
        assert set(ended.values()) == {0}, made.logs()
        exactly_once(made, steps=3)
    first, second = made.pods["trainer-0"].folder, made.pods["trainer-1"].folder
    assert (first / "export" / "model.safetensors").exists()
    assert not (second / "export").exists()
    assert not (second / "checkpoints").exists()
    summary = json.loads((made.pods["driver-0"].folder / "summary.json").read_text())
    assert (summary["phase"], summary["samples_lost"], summary["samples_duplicated"]) == ("Succeeded", 0, 0)
    assert sorted(file.name for file in made.config.iterdir()) == ["job.yaml", "token"]


def test_every_process_may_die_with_its_folder_unless_that_is_a_claim(tmp_path: Path) -> None:
    with job(tmp_path, "algorithm.steps=20", "storage.checkpoints.every=3") as made:
        deaths: list[tuple[tuple[str, ...], str]] = [
            (("rollout-1",), ""),
            (("storage-0",), ""),
            (("driver-0",), ""),
            (("trainer-0", "trainer-1"), "trainer-0"),
            (("controller-0",), "controller-0"),
            (("driver-0",), ""),
        ]
        reached = 1
        for names, keep in deaths:
            reached = made.until_step(reached) + 1
            made.kill(*names, keep=keep)
        ended = made.finish(within_s=150)
        assert set(ended.values()) == {0}, made.logs()
        exactly_once(made, steps=20)


def test_what_a_rollout_holds_that_is_told_to_end_comes_back_at_once(tmp_path: Path) -> None:
    for_ever = "rollout.engine={name: simulated, slots: 8, options: {token_s: 60}}"
    with job(tmp_path, for_ever, "rollout.leaseSeconds=3600") as made:
        made.until("work", lambda: [bool(each["inflight"]) for each in made.status()["rollouts"]] == [True, True])
        assert made.pods["rollout-0"].end(signal.SIGTERM, within_s=30) == TOLD_TO_END
        made.until("their return", lambda: "the instance leaves" in returned(made))
        counted = made.pods["controller-0"].ask("/metrics")
        assert re.search(r"^asyncflow_controller_lease_expiries_total 0\.0$", counted, re.MULTILINE)


def test_sequences_are_carried_over_and_handed_on_and_each_sample_counts_once(tmp_path: Path) -> None:
    slowly = "rollout.engine={name: simulated, slots: 8, options: {token_s: 0.15}}"
    carried = ["schedule.swapAt=token", "schedule.maxStaleness=2"]
    with job(tmp_path, slowly, *carried, "algorithm.steps=10") as made:
        made.until_step(2)
        assert made.pods["rollout-0"].end(signal.SIGTERM, within_s=30) == TOLD_TO_END
        made.start("rollout-0")
        made.until_step(4)
        made.kill("rollout-1")
        made.until_step(6)
        made.kill("trainer-0", "trainer-1", keep="trainer-0")
        assert set(made.finish(within_s=120).values()) == {0}, made.logs()
        exactly_once(made, steps=10)
        assert "the instance leaves" in returned(made)
        assert re.search(r"[1-9]\d* are handed on unfinished", made.pods["rollout-0"].log.read_text())
    lines = [json.loads(line) for line in (made.pods["driver-0"].folder / "metrics.jsonl").read_text().splitlines()]
    assert max(line["staleness_start_max"] for line in lines) <= 2, "the promise"
    assert any(line["staleness_token_mean"] < line["staleness_start_mean"] for line in lines), "some mix versions"


def test_what_a_killed_rollout_had_saved_is_gone_on_from(tmp_path: Path) -> None:
    slowly = "rollout.engine={name: simulated, slots: 8, options: {token_s: 0.4}}"
    small = ["algorithm.steps=2", "sampling.maxTokens=16", "rollout.leaseSeconds=3"]
    with job(tmp_path, slowly, *small, "evaluation=null") as made:
        victim = made.pods["rollout-0"]

        def saved() -> float:
            return counted(victim, "tokens_generated_total") - counted(victim, "unsaved_tokens")

        made.until("what is saved", lambda: saved() > 0)
        made.kill("rollout-0")
        taken_over = "tokens_taken_over_total"
        rollouts = [made.pods[name] for name in ("rollout-0", "rollout-1")]
        made.until("who goes on", lambda: any(counted(pod, taken_over) > 0 for pod in rollouts))
        assert set(made.finish(within_s=120).values()) == {0}, made.logs()
        audit = audit_ledger(made.pods["controller-0"].folder / "ledger")
        assert (audit.ok, audit.trained, audit.lost, audit.duplicated) == (True, 32, 0, 0)


def counted(rollout: Pod, what: str) -> float:
    found = re.search(rf"^asyncflow_rollout_{what} (\S+)$", rollout.ask("/metrics"), re.MULTILINE)
    assert found is not None
    return float(found[1])


def returned(made: Pods) -> set[str]:
    """Return why leases ended."""
    ledger = made.pods["controller-0"].folder / "ledger"
    return {event.reason for event in read_ledger(ledger) if isinstance(event, Returned)}


def test_a_trainer_that_is_told_to_end_loses_no_step(tmp_path: Path) -> None:
    slowly = "rollout.engine={name: simulated, slots: 16, options: {token_s: 0.05}}"
    ranks = ["trainer.replicas=1", "trainer.ranksPerReplica=2"]
    few = ["rollout.replicas=1", "transferQueue.storageUnits=1", "algorithm.steps=10"]
    with job(tmp_path, slowly, *ranks, *few, "storage.checkpoints.every=50") as made:
        done = made.until_step(2)
        assert made.pods["trainer-0"].end(signal.SIGTERM, within_s=18) == TOLD_TO_END
        kept = int(newest_checkpoint(made).name.removeprefix("step-"))
        assert done <= kept == made.step() < 10
        made.start("trainer-0")
        assert set(made.finish(within_s=120).values()) == {0}, made.logs()
        exactly_once(made, steps=10)
    lines = (made.pods["driver-0"].folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 11))
