"""``asyncflow sim`` and ``asyncflow sim fit``."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from asyncflow import cli
from asyncflow.api.load import load_job
from asyncflow.driver.sample_files import SampleText, write_samples
from asyncflow.sim import Models, scenario_of, simulate

COUNTING = Path(__file__).parents[2] / "examples" / "counting.yaml"
SETTINGS = ("algorithm.steps=6", "evaluation=null", "trainer.backend.options.sleep_s=0.01")


def command(*arguments: object) -> int:
    return cli.invoke(["sim", *map(str, arguments)])


def sets() -> list[str]:
    return [part for setting in SETTINGS for part in ("--set", setting)]


def test_a_manifest_is_simulated_by_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(COUNTING, *sets(), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    made = simulate(scenario_of(load_job(COUNTING, SETTINGS)), seed=0)
    assert told["wall_s"] == made.wall_s
    assert [step["wall_s"] for step in told["steps"]] == [step.wall_s for step in made.steps]
    assert command("--seed", 3, COUNTING, *sets(), "--output", tmp_path / "drawn") == 0
    assert {path.name for path in (tmp_path / "drawn").iterdir()} == {"timeline.html", "timeline.json"}
    shown = capsys.readouterr().out
    assert "counting: 6 steps in" in shown
    assert "rollout" in shown
    assert "note" not in shown
    assert command(COUNTING, *sets(), "--set", "algorithm.filterZeroVariance=drop") == 0
    assert "note: not simulated: groups without variance, which are dropped" in capsys.readouterr().out


def test_colocated_takes_turns(capsys: pytest.CaptureFixture[str]) -> None:
    asked = (*sets(), "--set", "schedule={mode: sync}", "--json")
    walls = []
    for turns in ((), ("--colocated", 0.5, 0.25)):
        assert command(COUNTING, *asked, *turns) == 0
        walls.append(json.loads(capsys.readouterr().out)["wall_s"])
    assert walls[1] == pytest.approx(walls[0] + 6 * 0.75)


def test_what_takes_an_unknown_time_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(COUNTING.with_name("quickstart.yaml")) == 2
    assert "Use models that asyncflow sim fit made from a run of it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("rollout.engine.options.token_s=fast", "spec.rollout.engine.options: Expected `float`, got `str`"),
        ("rollout.engine.options.tokn_s=1", "spec.rollout.engine.options: unknown option tokn_s"),
        ("rollout.engine.options.token_s=-1", "spec.rollout.engine.options: Expected `float` >= 0.0"),
        ("trainer.backend.options.sleep_s=long", "spec.trainer.backend.options: Expected `float`, got `str`"),
        ("trainer.backend.options.sleeps=1", "spec.trainer.backend.options: unknown option sleeps"),
    ],
)
def test_an_option_that_a_run_would_refuse_is_refused(
    option: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(COUNTING, *sets(), "--set", option) == 2
    assert words in capsys.readouterr().err


def test_a_run_is_fitted_and_its_models_are_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = load_job(COUNTING, SETTINGS)
    made = simulate(scenario_of(job), seed=0)
    lines = [{**msgspec.structs.asdict(step), "publication_s": 0.02} for step in made.steps]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "job.yaml").write_text(json.dumps(job.model_dump(mode="json", by_alias=True, exclude_none=True)))
    sample = SampleText(
        purpose="train", step=1, serial=0, sample=0, drawn=True, prompt="", response="", answer="", reward=0.0,
        prompt_tokens=5, response_tokens=8, version_min=0, version_max=0, finish="stop",
    )  # fmt: skip
    write_samples(tmp_path, [sample], purpose="train", step=1, form="jsonl")
    assert command("fit", tmp_path) == 2
    assert "is no finished run" in capsys.readouterr().err
    (tmp_path / "summary.json").write_text(json.dumps({"training_s": made.wall_s, "idle_share": {}}))
    whole = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text("".join(whole.splitlines(keepends=True)[:1]))
    assert command("fit", tmp_path) == 2
    assert "1 steps are recorded. Record more than 2 steps" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text(whole)
    (tmp_path / "summary.json").write_text(json.dumps({"training_s": made.wall_s, "idle_share": made.idle}))
    assert command("fit", tmp_path) == 0
    assert "wall_s" in capsys.readouterr().out
    models = Models.read(tmp_path / "models.json")
    assert (models.trainer.publish_s, models.prompt_tokens) == (0.02, 5)
    assert command(COUNTING, *sets(), "--models", tmp_path / "models.json") == 0
