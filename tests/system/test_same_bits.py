"""A deterministic run is a function of its manifest and seed: not of the number of rollouts, nor of who is killed."""

import hashlib
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from one_run import finish, kill, start, wait_for_step

from asyncflow import cli
from asyncflow.models.source import materialize_config, materialize_weights

pytestmark = pytest.mark.process

TINY = "tiny://reverse-digits"
DETERMINISTIC = ["schedule.deterministic=true"]
SYNC = ["schedule.mode=sync", "schedule.update=sync", "schedule.maxStaleness=0"]
HITS = [("rollout", signal.SIGTERM), ("trainer", signal.SIGKILL), ("rollout", signal.SIGKILL)]
"""A rollout that hands on what runs, then two processes that hand on nothing."""
SHORT = ["algorithm.steps=5", "algorithm.promptsPerStep=8", "data.eval.size=16"]


def exported(
    folder: Path, settings: Sequence[str], *, rollouts: int, hit: Sequence[tuple[str, signal.Signals]] = ()
) -> str:
    """Return the SHA-256 of the weights that a run of so many rollouts exports; each step one role is hit."""
    run = start("quickstart.yaml", folder, [*settings, f"rollout.replicas={rollouts}"])
    for step, (role, by) in enumerate(hit, start=1):
        wait_for_step(folder, step, run, within_s=180)
        kill(folder, role, by=by)
    finish(run, within_s=600)
    return hashlib.sha256((folder / "export" / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.timeout(900)
def test_more_rollouts_and_kills_change_no_bit_of_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = materialize_config(TINY, tmp_path)
    materialize_weights(TINY, model)
    settings = [*DETERMINISTIC, *SHORT, f"model.source={model}"]
    alone = exported(tmp_path / "one", settings, rollouts=1)
    folder = tmp_path / "three"
    assert exported(folder, settings, rollouts=3, hit=HITS) == alone
    assert cli.invoke(["replay", str(folder), "--step", "4", "-n", "1"]) == 0
    said = capsys.readouterr().out
    assert "tokens and log-probs of the 64 samples of step 4: the same bits" in said
    assert "θ4 with the digest of what was published: the same bits" in said
    assert "figures of metrics.jsonl: the same" in said
    assert cli.invoke(["explain", str(folder), "24/3"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("sample 24/3: trained, of step 4\n")
    assert all(words in said for words in ("to be made by θ2", "task rollout: leased", "7 tokens by θ2", "step 5"))


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_fifteen_steps_of_the_quickstart_have_one_digest(tmp_path: Path) -> None:
    settings = [*DETERMINISTIC, "algorithm.steps=15"]
    digests = {
        f"{rollouts} rollouts": exported(tmp_path / str(rollouts), settings, rollouts=rollouts)
        for rollouts in (1, 2, 3)
    }
    digests["hit"] = exported(tmp_path / "hit", settings, rollouts=2, hit=HITS)
    assert len(set(digests.values())) == 1, digests


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_synchronous_runs_have_one_digest(tmp_path: Path) -> None:
    settings = [*SYNC, "algorithm.steps=15"]
    first, second = (exported(tmp_path / name, settings, rollouts=1) for name in ("first", "second"))
    assert first == second
