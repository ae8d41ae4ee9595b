"""Tests of the planner import ``planner_problems``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
