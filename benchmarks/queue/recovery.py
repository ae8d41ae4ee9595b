"""How long a controller needs to come back, and what its ledger costs while it serves.

Three histories of a million rows: all of them gone again (the whole log is read), all of them waiting (as they were
put), and all of them completed by one of two tasks; each as it was written, and compacted. The snapshot by which a
further controller learns a million rows: how long the home and the shard work on it, how long each of them answers
nobody else, and its size. And, for each durability class, how many events a second can be confirmed, one after another
and a hundred at once.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from samples import emit

from asyncflow.identity import RowPlace
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.ledger.log import Ledger, Sync, read_ledger
from asyncflow.queue.protocol.calls import AskPart, Follow, Part
from asyncflow.queue.protocol.messages import TaskSpec
from asyncflow.queue.protocol.unit_calls import Held
from asyncflow.queue.table.apply import QueueState
from asyncflow.queue.table.replication import ChangeFeed, RowsHeld, decode, draft_of, install, take
from asyncflow.queue.table.snapshot import snapshot
from asyncflow.roles.context import paused_gc
from asyncflow.rpc.framing import decoder_of, encode

P = "p"
PUT, CLAIM = 256, 16
NONCE = 7 << 32


def history(rows: int, *, until: str) -> Iterator[ev.Event]:
    """Yield the events of ``rows`` rows: "put", "completed" by one of two tasks, or "cleared"."""
    yield ev.ControllerStarted(1)
    for task in ("a", "b"):
        yield ev.Declared(TaskSpec(partition=P, name=task, needs=["x"], clears=until == "cleared"))
    yield ev.UnitJoined(2, 0, "unit")
    first = RowPlace(2, 0, 0).row
    lease = 1 << 40
    for start in range(0, rows, PUT):
        serials, numbers = range(NONCE + start, NONCE + start + PUT), range(first + start, first + start + PUT)
        yield ev.RowsPut(P, "open", list(serials), 1, list(numbers))
        for at in range(start, start + PUT if until != "put" else start, CLAIM):
            numbers = list(range(first + at, first + at + CLAIM))
            lease += 1
            yield ev.Leased(lease, P, "a", "worker", f"t{lease}", numbers)
            yield ev.Completed(lease, numbers)


def recover(folder: Path) -> tuple[float, QueueState]:
    """Read a ledger as a controller does; give the seconds."""
    began = time.perf_counter()
    state = QueueState()
    with paused_gc():
        state.replay(read_ledger(folder))
    return time.perf_counter() - began, state


def measure_recovery(rows: int) -> None:
    for until in ("cleared", "put", "completed"):
        folder = Path(tempfile.mkdtemp(prefix="ledger-"))
        try:
            Ledger(folder).begin(history(rows, until=until))
            raw = sum(file.stat().st_size for file in folder.glob("*.wal"))
            seconds, state = recover(folder)
            began = time.perf_counter()
            Ledger(folder).begin(snapshot(state))
            compaction = time.perf_counter() - began
            live, small = len(state.rows), sum(file.stat().st_size for file in folder.glob("*.wal"))
            del state
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


def measure_snapshot(rows: int) -> None:
    """Take a snapshot of living rows of two columns, as a shard does that knows nothing yet, but for the socket."""
    home = QueueState()
    home.replay(history(rows, until="put"))
    held = [Held(row=number, columns={"x": 800, "y": 8}, partial={}, tokens=0, tags={}) for number in home.rows]
    take(home, RowsHeld(held))
    del held
    gc.freeze()  # as a controller that has read its ledger
    feed = ChangeFeed(home, replicas=[1])
    feed.start()
    shard = QueueState()
    shard.index = 1
    draft, sizes = draft_of(shard), []
    began = time.perf_counter()
    begun = feed.answer(Follow(1, 0, 0, 0.0))
    begin_s, parts_s, take_s, slowest_s, longest_s = time.perf_counter() - began, 0.0, 0.0, 0.0, 0.0
    assert begun is not None
    for number in range(begun.parts):
        began = time.perf_counter()
        said = encode(feed.part(AskPart(1, begun.position, number)))
        home_s = time.perf_counter() - began
        parts_s, slowest_s = parts_s + home_s, max(slowest_s, home_s)
        sizes.append(len(said))
        began = time.perf_counter()
        items = decoder_of(Part).decode(said).items
        for item in items:
            take(draft, decode(item))
            took, began = time.perf_counter() - began, time.perf_counter()
            take_s, longest_s = take_s + took, max(longest_s, took)
    began = time.perf_counter()
    install(shard, draft)
    install_s = time.perf_counter() - began
    assert len(shard.rows) == len(home.rows) == rows
    emit(
        {
            "bench": "snapshot",
            "rows": rows,
            "parts": begun.parts,
            "mb": round(sum(sizes) / 1e6, 1),
            "largest_part_mb": round(max(sizes) / 1e6, 2),
            "home_begin_s": round(begin_s, 2),
            "home_parts_s": round(parts_s, 2),
            "home_longest_part_s": round(slowest_s, 3),
            "shard_s": round(take_s, 2),
            "shard_longest_item_s": round(longest_s, 3),
            "shard_install_s": round(install_s, 2),
            "peak_mb_of_both": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        }
    )


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
    parser.add_argument("--only", choices=("recovery", "snapshot", "sync"))
    options = parser.parse_args()
    wanted = [options.only] if options.only else ["sync", "recovery", "snapshot"]
    if "sync" in wanted:
        for sync in ("process", "interval", "always"):
            asyncio.run(measure_sync(sync, seconds=options.seconds))
    if "recovery" in wanted:
        measure_recovery(options.rows)
    if "snapshot" in wanted:
        measure_snapshot(options.rows)


if __name__ == "__main__":
    main()
