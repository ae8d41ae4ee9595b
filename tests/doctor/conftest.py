"""Tests of the doctor import ``runs_seen``, and the faults that ``benchmarks/doctor`` plants."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks" / "doctor")]
