"""Move a million rows through the queue: put, claim, fetch, acknowledge and free them, with little storage.

There are two producers and two consumers, each a process. Every row contains its number, and must arrive exactly once.
The rate of each tenth, and the resident memory of controller and unit at its end, show whether anything grows. The unit
stores at most 16,384 rows at a time, so nothing may grow after half of the rows.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import time
from multiprocessing.queues import Queue
from typing import Any

import numpy as np
from report import SECURED
from samples import emit
from servers import Handle, servers

from asyncflow.queue.protocol.messages import TaskSpec
from asyncflow.rpc.columns import Jagged

PARTITION, TASK = "million", "read"
BATCH, CLAIM = 512, 512
CALL_S = 120.0
VALUES = 16
WINDOW = "2Mi"


def produce(handle: Handle, first: int, rows: int) -> None:
    with handle.connect() as queue:
        for start in range(first, first + rows, BATCH):
            count = min(BATCH, first + rows - start)
            numbers = np.repeat(np.arange(start, start + count), VALUES)
            column = Jagged(numbers, np.arange(count + 1) * VALUES)
            queue.put(PARTITION, {"x": column}, timeout=CALL_S)


def consume(handle: Handle, seen: Queue[Any]) -> None:
    """Claim rows until there are none for 10 s, and acknowledge them, which clears them."""
    with handle.connect() as queue:
        while True:
            claimed = queue.claim(partition=PARTITION, task=TASK, max_rows=CLAIM, timeout=10.0)
            if not (leased := claimed.rows):
                seen.put(None)
                return
            column = queue.fetch(leased, ["x"], timeout=CALL_S)["x"]
            seen.put(column.values[column.offsets[:-1]].tolist())
            assert all(queue.complete(leased, {}, timeout=CALL_S))


def run(rows: int, *, secured: bool) -> dict[str, Any]:
    context = mp.get_context("spawn")
    with servers(secured=secured, bytes_per_unit=WINDOW) as made, made.handle.connect() as queue:
        queue.declare(
            [TaskSpec(partition=PARTITION, name=TASK, needs=["x"], lease_s=30.0, clears=True)], timeout=CALL_S
        )
        seen: Queue[Any] = context.Queue()
        half = rows // 2
        workers = [
            context.Process(target=produce, args=(made.handle, 0, half)),
            context.Process(target=produce, args=(made.handle, half, rows - half)),
            *(context.Process(target=consume, args=(made.handle, seen)) for _ in range(2)),
        ]
        for worker in workers:
            worker.start()
        try:
            arrivals = np.zeros(rows, np.int64)
            total, marks, ends = 0, [], 0
            began = last = time.perf_counter()
            while ends < 2:
                batch = seen.get(timeout=CALL_S)
                if batch is None:
                    ends += 1
                    continue
                np.add.at(arrivals, batch, 1)
                total += len(batch)
                while 10 * total >= (len(marks) + 1) * rows:
                    now = time.perf_counter()
                    marks.append({"seconds": round(now - last, 2), **made.resident_mb()})
                    last = now
            wall = last - began
        finally:
            for worker in workers:
                worker.join(20)
                if worker.is_alive():
                    worker.terminate()
    rates = [rows / 10 / mark.pop("seconds") for mark in marks]
    return {
        "rows": rows,
        "rows_per_s": round(rows / wall),
        "rate_by_tenth": [round(rate) for rate in rates],
        "last_to_second": round(rates[-1] / rates[1], 3),
        "resident_MB": [{name: round(mb) for name, mb in mark.items()} for mark in marks],
        "lost": int((arrivals == 0).sum()),
        "doubled": int((arrivals > 1).sum()),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rows", type=int, default=1_000_000)
    options.add_argument("implementation")
    chosen = options.parse_args()
    figures = run(chosen.rows, secured=chosen.implementation == SECURED)
    emit({"case": "million", "implementation": chosen.implementation, **figures})


if __name__ == "__main__":
    main()
