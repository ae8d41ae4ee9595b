"""Latency of calls with one sample of 24.6 KB in six columns: put, write of a further column, claim with fetch.

A sample is acknowledged before the next is claimed, outside of the measured time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from implementations import implementation
from samples import emit, grpo_samples, milliseconds

PARTITION, TASK = "one", "read"
WARM, DIFFERENT = 20, 64
CALL_S = 5.0


def run(kind: str, *, units: int, calls: int) -> dict[str, object]:
    samples = grpo_samples(DIFFERENT, shortest=1024, longest=1024)
    samples = [{**sample, "reward": np.array([index], np.float32)} for index, sample in enumerate(samples)]
    columns = list(samples[0])
    queue = implementation(kind)
    queue.start(units=units, tasks={TASK: columns})
    try:
        packed = [queue.pack([sample]) for sample in samples]
        column = queue.pack([{"extra": np.zeros(1024, np.float32)}])
        for number in range(WARM):
            queue.put("warm", packed[number % DIFFERENT])
        rows = []

        def put(number: int) -> None:
            rows.append(queue.put(PARTITION, packed[number % DIFFERENT]))

        def get(_number: int) -> Any:
            claimed = queue.claim(PARTITION, TASK, 1, timeout=CALL_S)
            queue.fetch(claimed, columns)
            return claimed

        return {
            "put_ms": _times(put, calls),
            "write_ms": _times(lambda number: queue.write(rows[number], column), calls),
            "get_ms": _times(get, calls, after=queue.acknowledge),
        }
    finally:
        queue.close()


def _times(
    call: Callable[[int], Any], count: int, *, after: Callable[[Any], None] = lambda _: None
) -> dict[str, float]:
    times = []
    for number in range(count):
        started = time.perf_counter()
        result = call(number)
        times.append(time.perf_counter() - started)
        after(result)
    return milliseconds(times)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("implementation")
    options.add_argument("--units", nargs="+", type=int, default=[1, 2])
    options.add_argument("--calls", type=int, default=500)
    chosen = options.parse_args()
    for units in chosen.units:
        figures = run(chosen.implementation, units=units, calls=chosen.calls)
        emit({"case": "one sample", "implementation": chosen.implementation, "units": units, **figures})


if __name__ == "__main__":
    main()
