"""The work of a step: statistics of lengths, and what a manifest says of it."""

import math

import msgspec
import pytest
from planner_problems import job_of

from asyncflow.identity import SampleKey
from asyncflow.planner.work import Responses, work_of
from asyncflow.rollout.lengths import Lengths

PPO = ("algorithm={name: ppo, steps: 10, promptsPerStep: 8}",)


def test_mean_and_resident_length_of_a_lognormal_that_is_hardly_cut() -> None:
    responses = Responses(lengths=Lengths(tokens=100, sigma=0.5), most=100_000)
    assert responses.mean == pytest.approx(100 * math.exp(0.125), rel=2e-3)
    assert responses.resident == pytest.approx(100 * math.exp(0.375) / 2, rel=5e-3)
    assert responses.variation == pytest.approx(math.sqrt(math.exp(0.25) - 1), rel=1e-2)


@pytest.mark.parametrize(
    "lengths", [Lengths(tokens=300, sigma=0.9), Lengths(tokens=50), Lengths(quantiles=(10.0, 40.0, 400.0))]
)
def test_statistics_are_those_of_what_is_drawn(lengths: Lengths) -> None:
    responses = Responses(lengths=lengths, most=512)
    drawn = [lengths.of(SampleKey(serial, 0), seed=1, most=512) for serial in range(4000)]
    assert responses.mean == pytest.approx(sum(drawn) / len(drawn), rel=0.04)
    assert responses.longest(4000) == pytest.approx(max(drawn), rel=0.05)
    assert responses.quantile(0.5) == pytest.approx(sorted(drawn)[2000], rel=0.05)
    for packing in ("separate", "shared-prompt"):
        work = msgspec.structs.replace(work_of(job_of(f"trainer.backend.packing={packing}").spec), responses=responses)
        prompts = len(drawn) / (work.group if work.shared else 1)
        pairs = prompts * work.prompt**2 / 2 + sum(work.prompt * length + length**2 / 2 for length in drawn)
        assert work.attended == pytest.approx(pairs / (prompts * work.prompt + sum(drawn)), rel=0.04)


def test_passes_of_the_trainer() -> None:
    assert work_of(job_of().spec).passes == 0
    assert work_of(job_of("algorithm.kl.coefficient=0.1").spec).passes == 1
    assert work_of(job_of("algorithm.kl.coefficient=0.1", "reference={}").spec).passes == 0
    recomputing = job_of("algorithm.old=recompute", "algorithm.miniBatches=2", "algorithm.correction={}")
    assert work_of(recomputing.spec).passes == 1


def test_a_shared_prompt_is_trained_once() -> None:
    separate, shared = (work_of(job_of(f"trainer.backend.packing={way}").spec) for way in ("separate", "shared-prompt"))
    assert separate.trained - shared.trained == separate.prompts * (separate.group - 1) * separate.prompt


@pytest.mark.parametrize(
    ("overrides", "field", "value"),
    [
        (("schedule={mode: periodic}", "algorithm.old=lagged"), "passes", 1),
        ((*PPO, "critic={}"), "passes", 1),
        ((*PPO, "critic={}"), "critic", True),
        ((*PPO, "critic={role: {}}"), "passes", 0),
        ((*PPO, "critic={role: {}}"), "critic", False),
        (("trainer.backend.tokensPerMicroBatch=2048",), "pack", 2048),
        ((), "pack", 8192),
        (("trainer.backend.precision=bf16-stochastic",), "holds", "bfloat16"),
        ((), "holds", "float32"),
        (("rollout.engine.options.args={enable-expert-parallel: true}",), "wide", True),
        ((), "wide", False),
        ((), "prompt", 64.0),
        ((), "responses", Responses(lengths=Lengths(tokens=128, sigma=0.8), most=512)),
    ],
)
def test_what_a_manifest_says_of_the_work(overrides: tuple[str, ...], field: str, value: object) -> None:
    assert getattr(work_of(job_of(*overrides).spec), field) == value


def test_measured_lengths_count_instead_of_assumed_ones() -> None:
    work = work_of(job_of().spec, lengths=Lengths(tokens=100), prompt=10.0)
    assert (work.samples, work.generated, work.trained) == (32, 3200, 3520)
