"""Rows like those of GRPO, from fixed seeds, and helpers for measurements and results.

A *sample* is a mapping of column names to 1-D arrays. A result is one JSON object on one line; its ``case`` and
``implementation`` identify the measurement.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Sample: TypeAlias = Mapping[str, npt.NDArray[Any]]

COLUMNS = ("prompt_ids", "response_ids", "old_logp", "ref_logp", "advantage")
_VOCABULARY = 150_000


def grpo_samples(
    count: int, *, prompt: int = 512, shortest: int = 512, longest: int = 4096, seed: int = 0
) -> list[dict[str, npt.NDArray[Any]]]:
    """Return samples: a prompt and a response of int64 tokens, and three float32 columns of the response's length."""
    random = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        length = int(random.integers(shortest, longest + 1))
        samples.append(
            {
                "prompt_ids": random.integers(0, _VOCABULARY, prompt, dtype=np.int64),
                "response_ids": random.integers(0, _VOCABULARY, length, dtype=np.int64),
                **{name: random.standard_normal(length, dtype=np.float32) for name in COLUMNS[2:]},
            }
        )
    return samples


def sized(samples: Sequence[Sample]) -> int:
    """Return the number of bytes of all values."""
    return sum(values.nbytes for sample in samples for values in sample.values())


def same(one: Sample, other: Sample) -> bool:
    """Return whether two samples have the same columns, types and bytes."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and np.array_equal(one[name], other[name]) for name in one
    )


def milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    """Return number, p50, p99 and mean of times, in milliseconds."""
    ordered = sorted(seconds)
    return {
        "n": len(ordered),
        "p50": round(statistics.median(ordered) * 1e3, 4),
        "p99": round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] * 1e3, 4),
        "mean": round(statistics.fmean(ordered) * 1e3, 4),
    }


def cpu_s(pid: int | str = "self") -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def emit(result: Mapping[str, Any]) -> None:
    """Print one result, and append it to the file that ``BENCH_OUT`` names."""
    line = json.dumps(result)
    print(line, flush=True)
    if path := os.environ.get("BENCH_OUT"):
        with Path(path).open("a") as file:
            file.write(line + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """Return all results in a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
