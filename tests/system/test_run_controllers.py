"""A whole job whose queue has three controllers, each of which is killed."""

from pathlib import Path

import pytest
from one_run import counted_once, finish, kill, start, wait_for_step

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

STEPS = 12
SETTINGS = [
    "transferQueue.controllers=3",
    f"algorithm.steps={STEPS}",
    "algorithm.promptsPerStep=4",
    "evaluation.every=6",
    "rollout.engine.options={token_s: 0.02}",
]


def test_every_sample_counts_once_although_each_controller_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = start("counting.yaml", folder, SETTINGS)
    for step, index in ((2, 1), (5, 0), (8, 2)):
        wait_for_step(folder, step, run)
        kill(folder, "controller", index)
    finish(run, within_s=200)
    counted_once(folder, STEPS * 4 * 4)
