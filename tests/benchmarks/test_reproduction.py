"""The arithmetic of the papers' figures, and what a table says of one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from bench_async.points import MANIFEST
from real_model import Run, alike
from reproduction import ablation, mindspeed, periodic
from reproduction.figures import Figure, table

from asyncflow.api.load import load_job


def test_a_figure_meets_its_bar_in_all_that_was_found():
    assert Figure(what="x", paper=2.0, measured=2.1, simulated=1.9, bar=0.06).met
    assert not Figure(what="x", paper=2.0, measured=2.1, simulated=1.8, bar=0.05).met
    assert Figure(what="x", paper=2.0, simulated=9.0).met, "without a bar there is none to miss"
    row = list(table([Figure(what="x", paper=2.0, unit=" s", measured=2.5, bar=0.1)]))[-1]
    assert row == "| x | 2 s | 2.5 s (+25.0%) |  | predicted | 10%: **no** |"


def test_table_1_of_mindspeed_is_its_formula():
    small, large = mindspeed.SMALL, mindspeed.LARGE
    assert small.moved() / 2**30 == pytest.approx(0.97, abs=0.005)
    assert large.moved() == 3 * small.moved()
    assert large.seconds(units=1) == pytest.approx(9.92, abs=0.005)
    assert large.seconds(units=4) < mindspeed.AT_FOUR_S
    assert large.moved(controllers=8) - large.moved() == 384 * 16 * 4 * 8 * 8 * 3
    assert small.held() < small.moved() < 3.1 * small.held()


def test_both_linearities_follow_from_the_iteration_that_they_say():
    base, batch = mindspeed.base_s(nodes=12), mindspeed.Batch(prompts=64 * 12, responses=16)
    other = base / mindspeed.LINEAR["transfer dock"] - batch.seconds(units=12)
    assert base / (other + batch.seconds(units=1)) == pytest.approx(mindspeed.LINEAR["replay buffer"])


def test_shares_are_all_of_an_iteration_and_make_a_manifest():
    for shares in ablation.SWEEP:
        assert shares.generation + shares.reference + shares.update + shares.sync == pytest.approx(1)
    for kind in ablation.SCHEDULES:
        spec = load_job(MANIFEST, ablation.settings(kind, ablation.Shares(), iteration_s=10.0)).spec
        samples = spec.algorithm.prompts_per_step * spec.algorithm.group_size
        train = samples * float(str(spec.trainer.backend.options["sample_s"]))
        assert train == pytest.approx(10 * (0.34 + (0.18 if kind == "base" else 0)))


@pytest.mark.parametrize("size", [8, 16, 32])
def test_packing_saves_what_table_3_of_periodic_asynchrony_says(size):
    prompt, response = periodic.shape(size=size)
    apart, shared = periodic.shared_tokens(prompt=prompt, response=response, size=size)
    assert (apart, shared) == (size * (prompt + response), prompt + size * response)
    assert shared / apart == pytest.approx(periodic.SHARED_M / periodic.TOKENS_M, abs=0.002)


def test_a_synchronous_step_waits_for_all_and_a_periodic_one_for_one_group():
    sync, stream = (periodic.expected_waits(mode) for mode in ("sync", "periodic"))
    assert len(sync) == len(stream) == periodic.STEPS - 2
    assert all(0 < first < 0.7 * last for first, last in zip(stream, sync, strict=True))
    spec = load_job(MANIFEST, periodic.start_up_settings("sync")).spec
    samples = spec.algorithm.prompts_per_step * spec.algorithm.group_size
    assert spec.rollout.replicas * spec.rollout.engine.slots == samples, "each has a slot from the beginning"


def test_accuracies_are_alike_as_far_as_chance_goes():
    one = Run(step_s=1.0, accuracy=0.80, problems=400)
    assert alike(one, Run(step_s=1.0, accuracy=0.75, problems=400))
    assert not alike(one, Run(step_s=1.0, accuracy=0.70, problems=400))
    assert alike(Run(step_s=1.0, accuracy=1.0, problems=400), Run(step_s=1.0, accuracy=1.0, problems=400))
