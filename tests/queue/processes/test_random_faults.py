"""A queue that stands alone, under random faults of all its processes: ``benchmarks/queue/faults.py`` is the judge."""

import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = Path(__file__).parents[3] / "benchmarks" / "queue" / "faults.py"

pytestmark = pytest.mark.process


def judge(folder, *words, within_s):
    """Run the fault test; it must end well, and by itself."""
    judging = subprocess.Popen(
        [sys.executable, str(FAULTS), *map(str, words), "--most", str(within_s)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        out, _ = judging.communicate(timeout=within_s + 60)
    finally:
        judging.terminate()
        judging.wait()
    assert judging.returncode == 0, out


@pytest.mark.timeout(220)
@pytest.mark.parametrize(
    ("backend", "controllers", "faults", "seed"), [("memory", 3, 14, 3), ("mooncake", 1, 18, 1), ("redis", 1, 16, 1)]
)
def test_every_row_counts_once_whatever_dies_or_hangs(tmp_path, stores, backend, controllers, faults, seed):
    """A process of each kind is killed once, and one is stopped once."""
    words = ("--backend", backend, "--controllers", controllers, "--faults", faults, "--seed", seed)
    judge(tmp_path, *words, within_s=150)


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_each_fault_that_comes_alone_is_got_over_in_time(tmp_path):
    judge(tmp_path, "--faults", 42, "--seed", 1, "--alone", "--pause", 4, 5, within_s=600)


@pytest.mark.slow
@pytest.mark.timeout(1900)
@pytest.mark.parametrize("backend", ["memory", "mooncake", "redis"])
def test_every_row_counts_once_after_200_faults(tmp_path, stores, backend):
    judge(tmp_path, "--faults", 200, "--seed", 2, "--backend", backend, within_s=1800)


@pytest.mark.slow
@pytest.mark.timeout(1900)
def test_every_row_counts_once_after_200_faults_of_several_controllers(tmp_path):
    judge(tmp_path, "--faults", 200, "--seed", 3, "--controllers", 3, within_s=1800)
