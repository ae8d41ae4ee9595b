"""Tests of the driver import ``queue_world``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
