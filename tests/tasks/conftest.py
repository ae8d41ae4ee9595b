"""Put the helpers that lie beside the tests of tasks on the import path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
