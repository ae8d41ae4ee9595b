"""Reader of the JSON lines files in a run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def lines(folder: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Return the lines of ``file``, in order; ``metrics.jsonl`` has one per completed step."""
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]
