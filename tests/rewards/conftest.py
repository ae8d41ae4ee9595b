"""Tests of rewards import ``hostile`` and ``scoring_one``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
