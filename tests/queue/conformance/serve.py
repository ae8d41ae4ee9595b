"""A controller and a unit in a process of their own, to be attacked.

``serve.py FOLDER LIMIT [TLS [BACKEND SERVER [MOST]]]``; SERVER: the address of the store; MOST: bytes of a message;
TLS: folder of the issuer of certificates.
"""

import asyncio
import sys
import uuid
from pathlib import Path

from asyncflow.local.issuer import Issuer
from asyncflow.queue.controller.controller import Controller
from asyncflow.queue.storage.backend import Site
from asyncflow.queue.storage.unit import StorageUnit, open_backend
from asyncflow.rpc.framing import MAX_MESSAGE


async def serve(
    folder: str, limit: str, tls: str = "", backend: str = "memory", server: str = "", most: str = str(MAX_MESSAGE)
) -> None:
    issuer = Issuer(Path(tls)) if tls else None
    credentials = issuer.credentials("controller") if issuer else None
    controller = Controller(ledger_dir=Path(folder) / "ledger", credentials=credentials)
    address = await controller.start()
    site = Site(unit=0, incarnation=uuid.uuid4().hex, host="127.0.0.1", find=lambda *_: server)
    store = open_backend(backend, site)
    await store.open()
    unit = StorageUnit(
        index=0,
        limit_bytes=int(limit),
        controller=address,
        incarnation=site.incarnation,
        credentials=issuer.credentials("storage") if issuer else None,
        backend=store,
        max_message=int(most),
    )
    sys.stdout.write(f"{address} {await unit.start()}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


asyncio.run(serve(*sys.argv[1:]))
