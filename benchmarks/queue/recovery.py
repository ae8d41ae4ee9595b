"""How long a controller needs to come back, and what its ledger costs while it serves.

Three histories of a million rows: all of them gone again (the whole log is read), all of them waiting (as they were
put), and all of them completed by one of two tasks; each as it was written, and compacted. And, for each durability
class, how many events a second can be confirmed, one after another and a hundred at once.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from lines import emit

from asyncflow.identity import RowPlace
from asyncflow.queue.controller.books import Books
from asyncflow.queue.controller.compaction import dump
from asyncflow.queue.controller.folding import empty_books
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.ledger.ledger import Ledger, Sync
from asyncflow.queue.ledger.records import read_ledger
from asyncflow.queue.protocol.messages import TaskSpec

P = "p"
PUT, CLAIM = 256, 16
NONCE = 7 << 32


def history(rows: int, *, until: str) -> Iterator[ev.Event]:
    """Give the events of ``rows`` rows: "put", "completed" by one of two tasks, or "cleared"."""
    yield ev.Started(1)
    for task in ("a", "b"):
        yield ev.Declared(TaskSpec(partition=P, name=task, needs=["x"], clears=until == "cleared"))
    yield ev.UnitJoined(2, 0, "unit")
    first = RowPlace(2, 0, 0).row
    lease = 1 << 40
    for start in range(0, rows, PUT):
        yield ev.Put(P, NONCE + start, PUT, 1, first + start)
        for at in range(start, start + PUT if until != "put" else start, CLAIM):
            numbers = list(range(first + at, first + at + CLAIM))
            lease += 1
            yield ev.Leased(lease, P, "a", "worker", f"t{lease}", numbers)
            yield ev.Completed(lease, numbers)


def recover(folder: Path) -> tuple[float, Books]:
    """Read a ledger as a controller does; give the seconds."""
    began = time.perf_counter()
    books = empty_books()
    books.replay(read_ledger(folder))
    return time.perf_counter() - began, books


def measure_recovery(rows: int) -> None:
    for until in ("cleared", "put", "completed"):
        folder = Path(tempfile.mkdtemp(prefix="ledger-"))
        try:
            Ledger(folder).begin(history(rows, until=until))
            raw = sum(file.stat().st_size for file in folder.glob("*.wal"))
            seconds, books = recover(folder)
            began = time.perf_counter()
            Ledger(folder).begin(dump(books))
            compaction = time.perf_counter() - began
            live, small = len(books.rows), sum(file.stat().st_size for file in folder.glob("*.wal"))
            del books
            again, _ = recover(folder)
            emit(
                {
                    "bench": "recovery",
                    "rows": rows,
                    "history": until,
                    "live": live,
                    "log_mb": round(raw / 1e6, 1),
                    "log_s": round(seconds, 2),
                    "compaction_s": round(compaction, 2),
                    "compacted_mb": round(small / 1e6, 1),
                    "compacted_s": round(again, 2),
                }
            )
        finally:
            shutil.rmtree(folder)


async def measure_sync(sync: Sync, *, seconds: float) -> None:
    rates = {}
    for at_once in (1, 100):
        folder = Path(tempfile.mkdtemp(prefix="ledger-", dir="."))
        ledger = Ledger(folder, sync=sync)
        list(ledger.recover())
        ledger.begin([])
        numbers = list(range(CLAIM))
        ends = time.perf_counter() + seconds

        async def confirm(ledger: Ledger, ends: float, numbers: list[int]) -> int:
            done = 0
            while time.perf_counter() < ends:
                ledger.append([ev.Leased(done, P, "a", "worker", "ticket", numbers)])
                await ledger.flushed()
                done += 1
                if sync != "always":
                    await asyncio.sleep(0)
            return done

        rates[at_once] = sum(await asyncio.gather(*(confirm(ledger, ends, numbers) for _ in range(at_once)))) / seconds
        await ledger.close()
        shutil.rmtree(folder)
    emit({"bench": "ledger", "sync": sync, "events_per_s": {str(n): round(rate) for n, rate in rates.items()}})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1 << 20)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    for sync in ("process", "interval", "always"):
        asyncio.run(measure_sync(sync, seconds=options.seconds))
    measure_recovery(options.rows)


if __name__ == "__main__":
    main()
