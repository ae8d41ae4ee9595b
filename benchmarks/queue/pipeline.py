"""Move rows one at a time through rollout, reference and trainer, each its own process.

The rollout puts a row without its reference log-probs, the reference claims the row and writes them, and the trainer
claims complete rows. ``--rate`` limits the rows per second; without it, they are put as fast as possible. Every row
contains its number, which serves to count lost and doubled rows and to measure the time from its put to each claim.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections import Counter
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from typing import Any

import numpy as np
import numpy.typing as npt
from implementations import Implementation, implementation
from samples import cpu_s, emit, grpo_samples, milliseconds

PARTITION = "pipeline"
NEEDED = ("response_ids", "number")
TRAINED = ("prompt_ids", "response_ids", "old_logp", "ref_logp", "advantage", "number")
UNITS, DIFFERENT = 2, 256
ATTACH_S, LAST_S = 120.0, 600.0
CLAIM_S = 1.0

Times = dict[int, float]
"""Times of the machine's monotonic clock, which all processes share, by the number of a row."""


def rollout(queue: Implementation, rows: int, rate: float) -> Times:
    """Put all rows; return the start time of each put."""
    samples = grpo_samples(DIFFERENT, seed=1)
    for sample in samples:
        del sample["ref_logp"]
    packed = [queue.pack([{**samples[row % DIFFERENT], "number": np.array([row])}]) for row in range(rows)]
    started: Times = {}
    began = time.monotonic()
    for row in range(rows):
        if rate:
            time.sleep(max(0.0, began + row / rate - time.monotonic()))
        started[row] = time.monotonic()
        queue.put(PARTITION, packed[row])
    return started


def reference(queue: Implementation, rows: int, _rate: float) -> Times:
    """Write the missing column of each row; return the time of each claim."""
    logprobs = np.random.default_rng(3).standard_normal(4096, dtype=np.float32)
    claimed: Times = {}
    for _ in range(rows):
        taken = _claim(queue, "reference")
        now = time.monotonic()
        (sample,) = queue.unpack(queue.fetch(taken, NEEDED))
        claimed[int(sample["number"][0])] = now
        queue.write(taken, queue.pack([{"ref_logp": logprobs[: len(sample["response_ids"])]}]))
    return claimed


def trainer(queue: Implementation, rows: int, _rate: float) -> Times:
    """Read complete rows; return the time at which each arrived. Raises AssertionError if a row arrives twice."""
    arrived: Times = {}
    seen: Counter[int] = Counter()
    for _ in range(rows):
        taken = _claim(queue, "train")
        (sample,) = queue.unpack(queue.fetch(taken, TRAINED))
        number = int(sample["number"][0])
        arrived[number] = time.monotonic()
        seen[number] += 1
        queue.acknowledge(taken)
    assert max(seen.values()) == 1, seen.most_common(3)
    return arrived


STAGES = {"rollout": rollout, "reference": reference, "trainer": trainer}


def _claim(queue: Implementation, task: str) -> Any:
    last = time.monotonic() + LAST_S
    while (taken := queue.claim(PARTITION, task, 1, timeout=CLAIM_S)) is None:
        assert time.monotonic() < last, f"no row came for {task} in {LAST_S:g} s"
    return taken


def _stage(
    name: str, kind: str, handle: Any, rows: int, rate: float, begin: Barrier, results: Queue[tuple[str, Times, float]]
) -> None:
    queue = implementation(kind)
    queue.attach(handle)
    begin.wait(ATTACH_S)
    used = cpu_s()
    times = STAGES[name](queue, rows, rate)
    results.put((name, times, cpu_s() - used))
    queue.close()


def run(kind: str, *, rows: int, rate: float) -> dict[str, object]:
    spawn = multiprocessing.get_context("spawn")
    queue = implementation(kind)
    handle = queue.start(units=UNITS, tasks={"reference": NEEDED, "train": TRAINED})
    begin, results = spawn.Barrier(1 + len(STAGES)), spawn.Queue()
    stages = [spawn.Process(target=_stage, args=(name, kind, handle, rows, rate, begin, results)) for name in STAGES]
    try:
        for stage in stages:
            stage.start()
        begin.wait(ATTACH_S)
        served = {name: cpu_s(pid) for name, pid in queue.pids.items()}
        done = {name: (times, used) for name, times, used in (results.get(timeout=LAST_S) for _ in STAGES)}
        served = {name: cpu_s(pid) - served[name] for name, pid in queue.pids.items()}
        for stage in stages:
            stage.join(20)
    finally:
        for stage in stages:
            if stage.is_alive():
                stage.terminate()
        queue.close()
    times = {name: of_rows for name, (of_rows, _) in done.items()}
    began, arrived = times["rollout"], times["trainer"]
    used_s = sum(served.values()) + sum(used for _, used in done.values())
    return {
        "rows_per_s": round(rows / (max(arrived.values()) - min(began.values())), 1),
        "put_to_claim_ms": milliseconds(_since(began, times["reference"])),
        "end_to_end_ms": milliseconds(_since(began, arrived)),
        "cpu_s_per_million_rows": round(1e6 * used_s / rows),
        "server_cpu_s_per_million_rows": round(1e6 * sum(served.values()) / rows),
        "lost": rows - len(arrived),
    }


def _since(began: Times, ended: Times) -> npt.NDArray[np.float64]:
    return np.array([ended[row] - began[row] for row in ended])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("implementation")
    options.add_argument("--rows", type=int, default=6000)
    options.add_argument("--rate", type=float, default=0.0, help="rows per second; 0 for no limit")
    chosen = options.parse_args()
    figures = run(chosen.implementation, rows=chosen.rows, rate=chosen.rate)
    case = {"case": "pipeline", "implementation": chosen.implementation, "rows": chosen.rows, "rate": chosen.rate}
    emit({**case, **figures})


if __name__ == "__main__":
    main()
