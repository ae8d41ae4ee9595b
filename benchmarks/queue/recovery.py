"""Time until the rows of a queue are available again after a kill of its controller, by the number of ready rows.

The controller is killed and restarted immediately; the time until a row can be claimed is measured. ``--sync`` is the
durability of its ledger, whose size is also printed.
"""

from __future__ import annotations

import argparse
import signal
import time

import numpy as np
from report import SECURED
from samples import emit
from servers import servers

from asyncflow.queue.protocol.messages import TaskSpec
from asyncflow.rpc.columns import Jagged

PARTITION, TASK = "recovery", "read"
BATCH = 4096
CALL_S = 300.0


def run(rows: int, *, secured: bool, sync: str) -> dict[str, float]:
    with servers(secured=secured, sync=sync) as made, made.handle.connect() as queue:
        queue.declare([TaskSpec(partition=PARTITION, name=TASK, needs=["x"], lease_s=30.0)], timeout=CALL_S)
        for start in range(0, rows, BATCH):
            numbers = np.arange(start, min(start + BATCH, rows))
            queue.put(PARTITION, {"x": Jagged(numbers, np.arange(len(numbers) + 1))}, timeout=CALL_S)
        queue.claim(partition=PARTITION, task=TASK, max_rows=1, timeout=CALL_S)
        ledger = sum(file.stat().st_size for file in (made.folder / "controller" / "ledger").glob("*.wal"))
        began = time.perf_counter()
        made.processes["controller"].send_signal(signal.SIGKILL)
        made.processes["controller"].wait()
        made.start("controller", attempt=1)
        claimed = queue.claim(partition=PARTITION, task=TASK, max_rows=1, timeout=CALL_S)
        assert claimed.rows
        seconds = time.perf_counter() - began
        return {"seconds": round(seconds, 2), "ledger_MB": round(ledger / 1e6, 2), **made.resident_mb()}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("implementation")
    options.add_argument("--rows", nargs="+", type=int, default=[1000, 100_000, 1_000_000])
    options.add_argument("--sync", default="interval", choices=("process", "interval", "always"))
    chosen = options.parse_args()
    for rows in chosen.rows:
        figures = run(rows, secured=chosen.implementation == SECURED, sync=chosen.sync)
        emit(
            {"case": "recovery", "implementation": chosen.implementation, "rows": rows, "sync": chosen.sync, **figures}
        )


if __name__ == "__main__":
    main()
