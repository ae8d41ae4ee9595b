"""The model of verl's runs, where its time can be said in a line."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from asyncflow.flow.admission import BoundedLag, StalenessThreshold

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from verl_model import Engines, Training, simulate
from verl_rows import FITTED, ROWS, fit, predicted

MANIFEST = Path(__file__).parents[2] / "benchmarks" / "verl_rows.yaml"
EQUAL = Engines(replicas=2, slots=99, tokens=100, sigma=0, rho=0, token_s=0.1, share_s=0.01, recompute_s=0, most=1000)
TRAINING = Training(steps=12, prompts=4, size=4, step_s=3.0, sync_every=2, completion=True)


def rules(threshold):
    whole = {"prompts_per_step": TRAINING.prompts}
    return [
        BoundedLag(lag=1000, steps=TRAINING.steps, **whole),
        StalenessThreshold(sync_every=TRAINING.sync_every, threshold=threshold, **whole),
    ]


def test_without_a_lead_engines_and_trainer_take_turns():
    generating = 100 * (0.1 + 0.01 * 15)
    assert simulate(EQUAL, TRAINING, rules(0.0)) == pytest.approx((generating + 6, generating))


def test_with_a_lead_of_a_cycle_the_longer_of_the_two_is_all():
    assert simulate(EQUAL, replace(TRAINING, step_s=30.0), rules(1.0)) == pytest.approx((60, 0))


def test_what_runs_at_a_publication_stands_still_while_its_cache_is_computed():
    slow = replace(EQUAL, recompute_s=0.01)
    assert simulate(slow, TRAINING, rules(0.0)) == simulate(EQUAL, TRAINING, rules(0.0)), "nothing runs then"
    long, slow = replace(EQUAL, sigma=1.0), replace(slow, sigma=1.0)
    assert simulate(slow, TRAINING, rules(0.5)).seconds > simulate(long, TRAINING, rules(0.5)).seconds + 0.5


@pytest.mark.parametrize("seed", range(3))
def test_a_step_of_what_is_complete_first_waits_for_no_long_response(seed):
    long = replace(EQUAL, sigma=1.0)
    late, early = (
        simulate(long, replace(TRAINING, completion=completion), rules(0.5), seed=seed) for completion in (False, True)
    )
    assert early.seconds < late.seconds
    assert early == simulate(long, TRAINING, rules(0.5), seed=seed)


def test_the_manifest_is_what_the_model_fits_to_the_rows_that_it_may_see():
    for row in ROWS:
        if row.bar is None:
            assert predicted(MANIFEST, row).seconds == pytest.approx(row.step, rel=0.1)


def test_a_fit_finds_the_least():
    found = fit(lambda values: (values["tokens"] / 80 - 1) ** 2 + (values["share_s"] / 0.002 - 1) ** 2, FITTED)
    assert found == pytest.approx({"tokens": 80, "share_s": 0.002}, rel=0.02)
