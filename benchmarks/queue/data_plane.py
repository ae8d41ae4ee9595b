"""Throughput in GB/s of put and get by one client: 256 or 2,048 GRPO samples, at once, in chunks, and as single arrays.

The time of a get in chunks includes the claims. No time includes the acknowledgement of rows.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from implementations import Implementation, implementation
from samples import COLUMNS, Sample, cpu_s, emit, grpo_samples, same, sized

CALL_S = 10.0
TASKS = {"whole": COLUMNS, "chunks": COLUMNS}


class Watch:
    """A stopwatch: measured times by name, in seconds."""

    def __init__(self) -> None:
        self.times: defaultdict[str, list[float]] = defaultdict(list)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.times[name].append(time.perf_counter() - started)


def converted(queue: Implementation, samples: Sequence[Sample], partition: str, watch: Watch) -> None:
    """Measure a put and a get with the conversion from and to single arrays."""
    with watch.timed("put from samples"):
        queue.put(partition, queue.pack(samples))
    rows = queue.claim(partition, "whole", len(samples), timeout=CALL_S)
    with watch.timed("get to samples"):
        queue.unpack(queue.fetch(rows, COLUMNS))
    queue.acknowledge(rows)
    queue.clear(partition)


def moved(queue: Implementation, samples: Sequence[Sample], partition: str, watch: Watch, *, chunk: int) -> bool:
    """Measure a put and gets of packed rows, at once and in chunks; return whether the bytes are equal."""
    packed = queue.pack(samples)
    with watch.timed("put"):
        queue.put(partition, packed)
    rows = queue.claim(partition, "whole", len(samples), timeout=CALL_S)
    with watch.timed("get all"):
        fetched = queue.fetch(rows, COLUMNS)
    queue.acknowledge(rows)
    received = dict(zip(queue.names(rows), queue.unpack(fetched), strict=True))
    equal = all(same(sample, received[name]) for sample, name in zip(samples, sorted(received), strict=True))
    del fetched, received
    chunks = []
    with watch.timed(f"get in {chunk}s"):
        for _ in range(len(samples) // chunk):
            chunks.append(queue.claim(partition, "chunks", chunk, timeout=CALL_S))
            queue.fetch(chunks[-1], COLUMNS)
    for rows in chunks:
        queue.acknowledge(rows)
    queue.clear(partition)
    return equal


def run(kind: str, *, units: int, samples: Sequence[Sample], chunk: int, repeats: int) -> dict[str, object]:
    queue, watch, equal = implementation(kind), Watch(), True
    queue.start(units=units, tasks=TASKS)
    try:
        used = {name: cpu_s(pid) for name, pid in queue.pids.items()}
        for number in range(repeats):
            converted(queue, samples, f"converted{number}", watch)
            equal &= moved(queue, samples, f"moved{number}", watch, chunk=chunk)
        used = {name: round(cpu_s(pid) - used[name], 2) for name, pid in queue.pids.items()}
    finally:
        queue.close()
    gigabytes = sized(samples) / 1e9
    rates = {name: round(gigabytes / median(times), 3) for name, times in watch.times.items()}
    return {"bytes_equal": equal, "GBps": rates, "MB": round(1e3 * gigabytes, 1), "server_cpu_s": used}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("implementation")
    options.add_argument("--units", nargs="+", type=int, default=[1, 2])
    options.add_argument("--rows", type=int, default=256)
    options.add_argument("--chunk", type=int, default=16)
    options.add_argument("--repeats", type=int, default=9)
    options.add_argument("--length", type=int, help="tokens of every response; by default 512 to 4,096")
    chosen = options.parse_args()
    lengths = {"shortest": chosen.length, "longest": chosen.length} if chosen.length else {}
    samples = grpo_samples(chosen.rows, **lengths)
    for units in chosen.units:
        figures = run(chosen.implementation, units=units, samples=samples, chunk=chosen.chunk, repeats=chosen.repeats)
        case = {"case": "data", "rows": chosen.rows, "units": units, "length": chosen.length}
        emit({**case, "implementation": chosen.implementation, **figures})


if __name__ == "__main__":
    main()
