"""Latency of claims from 1,000, 10,000 and 100,000 ready rows: 16 rows, two whole groups, a token-balanced slot.

Only AsyncFlow has groups and slots; they are compared with the raw sockets' claim of 16 rows in the same run. Rows have
token counts from a lognormal distribution. A slot gives about 16 rows to each of two ranks, and both ranks request it.
The rows of a claim are acknowledged before the next claim, outside of the measured time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
from implementations import AsyncFlow, Implementation, implementation
from samples import emit, milliseconds

from asyncflow.queue.blocking import BlockingQueue
from asyncflow.queue.protocol.messages import TOKENS_TAG, LeasedRow, Samples, TaskSpec
from asyncflow.rpc.columns import Jagged

T = TypeVar("T")
ROWS, SIZE, RANKS = 16, 8, 2
BATCH = 4000
CALL_S = 60.0


def plain(queue: Implementation, rows: int, repeats: int) -> dict[str, object]:
    """Claim 16 rows at a time."""
    for start, stop in _batches(rows):
        queue.put("plain", queue.pack([{"x": np.array([row])} for row in range(start, stop)]))

    def claim() -> object:
        claimed = queue.claim("plain", "t", ROWS, timeout=0.0)
        assert claimed is not None
        return claimed

    figures = {"claim_ms": _times(claim, min(repeats, rows // ROWS - 1), after=queue.acknowledge)}
    queue.clear("plain")
    return figures


def groups(queue: BlockingQueue, rows: int, repeats: int) -> dict[str, object]:
    """Claim two whole groups of 8 at a time."""
    partition = "groups"
    queue.declare([TaskSpec(partition=partition, name="t", needs=["x"], groups=True, lease_s=30.0)], timeout=CALL_S)
    for start, stop in _batches(rows):
        tags = [{TOKENS_TAG: count} for count in _tokens(stop - start, start)]
        queue.put(partition, {"x": _numbers(start, stop)}, tags=tags, group_size=SIZE, timeout=CALL_S)
    seen: set[int] = set()

    def claim() -> list[LeasedRow]:
        claimed = queue.claim(partition=partition, task="t", max_rows=ROWS, min_rows=ROWS, timeout=CALL_S)
        leased: list[LeasedRow] = claimed.rows
        return leased

    def acknowledge(leased: list[LeasedRow]) -> None:
        numbers = {row.row for row in leased}
        assert len(numbers) == ROWS
        assert seen.isdisjoint(numbers)
        seen.update(numbers)
        assert all(queue.complete(leased, {}, timeout=CALL_S))

    figures = {"claim_ms": _times(claim, min(repeats, rows // ROWS - 1), after=acknowledge)}
    queue.clear_partition(partition=partition, timeout=CALL_S)
    return figures


def balanced(queue: BlockingQueue, rows: int, repeats: int) -> dict[str, object]:
    """Request the slots of a step of N rows one by one, as two ranks of a gang do."""
    partition = "balanced"
    queue.declare([TaskSpec(partition=partition, name="train", needs=["x"], kind="gang")], timeout=CALL_S)
    queue.open_step(partition=partition, step=1, groups=rows // SIZE, group_size=SIZE, timeout=CALL_S)
    queue.begin(partition=partition, attempt=0, step=0, world=RANKS, timeout=CALL_S)
    tokens = _tokens(rows, rows)
    for start, stop in _batches(rows):
        samples = Samples(serials=list(range(start // SIZE, stop // SIZE)), step=1)
        tags = [{TOKENS_TAG: count} for count in tokens[start:stop]]
        columns = {"x": _numbers(start, stop)}
        queue.put(partition, columns, tags=tags, group_size=SIZE, samples=samples, timeout=CALL_S)
    budget = int(np.mean(tokens) * ROWS * 1.1)
    counts: list[int] = []
    seen: set[int] = set()

    def slots() -> Iterator[tuple[int, int]]:
        for number in range(min(repeats, rows // (2 * RANKS * ROWS))):
            for rank in range(RANKS):
                yield number, rank

    order = slots()

    def claim() -> list[LeasedRow]:
        number, rank = next(order)
        slot = queue.slot(partition=partition, attempt=0, step=1, slot=number, rank=rank, tokens=budget, timeout=CALL_S)
        leased: list[LeasedRow] = slot.rows
        return leased

    def count(leased: list[LeasedRow]) -> None:
        numbers = {row.row for row in leased}
        assert seen.isdisjoint(numbers)
        seen.update(numbers)
        counts.append(len(numbers))

    times = _times(claim, RANKS * min(repeats, rows // (2 * RANKS * ROWS)), after=count)
    queue.clear_partition(partition=partition, timeout=CALL_S)
    return {"claim_ms": times, "rows_per_rank": round(float(np.mean(counts)), 1)}


def _batches(rows: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of each put; puts contain whole groups."""
    for start in range(0, rows // SIZE * SIZE, BATCH):
        yield start, min(start + BATCH, rows // SIZE * SIZE)


def _numbers(start: int, stop: int) -> Jagged:
    return Jagged.from_rows(np.arange(start, stop).reshape(-1, 1), "int64")


def _tokens(count: int, seed: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).lognormal(6.0, 0.6, count).astype(int).clip(1, 8192).tolist()
    return drawn


def _times(claim: Callable[[], T], count: int, *, after: Callable[[T], None]) -> dict[str, float]:
    times = []
    for _ in range(count):
        started = time.perf_counter()
        claimed = claim()
        times.append(time.perf_counter() - started)
        after(claimed)
    return milliseconds(times)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("implementation")
    options.add_argument("--sizes", nargs="+", type=int, default=[1000, 10_000, 100_000])
    options.add_argument("--repeats", type=int, default=200)
    chosen = options.parse_args()
    for rows in chosen.sizes:
        queue = implementation(chosen.implementation)
        queue.start(units=1, tasks={"t": ["x"]})
        try:
            results = {"plain": plain(queue, rows, chosen.repeats)}
            if isinstance(queue, AsyncFlow):
                results |= {case.__name__: case(queue.queue, rows, chosen.repeats) for case in (groups, balanced)}
        finally:
            queue.close()
        for kind, figures in results.items():
            case = {"case": "claim", "kind": kind, "implementation": chosen.implementation, "rows": rows}
            emit({**case, **figures})


if __name__ == "__main__":
    main()
