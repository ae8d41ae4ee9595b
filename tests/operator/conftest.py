"""Makes ``tests/operator/model.py``, the cluster in memory, importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
