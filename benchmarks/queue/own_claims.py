"""Claims that the shared benchmark lacks: whole groups, and token-balanced slots of a gang, out of N ready rows.

The bar is the peers' plain claim of 16 rows (``bench_control.py``) of the same run. Rows carry token counts, drawn
lognormally; a slot deals about 16 rows to each of two ranks, and both ranks ask.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from lines import emit, milliseconds
from servers import servers

from asyncflow.net.frames import Jagged
from asyncflow.queue.client.blocking import BlockingQueue
from asyncflow.queue.protocol.messages import TOKENS_TAG, RowMeta, TaskSpec

ROWS, SIZE, RANKS = 16, 8, 2
BATCH = 4000
CALL_S = 60.0


def tokens_of(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).lognormal(6.0, 0.6, count).astype(int).clip(1, 8192).tolist()


def groups(queue: BlockingQueue, rows: int, repeats: int) -> dict[str, object]:
    """Claim two whole groups of 8 at a time; each claim acknowledges the one before."""
    partition = f"groups{rows}"
    queue.declare([TaskSpec(partition=partition, name="t", needs=["x"], groups=True, lease_s=30.0)], timeout=CALL_S)
    for start in range(0, rows, BATCH):
        count = min(BATCH, rows - start) // SIZE * SIZE
        values = Jagged.from_rows(np.arange(start, start + count).reshape(-1, 1), "int64")
        tags = [{TOKENS_TAG: n} for n in tokens_of(count, start)]
        queue.put(partition, {"x": values}, tags=tags, group_size=SIZE, timeout=CALL_S)
    times, done, seen = [], [], set()
    for _ in range(min(repeats, rows // ROWS - 1)):
        begun = time.perf_counter()
        claimed = queue.claim_lot(
            partition=partition, task="t", max_rows=ROWS, min_rows=ROWS, done=done, timeout=CALL_S
        )
        times.append(time.perf_counter() - begun)
        assert claimed.lot is not None
        assert not claimed.late
        assert len(claimed.lot.rows) == ROWS
        assert seen.isdisjoint(claimed.lot.rows)
        assert len(set(claimed.lot.serials)) == ROWS // SIZE
        seen.update(claimed.lot.rows)
        done = [claimed.lot.lease]
    queue.acknowledge(done, timeout=CALL_S)
    queue.clear_partition(partition=partition, timeout=CALL_S)
    return {"claim_ms": milliseconds(times)}


def balanced(queue: BlockingQueue, rows: int, repeats: int) -> dict[str, object]:
    """Ask slot after slot of a step of N rows, as two ranks of a gang do."""
    partition = f"balanced{rows}"
    queue.declare([TaskSpec(partition=partition, name="train", needs=["x"], kind="gang")], timeout=CALL_S)
    count = rows // SIZE
    queue.open_step(partition=partition, step=1, groups=count, group_size=SIZE, timeout=CALL_S)
    queue.begin(partition=partition, attempt=0, step=0, world=RANKS, timeout=CALL_S)
    tokens = tokens_of(rows, rows)
    for start in range(0, rows, BATCH):
        mine = range(start, min(start + BATCH, rows // SIZE * SIZE))
        metas = [
            RowMeta(partition=partition, serial=i // SIZE, sample=i % SIZE, step=1, tags={TOKENS_TAG: tokens[i]})
            for i in mine
        ]
        values = Jagged.from_rows(np.array(mine).reshape(-1, 1), "int64")
        queue.create(metas, {"x": values}, group_size=SIZE, timeout=CALL_S)
    budget = int(np.mean(tokens) * ROWS * 1.1)
    times, counts, seen = [], [], set()
    for number in range(min(repeats, rows // (2 * RANKS * ROWS))):
        for rank in range(RANKS):
            begun = time.perf_counter()
            slot = queue.slot(
                partition=partition, attempt=0, step=1, slot=number, rank=rank, tokens=budget, timeout=CALL_S
            )
            times.append(time.perf_counter() - begun)
            assert slot is not None
            numbers = {row.row for row in slot.rows}
            assert seen.isdisjoint(numbers)
            seen |= numbers
            counts.append(len(numbers))
    queue.clear_partition(partition=partition, timeout=CALL_S)
    return {"claim_ms": milliseconds(times), "rows_per_rank": round(float(np.mean(counts)), 1)}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--sizes", nargs="+", type=int, default=[1000, 10_000, 100_000])
    options.add_argument("--repeats", type=int, default=200)
    options.add_argument("--keys", action="store_true")
    chosen = options.parse_args()
    for rows in chosen.sizes:
        with servers(keys=chosen.keys) as made, made.handle.visit() as queue:
            for case in (groups, balanced):
                result = case(queue, rows, chosen.repeats)
                emit({"bench": case.__name__, "peer": "asyncflow", "keys": chosen.keys, "rows": rows, **result})


if __name__ == "__main__":
    main()
