"""Stop one rollout in the middle of a transfer, and follow the rows that it holds in the ledger.

Invariant: the process is resumed in every case, before the run can end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swap_records import published, worker_of

from asyncflow.driver.tasks import TRAIN
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.ledger.log import read_ledger

_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One stop. victim: index of the rollout; during: the version that it was receiving.

    stopped, continued: unix seconds; held: the number of rows that it had on lease; again: for each row that it did not
    complete, the seconds from the stop until another rollout leased it (inf: never).
    """

    victim: int
    during: int
    stopped: float
    continued: float
    held: int
    again: tuple[float, ...]


class LeaseBook:
    """The current ``rollout`` lease holder of each training row, and the completed rows, from the ledger."""

    def __init__(self, ledger: Path) -> None:
        self.holder: dict[int, str] = {}
        self.completed: set[int] = set()
        leases: dict[int, str] = {}
        for event in read_ledger(ledger):
            if isinstance(event, ev.Leased) and (event.partition, event.task) == (TRAIN, "rollout"):
                leases[event.lease] = event.worker
                self.holder |= dict.fromkeys(event.rows, event.worker)
            elif isinstance(event, ev.Completed) and event.lease in leases:
                self.completed.update(event.rows)
            elif isinstance(event, ev.Returned) and event.lease in leases:
                for row in event.rows:
                    self.holder.pop(row, None)

    def held_by(self, worker: str) -> set[int]:
        """Return the rows that ``worker`` holds and has not completed."""
        return {row for row, holder in self.holder.items() if holder == worker} - self.completed


async def stop_one(
    *,
    folder: Path,
    pid: Callable[[], int],
    victim: int,
    version: int,
    delay_s: float,
    last: int,
    run: asyncio.Task[Any],
) -> Incident | None:
    """Stop rollout ``victim``, ``delay_s`` after ``version`` was published, until version ``last`` is published.

    pid: returns the pid of the rollout; run: the task of the run. Returns None if the run ended before the stop.
    """

    driver = folder / "logs" / "driver-0.log"

    def is_published(number: int) -> bool:
        return driver.exists() and number in published(driver.read_text())

    while not run.done() and not is_published(version):
        await asyncio.sleep(_POLL_S)
    await asyncio.sleep(delay_s)
    if run.done():
        return None
    worker = worker_of((folder / "logs" / f"rollout-{victim}.log").read_text())
    process = os.pidfd_open(pid())
    signal.pidfd_send_signal(process, signal.SIGSTOP)
    try:
        stopped = time.time()
        held = LeaseBook(folder / "ledger").held_by(worker)
        again: dict[int, float] = {}
        while not run.done() and not is_published(last):
            book = LeaseBook(folder / "ledger")
            for row in held - again.keys():
                if book.holder.get(row, worker) != worker:
                    again[row] = time.time() - stopped
            await asyncio.sleep(_POLL_S)
        lost = held - again.keys() - LeaseBook(folder / "ledger").completed
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGCONT)
        os.close(process)
    return Incident(
        victim=victim,
        during=version,
        stopped=stopped,
        continued=time.time(),
        held=len(held),
        again=(*sorted(again.values()), *[float("inf")] * len(lost)),
    )
