"""asyncflow plan FILE --devices N: divisions of devices, what they rest on, and what is refused."""

import json
from pathlib import Path

import pytest

from asyncflow import cli
from asyncflow.commands.planning import PlanOptions, plan_of
from asyncflow.planner.measured import models_of_split
from asyncflow.planner.search import split_of

MANIFEST = """\
apiVersion: asyncflow.dev/v1alpha1
kind: RLJob
metadata: {name: little}
spec:
  model: {source: "pvc://models/Qwen3-0.6B"}
  data: {train: {source: "tiny://reverse-digits"}}
  reward: {function: task}
  algorithm: {steps: 4, groupSize: 4, promptsPerStep: 8}
  sampling: {maxTokens: 256, maxPromptTokens: 64}
  rollout: {engine: {name: vllm, dtype: bfloat16}, accelerator: {profile: nvidia, count: 1}}
  trainer: {backend: {name: torch, precision: bf16}, accelerator: {profile: nvidia, count: 1}}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(MANIFEST)
    return path


def planned(capsys, *arguments) -> str:
    assert cli.invoke([str(argument) for argument in ("plan", *arguments)]) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments) -> str:
    assert cli.invoke([str(argument) for argument in ("plan", *arguments)]) == 2
    return capsys.readouterr().err


def test_a_plan_says_what_it_rests_on_and_what_to_set(job: Path, capsys) -> None:
    out = planned(capsys, job, "--devices", 4, "--simulations", 3)
    assert "model     Qwen3-0.6B: 0.596 B parameters, 112 KiB of cache a token" in out
    assert "(assumed: pass --tokens, or --probe)" in out
    assert "Best divisions of 4 devices, async, delayed at quota" in out
    assert "The manifest's own" in out
    assert "--set rollout.replicas=" in out


def test_json_has_the_figures_of_the_tables(job: Path, capsys) -> None:
    change = "schedule.mode=sync"
    arguments = ("--devices", 3, "--simulations", 2, "--json", "--what-if", change, "--schedules", "--tokens", 100)
    plan = json.loads(planned(capsys, job, *arguments))
    assert [each["step_s"] for each in plan["divisions"]] == sorted(each["step_s"] for each in plan["divisions"])
    best = plan["divisions"][0]
    assert best["generation"]["devices"] + best["training"]["devices"] <= 3
    assert best["step_s"] <= plan["own"]["step_s"]
    assert plan["what_if"][change]["schedule"]["mode"] == "sync"
    assert plan["what_if"][change]["step_s"] > best["step_s"]
    assert {each["schedule"]["mode"] for each in plan["schedules"]} == {"sync", "periodic", "async"}


@pytest.mark.parametrize(
    ("given", "tokens", "sigma", "words"),
    [
        ({}, 64, 0.8, "assumed: pass --tokens, or --probe"),
        ({"tokens": 100}, 100, 0.8, "as given, their sigma of 0.8 assumed"),
        ({"sigma": 0.0}, 64, 0.0, "as given, their median of 64 assumed"),
        ({"tokens": 100, "sigma": 0.5}, 100, 0.5, "as given"),
    ],
)
def test_what_is_not_given_of_the_lengths_is_assumed(job: Path, given: dict, tokens: int, sigma: float, words: str):
    plan = plan_of(job, [], PlanOptions(devices=2, simulations=1, **given))
    lengths = plan.problem.work.responses.lengths
    assert (lengths.tokens, lengths.sigma, plan.lengths) == (tokens, sigma, words)


def test_what_is_planned_can_be_set(job: Path, capsys) -> None:
    plan = json.loads(planned(capsys, job, "--devices", 6, "--simulations", 4, "--json"))
    changes = [part for value in plan["set"] for part in ("--set", value)]
    again = json.loads(planned(capsys, job, "--devices", 6, "--simulations", 1, "--json", *changes))
    best, own = plan["divisions"][0], again["own"]
    assert (own["generation"]["devices"], own["training"]["devices"]) == (
        best["generation"]["devices"],
        best["training"]["devices"],
    )


def test_models_of_a_probe_replace_what_is_computed(job: Path, capsys, tmp_path: Path) -> None:
    plan = plan_of(job, (), PlanOptions(devices=2, simulations=1))
    split = split_of(plan.problem, plan.job.spec)
    models = models_of_split(plan.problem.work, split.engine, split.trainer)
    slower = tmp_path / "slower.json"
    models.write(slower)
    slower.write_text(slower.read_text().replace(f'"token_s": {models.engine.token_s}', '"token_s": 1.0', 1))
    out = json.loads(planned(capsys, job, "--devices", 2, "--simulations", 1, "--json", "--probe", slower))
    assert out["own"]["generation"]["token_s"] == pytest.approx(1.0)
    assert "asyncflow sim fit" in refused(capsys, job, "--devices", 2, "--probe", tmp_path)


def test_a_device_of_a_file(job: Path, capsys, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("like: h100\nmemory: 1e9\n")
    why = refused(capsys, job, "--devices", 2, "--device", mine)
    assert "Qwen3-0.6B in bf16 needs 1.19 GB a replica" in why
    assert "use tensor parallel 2" in why


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--what-if", "schedule.mode=sync"), "--what-if: it only has an effect with --devices. Pass --devices N, too"),
        (("--devices", 2, "--device", "h300"), "no device and no file with one"),
        (("--devices", 2, "--tokens", 1000), "responses of 1000 tokens are cut at 256"),
        (("--devices", 8, "--set", "model.source=pvc://models/Other-7B"), "has no config.json"),
        (("--devices", 2, "--set", "model.source=pvc://models/Qwen2.5-32B"), "training Qwen2.5-32B on 1 device (DP1)"),
    ],
)
def test_what_cannot_be_planned_is_refused(job: Path, capsys, arguments: tuple, why: str) -> None:
    assert why in refused(capsys, job, *arguments)


MIXTURE = ("--set", "model.source=pvc://models/DeepSeek-R1")
WIDE = ("--set", "rollout.engine.options.args.enable_expert_parallel=true")


def test_a_mixture_that_does_not_fit_is_refused_with_the_arithmetic_of_its_experts(job: Path, capsys) -> None:
    why = refused(capsys, job, "--devices", 16, *MIXTURE)
    assert "DeepSeek-R1 in bf16 needs 1,342 GB a replica, 8 devices have 640 GB" in why
    assert "divide its experts (rollout.engine.options.args.enable_expert_parallel: true)" in why
    why = refused(capsys, job, "--devices", 16, *MIXTURE, *WIDE)
    assert "on each device of TP8 EP8 (34 GB / 8 + experts of 1,308 GB / 8" in why
    assert "use TP8 DP4 EP32" in why
    megatron = ("--set", "trainer.backend={name: mindspeed}", "--set", "trainer.accelerator.count=8")
    why = refused(capsys, job, "--devices", 64, *MIXTURE, *WIDE, *megatron)
    assert "of weights, gradients and moments, " in why
    assert "GB of them of experts" in why


def test_without_devices_the_tasks_are_shown_as_ever(manifest: Path, capsys) -> None:
    assert "Tasks" in planned(capsys, manifest)


def test_what_a_simulated_engine_does_not_take_is_refused(manifest: Path, capsys) -> None:
    options = ("--devices", 2, "--set", "rollout.engine.options.tokn=8")
    assert "spec.rollout.engine.options: unknown option tokn. Known: tokens" in refused(capsys, manifest, *options)


def test_a_simulated_engine_says_its_lengths_itself(manifest: Path, capsys) -> None:
    options = "rollout.engine.options={tokens: 8, sigma: 0.5}"
    assert "(of the simulated engine)" in planned(
        capsys, manifest, "--devices", 2, "--set", options, "--set", "algorithm.promptsPerStep=4", "--simulations", 1
    )
