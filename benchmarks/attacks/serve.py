"""Run a controller or a storage unit as a process: ``serve.py controller|unit FOLDER``. It writes its address there.

The controller compacts its ledger every 3 kB, so that most faults happen during a compaction.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from asyncflow.durable import write_whole
from asyncflow.queue.controller.controller import Controller
from asyncflow.queue.storage.unit import StorageUnit

LIMIT = 64 << 20


def address_in(file: Path) -> Callable[[], str | None]:
    """Return a function that returns the text of ``file``, None while it does not exist."""
    return lambda: file.read_text() if file.exists() else None


async def controller(folder: Path) -> None:
    serving = Controller(ledger_dir=folder / "ledger", compact_bytes=3000)
    write_whole(folder / "controller", (await serving.start()).encode())
    await asyncio.wait([serving.failed])
    await serving.close()
    raise SystemExit(1)


async def unit(folder: Path) -> None:
    serving = StorageUnit(index=0, limit_bytes=LIMIT, controller=address_in(folder / "controller"))
    write_whole(folder / "unit", (await serving.start()).encode())
    await serving.failed


if __name__ == "__main__":
    asyncio.run({"controller": controller, "unit": unit}[sys.argv[1]](Path(sys.argv[2])))
