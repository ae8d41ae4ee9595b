"""Makes ``lives.py``, an operator on an API server in memory, importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
