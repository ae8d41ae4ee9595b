"""A controller and a unit in a process of their own, to be attacked: ``serve.py FOLDER LIMIT [KEYFILE]``."""

import asyncio
import sys
from pathlib import Path

from asyncflow.net.keys import Keys
from asyncflow.queue.controller.controller import Controller
from asyncflow.queue.unit.unit import StorageUnit


async def serve(folder: str, limit: str, key: str = "") -> None:
    keys = Keys.load(Path(key)) if key else None
    controller = Controller(ledger_dir=Path(folder) / "ledger", keys=keys)
    address = await controller.start()
    unit = StorageUnit(index=0, limit_bytes=int(limit), controller=address, keys=keys)
    sys.stdout.write(f"{address} {await unit.start()}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


asyncio.run(serve(*sys.argv[1:]))
