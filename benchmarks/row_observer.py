"""Read the ``versions`` column of every finished response during a run, and write the versions that generated it.

    python row_observer.py RUN_FOLDER DRIVER_ADDRESS OUTPUT

The observer finds finished rows in the ledger and reads their cells from the storage units, so its result depends
neither on reports of rollouts nor on counts of the trainer.

Invariant: the observer only reads. It holds no lease and does not influence the run.
"""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from pathlib import Path
from typing import TextIO

from asyncflow.api.names import VIEWER
from asyncflow.driver.tasks import TRAIN
from asyncflow.errors import StaleHandle
from asyncflow.identity import Version
from asyncflow.queue.client import QueueClient
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.ledger.log import read_ledger
from asyncflow.rpc.access import worker_name
from asyncflow.rpc.membership import Member, Membership

_POLL_S = 0.1
_CALL_S = 10.0
_JOIN_S = 60.0


def finished(ledger: Path) -> dict[int, tuple[int, int, int]]:
    """Return (serial, sample, step) of the training rows that rollouts have completed, by row id."""
    rows: dict[int, tuple[int, int, int]] = {}
    leases: set[int] = set()
    done: dict[int, tuple[int, int, int]] = {}
    for event in read_ledger(ledger):
        if isinstance(event, ev.RowsPut) and event.partition == TRAIN:
            places = ((serial, sample) for serial in event.serials for sample in range(event.size))
            rows |= {row: (*place, event.step) for row, place in zip(event.rows, places, strict=True)}
        elif isinstance(event, ev.Leased) and (event.partition, event.task) == (TRAIN, "rollout"):
            leases.add(event.lease)
        elif isinstance(event, ev.Completed) and event.lease in leases:
            done |= {row: rows[row] for row in event.rows}
    return done


async def observe(ledger: Path, driver: str, out: TextIO) -> None:
    """Write a line for each row until the driver's directive to stop."""
    member = Member(role=VIEWER, index=0, incarnation=worker_name(VIEWER, 0, uuid.uuid4().hex))
    membership = Membership(driver=driver, member=member)
    await membership.join(_JOIN_S)
    queue, seen = QueueClient.of(membership), set[int]()
    while not membership.directives.stop:
        new = {row: key for row, key in finished(ledger).items() if row not in seen}
        for row, key in new.items():
            await _read(queue, row, key, out)
        seen.update(new)
        out.flush()
        await asyncio.sleep(_POLL_S)
    await queue.close()
    await membership.close()


async def _read(queue: QueueClient, row: int, key: tuple[int, int, int], out: TextIO) -> None:
    serial, sample, step = key
    line: dict[str, object] = {"serial": serial, "sample": sample, "step": step}
    try:
        versions = (await queue.fetch([row], ["versions"], timeout=_CALL_S))["versions"].row(0)
        line["versions"] = sorted({Version.unpack(int(packed)).step for packed in versions})
    except StaleHandle as error:
        line["unread"] = str(error)
    out.write(json.dumps(line) + "\n")


def main() -> int:
    folder, driver, output = sys.argv[1:]
    with open(output, "w", encoding="utf-8") as out:
        asyncio.run(observe(Path(folder) / "ledger", driver, out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
