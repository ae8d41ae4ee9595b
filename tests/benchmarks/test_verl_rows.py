"""The manifest of verl's rows, and what the simulator says of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from verl_rows import FITTED, ROWS, fit, predicted

MANIFEST = Path(__file__).parents[2] / "benchmarks" / "verl_rows.yaml"
EMULATED = {0.0: 225.5, 0.1: 170.4, 0.3: 144.2, 0.5: 134.5}
"""Seconds of a cycle in runs of 17 processes, as docs/internals/emulation.md has them."""


@pytest.mark.parametrize("row", ROWS)
def test_the_simulator_says_what_was_emulated_and_fits_what_it_may_see(row) -> None:
    found = predicted(MANIFEST, row).seconds
    assert found == pytest.approx(EMULATED[row.threshold], rel=0.02)
    if row.bar is None:
        assert found == pytest.approx(row.step, rel=0.05)


def test_a_fit_finds_the_least():
    found = fit(lambda values: (values["tokens"] / 80 - 1) ** 2 + (values["share_s"] / 0.002 - 1) ** 2, FITTED)
    assert found == pytest.approx({"tokens": 80, "share_s": 0.002}, rel=0.02)
