"""Latency of claims out of 1,000, 10,000 and 100,000 ready rows: 16 rows, two whole groups, a token-balanced slot.

Groups and slots are AsyncFlow's alone; what they are compared with is the raw sockets' claim of 16 rows of the same
run. Rows carry token counts, drawn lognormally; a slot deals about 16 rows to each of two ranks, and both ranks ask.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import numpy as np
from implementations import AsyncFlow, Implementation, implementation
from samples import emit, milliseconds

from asyncflow.queue.blocking import BlockingQueue
from asyncflow.queue.protocol.messages import TOKENS_TAG, Samples, TaskSpec
from asyncflow.rpc.columns import Jagged

ROWS, SIZE, RANKS = 16, 8, 2
BATCH = 4000
CALL_S = 60.0


def plain(queue: Implementation, rows: int, repeats: int) -> dict[str, object]:
    """Claim 16 rows after 16."""
    for start, stop in _batches(rows):
        queue.put("plain", queue.pack([{"x": np.array([row])} for row in range(start, stop)]))

    def claim() -> None:
        assert queue.claim("plain", "t", ROWS, timeout=0.0) is not None

    figures = {"claim_ms": _times(claim, min(repeats, rows // ROWS - 1))}
    queue.clear("plain")
    return figures


def groups(queue: BlockingQueue, rows: int, repeats: int) -> dict[str, object]:
    """Claim two whole groups of 8 at a time; each claim acknowledges the one before."""
    partition = "groups"
    queue.declare([TaskSpec(partition=partition, name="t", needs=["x"], groups=True, lease_s=30.0)], timeout=CALL_S)
    for start, stop in _batches(rows):
        tags = [{TOKENS_TAG: count} for count in _tokens(stop - start, start)]
        queue.put(partition, {"x": _numbers(start, stop)}, tags=tags, group_size=SIZE, timeout=CALL_S)
    done: list[str] = []
    seen: set[int] = set()

    def claim() -> None:
        nonlocal done
        claimed = queue.claim(partition=partition, task="t", max_rows=ROWS, min_rows=ROWS, done=done, timeout=CALL_S)
        assert claimed.batch is not None
        assert len(claimed.batch.rows) == ROWS
        assert seen.isdisjoint(claimed.batch.rows)
        seen.update(claimed.batch.rows)
        done = [claimed.batch.lease]

    figures = {"claim_ms": _times(claim, min(repeats, rows // ROWS - 1))}
    queue.acknowledge(done, timeout=CALL_S)
    queue.clear_partition(partition=partition, timeout=CALL_S)
    return figures


def balanced(queue: BlockingQueue, rows: int, repeats: int) -> dict[str, object]:
    """Ask slot after slot of a step of N rows, as two ranks of a gang do."""
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

    def claim() -> None:
        number, rank = next(order)
        slot = queue.slot(partition=partition, attempt=0, step=1, slot=number, rank=rank, tokens=budget, timeout=CALL_S)
        assert slot is not None
        assert seen.isdisjoint(slot.batch.rows)
        seen.update(slot.batch.rows)
        counts.append(len(slot.batch.rows))

    times = _times(claim, RANKS * min(repeats, rows // (2 * RANKS * ROWS)))
    queue.clear_partition(partition=partition, timeout=CALL_S)
    return {"claim_ms": times, "rows_per_rank": round(float(np.mean(counts)), 1)}


def _batches(rows: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of puts of whole groups."""
    for start in range(0, rows // SIZE * SIZE, BATCH):
        yield start, min(start + BATCH, rows // SIZE * SIZE)


def _numbers(start: int, stop: int) -> Jagged:
    return Jagged.from_rows(np.arange(start, stop).reshape(-1, 1), "int64")


def _tokens(count: int, seed: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).lognormal(6.0, 0.6, count).astype(int).clip(1, 8192).tolist()
    return drawn


def _times(claim: Callable[[], None], count: int) -> dict[str, float]:
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        claim()
        times.append(time.perf_counter() - begun)
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
