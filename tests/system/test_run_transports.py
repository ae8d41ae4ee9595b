"""Whole jobs whose weights go by each of the faster transports, and by nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from one_run import counted_once, finish, start

import debian

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

STEPS = 4
SETTINGS = [
    f"algorithm.steps={STEPS}",
    f"evaluation.every={STEPS}",
    "rollout.engine.options={token_s: 0.002}",
    "limits.activeDeadlineSeconds=200",
]


@pytest.mark.parametrize(
    "transport",
    ["ipc", pytest.param("pairs", marks=pytest.mark.slow), pytest.param("mooncake", marks=pytest.mark.slow)],
)
def test_every_sample_counts_once_and_nothing_goes_over_the_host_network(tmp_path: Path, transport: str) -> None:
    folder = tmp_path / "run"
    settings = [*SETTINGS, f"weightSync.transport={transport}"]
    finish(start("counting.yaml", folder, settings, env=debian.environment()), within_s=200)
    counted_once(folder, STEPS * 8 * 4)
    said = "".join(path.read_text() for path in (folder / "logs").glob("rollout-*.log"))
    assert ("524288 bytes in" in said, ", 0 bytes sent" in said) == (True, transport == "ipc")
    assert "host network" not in said
