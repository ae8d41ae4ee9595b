"""Results as JSON lines, as the shared benchmarks write them: to the screen and to the file ``BENCH_OUT``.

Invariant: a result is one object on one line; ``bench`` and ``peer`` say whose it is.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def emit(result: dict[str, Any]) -> None:
    """Write one result."""
    line = json.dumps(result)
    print(line, flush=True)
    if path := os.environ.get("BENCH_OUT"):
        with Path(path).open("a") as file:
            file.write(line + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """Return all results of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    """Return p50, p99 and mean of times."""
    ordered = sorted(seconds)
    return {
        "n": len(ordered),
        "p50": round(statistics.median(ordered) * 1e3, 4),
        "p99": round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] * 1e3, 4),
        "mean": round(statistics.fmean(ordered) * 1e3, 4),
    }
