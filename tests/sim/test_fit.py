"""Models that are fitted to a run of which everything is known, since it was simulated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from asyncflow.api.load import load_job
from asyncflow.errors import ManifestError
from asyncflow.identity import SampleKey
from asyncflow.rollout.lengths import Lengths
from asyncflow.sim import (
    EngineModel,
    LinkModel,
    Models,
    RewardTimes,
    Simulated,
    StorageModel,
    TrainerModel,
    models_of,
    scenario_of,
    simulate,
)
from asyncflow.sim.fit import Drawn, Recorded, fitted, lengths_of

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
LENGTHS = Lengths(tokens=300, sigma=0.6, rho=0.3)
TRUE = Models(
    engine=EngineModel(slots=64, token_s=0.004, share_s=0.0004, load_s=0.3, lengths=LENGTHS),
    trainer=TrainerModel(slot_s=0.05, token_s=2e-5, optimizer_s=0.4, publish_s=0.2, checkpoint_s=0.1),
    link=LinkModel(pull_s=0.5),
    storage=StorageModel(slot_s=0.02, write_s=0.05),
    reward=RewardTimes(seconds=0.3, workers=64),
    prompt_tokens=20,
)
SETTINGS = (
    "algorithm.steps=8",
    "algorithm.promptsPerStep=8",
    "sampling.maxTokens=2000",
    "evaluation=null",
    "transferQueue.bytesPerUnit=4Gi",
)


def recorded(made: Simulated) -> Recorded:
    """Return what a real run would have left of a simulated one."""
    steps = [{**msgspec.structs.asdict(step), "publication_s": 0.2} for step in made.steps]
    samples = [Drawn(s, 20, LENGTHS.of(SampleKey(s, j), seed=0, most=2000)) for s in range(192) for j in range(8)]
    return Recorded(
        steps=steps,
        samples=samples,
        generating_s=made.spent["rollout"]["generate", ""],
        slots={step.step: step.slots for step in made.steps},
        timeline=made.timeline,
    )


@pytest.mark.parametrize(
    ("mode", "packing", "epochs"),
    [("periodic", "separate", 1), ("async", "separate", 2), ("async", "shared-prompt", 1)],
)
def test_a_fit_finds_what_the_run_was_made_with(mode: str, packing: str, epochs: int) -> None:
    update = "delayed" if mode == "async" else "sync"
    schedule = f"schedule={{mode: {mode}, update: {update}}}"
    job = load_job(
        QUICKSTART, [*SETTINGS, schedule, f"trainer.backend.packing={packing}", f"algorithm.epochs={epochs}"]
    )
    made = simulate(scenario_of(job, models=TRUE), seed=0)
    found, check = fitted(job, recorded(made))
    assert check.step_s(without=2) == pytest.approx(made.step_s(without=2), rel=0.03)
    engine, trainer = found.engine, found.trainer
    assert check.spent["rollout"]["generate", ""] == pytest.approx(made.spent["rollout"]["generate", ""], rel=0.02)
    assert engine.load_s == pytest.approx(0.3)
    exact = 1e-6 if packing == "separate" else 1e-2  # a group that is divided between slots has its prompt twice
    assert (trainer.slot_s, trainer.token_s, trainer.publish_s) == pytest.approx((0.05, 2e-5, 0.2), rel=exact)
    assert found.link.pull_s == pytest.approx(0.5)
    assert found.prompt_tokens == 20
    assert engine.lengths.rho == pytest.approx(0.3, abs=0.1)


def test_empirical_lengths_are_those_that_were_drawn() -> None:
    drawn = [Drawn(serial, 0, LENGTHS.of(SampleKey(serial, 0), seed=3, most=2000)) for serial in range(2000)]
    again = lengths_of(drawn, most=2000)
    lengths = [again.of(SampleKey(serial, 0), seed=7, most=2000) for serial in range(2000)]
    for share in (0.1, 0.5, 0.9):
        expected = sorted(each.response_tokens for each in drawn)[int(2000 * share)]
        assert sorted(lengths)[int(2000 * share)] == pytest.approx(expected, rel=0.08)


def test_models_are_written_and_read_and_bad_ones_refused(tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    TRUE.write(file)
    assert Models.read(file) == TRUE
    file.write_text('{"engine": {"slots": 0}}')
    with pytest.raises(ManifestError, match="holds no models"):
        Models.read(file)
    with pytest.raises(ManifestError, match="cannot be read"):
        Models.read(tmp_path / "absent")


def test_a_manifest_alone_says_what_simulated_engines_take_and_no_others() -> None:
    simulated = load_job(QUICKSTART.with_name("counting.yaml"), ["trainer.backend.options.sleep_s=0.5"])
    assert models_of(simulated).engine == EngineModel(slots=16, token_s=0.02)
    assert models_of(simulated).trainer == TrainerModel(slot_s=0.5)
    with pytest.raises(ManifestError, match="the durations of transformers are not known"):
        models_of(load_job(QUICKSTART))


def test_too_short_a_run_is_refused() -> None:
    job = load_job(QUICKSTART, SETTINGS)
    made = simulate(replace(scenario_of(job, models=TRUE), steps=2), seed=0)
    with pytest.raises(ManifestError, match="2 steps are recorded"):
        fitted(job, recorded(made))
