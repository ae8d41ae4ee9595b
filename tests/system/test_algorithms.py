"""Whole jobs by every kind of algorithm, with a real model: what is trained, what is left out, and the figures of each.

One job for each way through the driver and the trainer: groups filtered and refilled (dapo), a part of each group
(pf-ppo), pairs beside a reference (dpo), a critic (ppo), advantages out of a whole step (reinforce-plus-plus), and
another's package that has a loss of its own alone, as gspo, cispo and ipo have.

In the first step the policy is the one that sampled, or the reference: its figures are known without the model.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from one_run import finish, start
from own_algorithm import install

from asyncflow import cli
from asyncflow.driver.sample_files import SampleText, read_step
from asyncflow.models.source import materialize_config, materialize_weights
from asyncflow.queue.ledger.audit import audit_ledgers

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

TINY = "tiny://reverse-digits"
STEPS, PROMPTS, GROUP = 2, 4, 8
SMALL = [
    f"algorithm.steps={STEPS}",
    f"algorithm.promptsPerStep={PROMPTS}",
    "rollout.replicas=1",
    "transferQueue.storageUnits=1",
    "evaluation=null",
    f"storage.samples.perStep={PROMPTS * GROUP}",
]


class Trained(NamedTuple):
    """A job that has ended. lines: of metrics.jsonl; texts: of the samples that each step trained."""

    lines: list[dict[str, Any]]
    texts: list[list[SampleText]]
    summary: dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, warmed up once for all jobs."""
    folder = materialize_config(TINY, tmp_path_factory.mktemp("model"))
    materialize_weights(TINY, folder)
    return folder


def run(folder: Path, manifest: str, model: Path, *settings: str, env: Mapping[str, str] | None = None) -> Trained:
    """Run a job, and check what holds by any algorithm."""
    finish(start(manifest, folder, [f"model.source={model}", *SMALL, *settings], env=env), within_s=200)
    summary = json.loads((folder / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    texts = [read_step(folder, purpose="train", step=step) for step in range(1, STEPS + 1)]
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
    for line, trained in zip(lines, texts, strict=True):
        assert line["samples"] == len(trained)
        assert math.isfinite(line["loss"])
        assert 0 < line["grad_norm"] < math.inf
        assert line["skipped"] == 0
    audit = audit_ledgers(folder / "ledger")
    assert audit.ok, audit.problems
    assert (audit.lost, audit.duplicated, audit.dropped, audit.unfinished) == (0, 0, 0, 0)
    assert audit.trained == sum(map(len, texts))
    assert audit.dispatched == audit.trained + audit.filtered
    return Trained(lines, texts, summary)


def groups_of(texts: list[SampleText]) -> list[list[SampleText]]:
    groups: defaultdict[int, list[SampleText]] = defaultdict(list)
    for text in texts:
        groups[text.serial].append(text)
    return list(groups.values())


def earned(texts: list[SampleText]) -> float:
    """Return the mean advantage of a token: minus the loss of the first step, where all ratios are 1."""
    total = sum(text.advantage * text.response_tokens for text in texts if text.advantage is not None)
    return total / sum(text.response_tokens for text in texts)


def test_dapo_refills_what_is_alike_and_leaves_out_what_was_cut_off(tmp_path: Path, model: Path) -> None:
    options = "algorithm.options={overlong_buffer: 2, overlong_penalty: 0.5, overlong_filter: true}"
    of_many_lengths = ["sampling.maxTokens=7", "sampling.temperature=1.5"]
    done = run(tmp_path / "run", "dapo.yaml", model, *of_many_lengths, options)
    alike = done.summary["groups_all_right"] + done.summary["groups_all_wrong"]
    trained = [text for texts in done.texts for text in texts]
    assert alike > 0
    assert all(len(groups_of(texts)) == PROMPTS for texts in done.texts), "others have taken their place"
    assert done.summary["samples_dispatched"] == GROUP * (STEPS * PROMPTS + alike)
    assert {text.finish for text in trained} == {"stop"}
    assert len(trained) < STEPS * PROMPTS * GROUP, "some were cut off"
    pairs = [pair for texts in done.texts for group in groups_of(texts) for pair in combinations(group, 2)]
    shaped = [(a, b) for a, b in pairs if a.reward == b.reward and 5 <= a.response_tokens < b.response_tokens]
    assert shaped
    assert all(a.advantage > b.advantage for a, b in shaped), "the longer one earns less"
    assert done.lines[0]["loss"] == pytest.approx(-earned(done.texts[0]), rel=1e-4)


def test_pf_ppo_trains_the_best_and_the_worst_of_each_group(tmp_path: Path, model: Path) -> None:
    settings = ["algorithm.name=pf-ppo", "algorithm.options={filter: best-worst, keep: 4}"]
    done = run(tmp_path / "run", "quickstart.yaml", model, *settings)
    assert [[len(group) for group in groups_of(texts)] for texts in done.texts] == [[4] * PROMPTS] * STEPS
    assert done.summary["samples_filtered"] == STEPS * PROMPTS * (GROUP - 4)
    for line, texts in zip(done.lines, done.texts, strict=True):
        assert line["silent_samples"] == sum(text.advantage == 0 for text in texts)
    assert done.lines[0]["loss"] == pytest.approx(-earned(done.texts[0]), rel=1e-4)


def test_dpo_trains_pairs_against_the_model_of_the_beginning(tmp_path: Path, model: Path) -> None:
    done = run(tmp_path / "run", "dpo.yaml", model)
    for texts in done.texts:
        for group in groups_of(texts):
            of_pairs = {text.advantage: text.reward for text in group}
            assert len(of_pairs) == len(group)
            assert set(of_pairs) in ({1, -1}, {1, -1, 2, -2})
            assert all(of_pairs[n] > of_pairs[-n] for n in of_pairs if n > 0)
    first, second = done.lines
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-4), "of pairs that nothing tells apart yet"
    assert first["pair_margin"] == pytest.approx(0, abs=1e-4)
    assert abs(second["pair_margin"]) > 1e-3
    assert 0 <= second["pair_accuracy"] <= 1


def test_ppo_learns_values_beside_the_policy(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run(tmp_path / "run", "ppo.yaml", model)
    assert [len(texts) for texts in done.texts] == [PROMPTS * GROUP] * STEPS
    lam, first = 0.95, done.texts[0]
    # With values of 0, what a token returns and earns is the reward, discounted by the tokens behind it.
    returns = [text.reward * lam**behind for text in first for behind in range(text.response_tokens)]
    mean, squares = (sum(each**power for each in returns) / len(returns) for power in (1, 2))
    assert done.lines[0]["return_mean"] == pytest.approx(mean, rel=1e-4)
    assert done.lines[0]["value_loss"] == pytest.approx(squares / 2, rel=1e-4)
    assert done.lines[0]["loss"] == pytest.approx(-mean, rel=1e-4)
    assert done.lines[0]["explained_variance"] == pytest.approx(0, abs=1e-4)
    for line in done.lines:
        assert line["critic_learning_rate"] == 1e-3
        assert line["critic_grad_norm"] > 0
        assert line["silent_samples"] == 0
    assert done.lines[1]["explained_variance"] != 0
    assert 0 <= done.lines[1]["value_clip"] <= 1
    assert {text.advantage for text in first} == {None}, "the trainer computes one for each token"
    assert cli.invoke(["explain", str(tmp_path / "run"), "0/0"]) == 0
    assert cli.invoke(["replay", str(tmp_path / "run"), "--step", "1", "--list"]) == 0
    said = capsys.readouterr().out
    assert (said.count("outcome"), said.count("advantage +")) == (2, 0)


def test_reinforce_normalises_the_returns_of_a_whole_step(tmp_path: Path, model: Path) -> None:
    penalty = "algorithm.kl={coefficient: 0.1, estimator: k2, place: reward}"
    settings = ["algorithm.name=reinforce-plus-plus", "schedule={mode: sync}", penalty]
    done = run(tmp_path / "run", "quickstart.yaml", model, *settings)
    assert [len(texts) for texts in done.texts] == [PROMPTS * GROUP] * STEPS
    first, second = done.lines
    assert first["loss"] == pytest.approx(0, abs=1e-4), "the mean of what was normalised"
    assert first["penalty_kl"] == pytest.approx(0, abs=1e-6)
    assert second["penalty_kl"] > 1e-6


def test_anothers_algorithm_trains_a_job_by_its_entry_point(tmp_path: Path, model: Path) -> None:
    (tmp_path / "softclip").mkdir()
    paths = [str(install(tmp_path / "softclip")), os.environ.get("PYTHONPATH", "")]
    env = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    settings = ["algorithm.name=softclip", "algorithm.options={sharpness: 8.0}"]
    done = run(tmp_path / "run", "quickstart.yaml", model, *settings, env=env)
    assert [len(texts) for texts in done.texts] == [PROMPTS * GROUP] * STEPS
    assert abs(earned(done.texts[0])) > 1e-2
    # Its gate is 2 / sharpness where the ratio is 1; that of grpo is 1.
    assert done.lines[0]["loss"] == pytest.approx(-earned(done.texts[0]) * 2 / 8, rel=1e-3)
    assert done.lines[1]["ratio_max"] > 1.1
    assert (done.lines[1]["clip_low"], done.lines[1]["clip_high"]) == (0, 0)
