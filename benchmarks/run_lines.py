"""Reader of the JSON lines files in a run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def lines(folder: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Return the lines of ``file``, in order; ``metrics.jsonl`` has one per completed step, of each attempt."""
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


def evaluations(folder: Path) -> list[dict[str, Any]]:
    """Return the evaluations of weights that no trainer has replaced by making their step again."""
    kept: dict[int, dict[str, Any]] = {}
    for line in lines(folder, "events.jsonl"):
        if line["event"] == "step made again":
            kept = {step: known for step, known in kept.items() if step < line["step"]}
        elif line["event"] == "evaluation":
            kept[line["step"]] = line
    return list(kept.values())
