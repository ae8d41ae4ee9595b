"""Whole jobs, with real roles in real processes: from a manifest to its summary, through kills, and on again."""

import json
import re
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from one_run import (
    all_that_was_done_is_recorded,
    bearer,
    counted_once,
    direct,
    every_second_has_a_cause,
    finish,
    kill,
    start,
    untrained,
    wait_for_step,
)
from safetensors.numpy import load_file

from asyncflow import cli
from asyncflow.api.names import LAST_WORDS_ENV
from asyncflow.queue.ledger.audit import audit_ledger

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
COUNTING = [
    "algorithm.steps=24",
    "algorithm.promptsPerStep=4",
    "evaluation.every=12",
    "limits.activeDeadlineSeconds=200",
    "rollout.engine.options={token_s: 0.01}",
]
SMALL = ["algorithm.steps=3", "algorithm.promptsPerStep=4", "data.eval.size=16", "storage.checkpoints.every=2"]
BEST = ["storage.checkpoints={every: 2, keep: 1, keepBest: reward}", "evaluation.every=2", "evaluation.passAt=[1]"]
FIELDS = {
    "steps",
    "wall_s",
    "eval_accuracy_first",
    "eval_accuracy_last",
    "eval_greedy_first",
    "eval_greedy_last",
    "reward_first",
    "reward_last",
    "tokens_generated",
    "tokens_trained",
    "tpspd",
    "staleness_start_max",
    "staleness_start_mean",
    "staleness_end_max",
    "samples_dispatched",
    "samples_trained",
    "samples_filtered",
    "samples_dropped",
    "samples_unfinished",
    "samples_lost",
    "samples_duplicated",
    "idle_share",
    "logprob_gap_p99",
}


def summary(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return read


def test_every_sample_counts_once_although_each_role_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = start("counting.yaml", folder, COUNTING)
    for step, role in enumerate(["rollout", "trainer", "controller", "storage", "driver"], start=2):
        wait_for_step(folder, step, run, within_s=60)
        kill(folder, role)
        time.sleep(1)
    finish(run, within_s=200)
    counted_once(folder, 24 * 4 * 4)
    timeline = every_second_has_a_cause(folder)
    killed = [track for track in timeline.tracks if track.killed]
    assert {track.role for track in killed} == {"rollout", "trainer", "controller", "storage", "driver"}
    assert all(track.main[-1].cause == "lost" for track in killed)
    assert {mark.of for mark in timeline.marks if mark.what == "killed"} == {track.name for track in killed}


def test_a_model_is_trained_and_the_run_goes_on_after_its_end(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    finish(start("quickstart.yaml", folder, [*SMALL, *BEST]), within_s=200)
    first = summary(folder)
    the_best_is_kept(folder, first)
    assert set(first) >= FIELDS
    every_figure_event_and_file_is_on_its_page(folder)
    assert (first["steps"], first["samples_trained"], first["samples_lost"]) == (3, 3 * 4 * 8, 0)
    all_that_was_done_is_recorded(every_second_has_a_cause(folder))
    assert first["staleness_start_max"] == 1
    assert first["logprob_gap_p99"] < 1e-4
    lags = [json.loads(line)["staleness_start_mean"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lags == [0.0, 1.0, 1.0]
    assert (folder / "export" / "model.safetensors").exists()
    finish(start("quickstart.yaml", folder, ["algorithm.steps=4", *SMALL[1:]], "--resume"), within_s=200)
    again = summary(folder)
    assert (again["steps"], again["samples_trained"], again["samples_duplicated"]) == (4, 4 * 4 * 8, 0)


def test_adapters_are_trained_in_several_updates_a_step_with_a_correction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model, folder = untrained(tmp_path), tmp_path / "run"
    lora = [f"model.source={model}", "trainer.lora={rank: 4, targets: [q_proj, up_proj]}"]
    # Untrained, the model answers nothing right: the entropy bonus alone gives a gradient.
    updates = ["algorithm.epochs=2", "algorithm.miniBatches=2", "algorithm.entropy=0.1"]
    correction = ["algorithm.old=recompute", "algorithm.correction={kind: mask, level: sequence, low: 0.5, high: 2.0}"]
    finish(start("quickstart.yaml", folder, [*SMALL, *lora, *updates, *correction]), within_s=200)
    made = summary(folder)
    assert made["exports"] == {"export": 3}
    every_figure_event_and_file_is_on_its_page(folder)
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        assert 0.9 < line["correction_min"] <= line["correction_mean"] <= line["correction_max"] < 1.1
        assert (round(line["correction_ess"], 3), line["correction_high"], line["correction_low"]) == (1, 0, 0)
        assert line["silent_samples"] == line["samples"] == 4 * 8
    assert (made["steps"], made["samples_trained"], made["samples_lost"]) == (3, 3 * 4 * 8, 0)
    assert made["logprob_gap_p99"] < 1e-4
    assert cli.invoke(["replay", str(folder), "--step", "3"]) == 0
    said = capsys.readouterr().out
    assert all(f"step-000003/{name}: the same bits" in said for name in ("model.safetensors", "optimizer.safetensors"))
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), folder / "export")
    assert adapted.peft_config["default"].base_model_name_or_path == str(model)
    assert all(tensor.any() for name, tensor in adapted.named_parameters() if "lora_B" in name)
    assert [file.name for file in (folder / "export").glob("*.safetensors")] == ["adapter_model.safetensors"]


def every_figure_event_and_file_is_on_its_page(folder: Path) -> None:
    lines, events = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "events.jsonl")
    )
    figures = {name for each in (summary(folder), *lines) for name in each}
    for page, names in (("run-folder.md", figures), ("events.md", {event["event"] for event in events})):
        text = (REFERENCE / page).read_text()
        assert {name for name in names if f"`{name}`" not in text} == set()
    page = (REFERENCE / "run-folder.md").read_text()
    files = {path.name for path in folder.iterdir()} - {"run"} | {
        f"run/{path.name}" for path in (folder / "run").iterdir()
    }
    assert {name for name in files if not re.search(rf"`{re.escape(name)}[/`]", page)} == set()


def the_best_is_kept(folder: Path, said: dict[str, Any]) -> None:
    """The checkpoint with the best evaluation is named, and kept beside the newest; each can be exported."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    rewards = {event["step"]: event["reward"] for event in events if event["event"] == "evaluation"}
    assert rewards.keys() == {0, 2, 3}
    best = max(rewards, key=lambda step: (rewards[step], -step))
    assert said["best"] == {"step": best, "by": "reward", "value": rewards[best]}
    assert said["exports"] == {"export": 3} | ({"export-best": best} if best not in (0, 3) else {})
    assert (folder / "export-best" / "model.safetensors").is_file() == (best not in (0, 3))
    assert said["eval_pass_at_last"] == {"1": said["eval_accuracy_last"]}
    kept = {int(path.parent.name.removeprefix("step-")) for path in folder.glob("checkpoints/*/manifest.json")}
    assert kept == {best, 3} - {0}
    assert cli.invoke(["model", "export", str(folder), str(folder.parent / "exported"), "--step", "3"]) == 0
    exported, last = (load_file(path / "model.safetensors") for path in (folder.parent / "exported", folder / "export"))
    assert exported.keys() == last.keys()
    assert all(np.array_equal(exported[name], last[name]) for name in last)


def test_a_suspended_job_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, words = tmp_path / "run", tmp_path / "last-words"
    monkeypatch.setenv(LAST_WORDS_ENV, str(words))
    run = start("counting.yaml", folder, [*COUNTING, "storage.checkpoints.every=10"])
    wait_for_step(folder, 3, run, within_s=60)
    record = json.loads((folder / "run" / "processes.json").read_text())
    token = (folder / "run" / "token").read_text()
    read_only = urllib.request.Request(f"{record['http']}/v1/suspend", method="POST", headers=bearer(token))
    with pytest.raises(urllib.error.HTTPError, match="405"):
        urllib.request.urlopen(read_only, timeout=60)
    assert [direct(folder, "/v1/suspend", headers=headers) for headers in ({}, bearer("wrong"))] == [401, 401]
    assert direct(folder, "/v1/suspend", certificate="viewer-0") == 403
    assert direct(folder, "/v1/checkpoint", headers=bearer(token)) == 202
    assert direct(folder, "/v1/suspend", certificate="operator-0") == 202
    finish(run, within_s=60)
    assert summary(folder)["phase"] == "Suspended"
    assert 3 <= summary(folder)["steps"] < 24
    said = json.loads(words.read_text())
    assert [said[name] for name in ("phase", "step", "steps")] == ["Suspended", summary(folder)["steps"], 24]
    finish(start("counting.yaml", folder, [*COUNTING, "storage.checkpoints.every=10"], "--resume"), within_s=120)
    report = audit_ledger(folder / "ledger")
    assert (report.trained, report.lost, report.duplicated) == (24 * 4 * 4, 0, 0)
    said = json.loads(words.read_text())
    assert [said[name] for name in ("phase", "step", "version")] == ["Succeeded", 24, 24]
    assert summary(folder)["phase"] == "Succeeded"
