"""Measure whether the data set hides fetching behind computation, with a sleep in place of an accelerator.

    python benchmarks/queue/torch_loader.py [--rounds 5] [--batches 20]

The computation is a sleep of twice the time of fetching a batch, as measured in the same round. A loop that fetches and
computes in turn takes 1.5 times the computation, and a loop that hides fetching entirely takes 1.0. Each round has its
own queue and runs all cases; the table shows medians. The exit status is 1 if prefetching one batch misses the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time

import numpy as np
from servers import servers
from torch.utils.data import DataLoader

from asyncflow.queue.client import aconnect
from asyncflow.queue.protocol.messages import Samples, TaskSpec
from asyncflow.queue.torch import StreamingDataset
from asyncflow.rpc.columns import Jagged

ROWS, VALUES = 32, 131_072
BAR = 1.15
CASES = {"one after the other": (0, 0), "one batch ahead": (1, 0), "two loader workers": (1, 2)}


async def fill(address: str, partition: str, batches: int) -> None:
    """Put ``batches`` batches of rows, which every case reads, and close the partition."""
    async with aconnect(address) as queue:
        tasks = [TaskSpec(partition=partition, name=name, needs=["values"]) for name in ("alone", *CASES)]
        await queue.declare(tasks, timeout=30)
        for batch in range(batches):
            samples = Samples(serials=list(range(batch * ROWS, (batch + 1) * ROWS)), step=1)
            values = Jagged.from_rows([np.zeros(VALUES, np.float32)] * ROWS, "float32")
            await queue.put(partition, {"values": values}, samples=samples, timeout=30)
        await queue.close_partition(partition=partition, step=1, timeout=30)


def seconds_a_batch(
    address: str, partition: str, task: str, *, prefetch: int, workers: int, compute_s: float, batches: int
) -> float:
    """Read all batches; return the median time per batch."""
    data = StreamingDataset(
        queue=address, partition=partition, task=task, columns=["values"], rows=ROWS, prefetch=prefetch
    )
    with data:
        times, count, started = [], 0, time.perf_counter()
        for batch in DataLoader(data, batch_size=None, num_workers=workers, in_order=not workers):
            count += len(batch)
            assert len(batch.columns["values"].values) == len(batch) * VALUES
            time.sleep(compute_s)
            times.append(time.perf_counter() - started)
            started += times[-1]
        assert count == batches * ROWS
        return statistics.median(times)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--batches", type=int, default=20)
    chosen = options.parse_args()
    ratios: dict[str, list[float]] = {name: [] for name in CASES}
    for number in range(chosen.rounds):
        with servers() as queue:
            address, partition = queue.handle.address, f"round{number}"
            asyncio.run(fill(address, partition, chosen.batches))
            alone = seconds_a_batch(
                address, partition, "alone", prefetch=0, workers=0, compute_s=0.0, batches=chosen.batches
            )
            for name, (prefetch, workers) in CASES.items():
                taken = seconds_a_batch(
                    address,
                    partition,
                    name,
                    prefetch=prefetch,
                    workers=workers,
                    compute_s=2 * alone,
                    batches=chosen.batches,
                )
                ratios[name].append(taken / (2 * alone))
    megabytes = ROWS * VALUES * 4 / 1e6
    print(f"{chosen.rounds} rounds of {chosen.batches} batches of {megabytes:.1f} MB; computing lasts twice as long")
    for name, found in ratios.items():
        print(f"{name:22} {statistics.median(found):5.2f} times computing alone")
    return int(statistics.median(ratios["one batch ahead"]) > BAR)


if __name__ == "__main__":
    sys.exit(main())
