"""A controller and a unit in a process of their own, to be attacked.

``serve.py FOLDER LIMIT [KEYFILE [BACKEND SERVER [MOST]]]``; SERVER: the address of the store; MOST: bytes of a message.
"""

import asyncio
import sys
import uuid
from pathlib import Path

from asyncflow.net.keys import Keys
from asyncflow.net.rpc.wire import MAX_MESSAGE
from asyncflow.queue.backends.base import Site
from asyncflow.queue.controller.controller import Controller
from asyncflow.queue.unit.unit import StorageUnit, open_backend


async def serve(
    folder: str, limit: str, key: str = "", backend: str = "memory", server: str = "", most: str = str(MAX_MESSAGE)
) -> None:
    keys = Keys.load(Path(key)) if key else None
    controller = Controller(ledger_dir=Path(folder) / "ledger", keys=keys)
    address = await controller.start()
    site = Site(unit=0, incarnation=uuid.uuid4().hex, host="127.0.0.1", find=lambda *_: server)
    store = open_backend(backend, site)
    await store.open()
    unit = StorageUnit(
        index=0,
        limit_bytes=int(limit),
        controller=address,
        incarnation=site.incarnation,
        keys=keys,
        backend=store,
        max_message=int(most),
    )
    sys.stdout.write(f"{address} {await unit.start()}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


asyncio.run(serve(*sys.argv[1:]))
