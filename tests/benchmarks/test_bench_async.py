"""The points of the asynchronous benchmark and what is made of their results: closed forms, lines, bars."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from bench_async.points import GROUPS, MODES, SIZE, SLOTS, Point, closed_form, ends, makespan, matrix
from bench_async.results import PERIODIC, Result, Results, bars, lines_of, predictions, table

FEW = 4


def point(mode: str, ratio: float = 1.0, seed: int = 1) -> Point:
    return Point(mode=mode, sigma=0.5, ratio=ratio, seed=seed, iterations=FEW)


def result(mode: str, walls: list[float], **of: float) -> Result:
    return Result(point=point(mode, **of), walls=walls, waited=0.0, lag=0.0, lost=0, load=1.0)


def test_the_next_response_begins_in_the_slot_that_is_free_first():
    assert list(ends([5, 1, 1, 4, 2], slots=2)) == [5, 1, 2, 6, 7]
    assert makespan([5, 1, 1, 4, 2], slots=2) == 7


def test_every_mode_is_a_manifest_of_the_same_load():
    for mode in MODES:
        spec = point(mode).job.spec
        assert spec.algorithm.prompts_per_step * point(mode).steps_each == GROUPS
        assert spec.algorithm.steps == FEW * point(mode).steps_each
        twice = 2 if mode == "colocated" else 1
        assert spec.rollout.replicas * spec.rollout.engine.slots == SLOTS * twice
        sample_s = float(str(spec.trainer.backend.options["sample_s"]))
        assert sample_s * GROUPS * SIZE == pytest.approx(5.0 / twice)


def test_generation_takes_what_was_asked_for():
    made = point("sync")
    assert fmean(made.token_s * makespan(each, slots=SLOTS) for each in made.lengths) == pytest.approx(5.0)


@pytest.mark.parametrize("ratio", PERIODIC)
def test_the_closed_forms_gain_what_the_bars_say(ratio):
    """The bars of issue 19 are the ideal of this load, a few seeds and iterations apart."""
    gains = [
        closed_form(point("sync", ratio, seed)) / closed_form(point("periodic", ratio, seed)) for seed in (1, 2, 3)
    ]
    assert fmean(gains) == pytest.approx(PERIODIC[ratio], rel=0.02)
    assert max(gains) < 2


def test_an_iteration_of_a_cycle_is_four_steps():
    assert point("verl stale").iterations_of([1.0] * 16) == [4.0, 4.0]
    assert point("sync").iterations_of([9.0, 9.0, 1.0, 2.0]) == [1.0, 2.0]


def test_the_simulator_knows_the_closed_form_of_taking_turns(tmp_path):
    made, file = point("sync"), tmp_path / "simulated.jsonl"
    assert predictions([made], file)[made] == pytest.approx(closed_form(made), rel=0.02)
    file.write_text(file.read_text().replace('"seconds": ', '"seconds": 1'))
    assert predictions([made], file)[made] > 1.5 * closed_form(made), "what is in the file is not simulated again"


def test_what_was_measured_is_not_measured_again(tmp_path):
    points = matrix(modes=["sync", "delayed"], sigmas=[0.5], ratios=[1.0], seeds=[1, 2], iterations=FEW)
    results = Results(tmp_path / "results.jsonl")
    assert results.missing(points) == points
    for each in points[:3]:
        results.add(Result(point=each, walls=[1.0, 2.0], waited=0.5, lag=0.0, lost=0, load=1.0))
    again = Results(tmp_path / "results.jsonl")
    assert again.all == results.all
    assert again.missing(points) == points[3:]


def test_lines_are_of_the_seeds_that_both_have_and_bars_of_lines():
    sync, periodic = closed_form(point("sync")), closed_form(point("periodic"))
    found = [
        result("sync", [sync]),
        result("sync", [90.0], seed=2),
        result("periodic", [periodic]),
        result("delayed", [periodic + 1]),
    ]
    lines = {line.mode: line for line in lines_of(found, {point("periodic"): 2 * periodic})}
    assert lines["periodic"].gain == pytest.approx(sync / periodic)
    assert lines["sync"].seeds == 2
    judged = {bar.what: bar.met for bar in bars(list(lines.values()))}
    assert judged["sync is its closed form within 3%, sigma 0.5, ratio 1"] is False
    assert judged["periodic gains 1.91 within 5%, sigma 0.5, ratio 1"] is True
    assert judged["the simulator is within 5%: periodic, sigma 0.5, ratio 1"] is False
    assert judged["delayed is no slower than periodic, sigma 0.5, ratio 1"] is False
    assert len(list(table(list(lines.values())))) == 2 + len(lines)


def test_a_lost_sample_misses_a_bar():
    lost = Result(point=point("delayed"), walls=[1.0], waited=0.0, lag=0.0, lost=3, load=1.0)
    assert [bar.met for bar in bars(lines_of([lost], {}))] == [False]
