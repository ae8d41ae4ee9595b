"""Tests of rewards import ``hostile``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
