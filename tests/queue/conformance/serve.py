"""A controller and a unit in a process of their own, to be attacked: ``serve.py FOLDER LIMIT [KEYFILE]``.

The controller has a fixed port, so that it listens by zmq; the unit listens to streams.
"""

import asyncio
import socket
import sys
from pathlib import Path

from asyncflow.net.keys import Keys
from asyncflow.queue.controller.controller import Controller
from asyncflow.queue.unit.unit import StorageUnit


async def serve(folder: str, limit: str, key: str = "") -> None:
    keys = Keys.load(Path(key)) if key else None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    controller = Controller(ledger_dir=Path(folder) / "ledger", port=port, keys=keys)
    address = await controller.start()
    unit = StorageUnit(index=0, limit_bytes=int(limit), controller=address, keys=keys)
    sys.stdout.write(f"{address} {await unit.start()}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


asyncio.run(serve(*sys.argv[1:]))
