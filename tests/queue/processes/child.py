"""One process of a queue, for tests that kill processes: ``child.py ROLE FOLDER ...``. Addresses lie in files."""

import asyncio
import sys
import uuid
from pathlib import Path

import numpy as np

from asyncflow.queue.client import QueueClient
from asyncflow.queue.controller.controller import Controller
from asyncflow.queue.ledger.audit import replica_ledger
from asyncflow.queue.protocol.messages import Samples
from asyncflow.queue.storage.backend import Site
from asyncflow.queue.storage.unit import StorageUnit, open_backend
from asyncflow.rpc.columns import Jagged

P = "train"


def address_in(path: Path):
    """Return a resolver: what stands in ``path`` now."""
    return lambda: (path.read_text() or None) if path.exists() else None


def file_of(role: str, index: int) -> str:
    """Return the name of the file of a controller, that of the first without a number, or of a unit."""
    if role == "controller":
        return f"controller-{index}" if index else "controller"
    return f"unit-{index}"


def publish(path: Path, text: str) -> None:
    """Write ``path`` in one go."""
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.rename(path)


def connect(folder: Path, worker: str = "") -> QueueClient:
    """Make a client that finds everybody by the files in ``folder``."""
    return QueueClient(
        find=lambda role, index: address_in(folder / file_of(role, index))(),
        units=lambda: [int(path.name[5:]) for path in folder.glob("unit-?")],
        worker=worker or uuid.uuid4().hex,
    )


async def controller(folder: Path, index: str = "0", controllers: str = "1") -> None:
    """Serve as one of so many."""
    serving = Controller(
        ledger_dir=replica_ledger(folder / "ledger", int(index)),
        index=int(index),
        controllers=int(controllers),
        address=lambda other: address_in(folder / file_of("controller", other))(),
    )
    publish(folder / file_of("controller", int(index)), await serving.start())
    await asyncio.Event().wait()


async def unit(folder: Path, index: str, limit: str, backend: str = "memory", store: str = "") -> StorageUnit:
    """Serve. store: the address of the master or holder of the backend."""
    site = Site(unit=int(index), incarnation=uuid.uuid4().hex, host="127.0.0.1", find=lambda _role, _index: store)
    serving = StorageUnit(
        index=site.unit,
        limit_bytes=int(limit),
        controller=address_in(folder / "controller"),
        find=lambda role, other: address_in(folder / file_of(role, other))(),
        incarnation=site.incarnation,
        backend=(made := open_backend(backend, site)),
    )
    address = await serving.start()
    await made.open()
    await serving.joined(30)
    publish(folder / f"unit-{index}", address)
    return serving


async def serve_unit(folder: Path, index: str, *words: str) -> None:
    """Serve until told to leave."""
    serving = await unit(folder, index, *words)
    await serving.leaving.wait()
    await serving.leave()
    (folder / f"unit-{index}").unlink()
    await asyncio.sleep(0.3)
    await serving.close()


async def serve_unit_aloud(*words: str) -> None:
    """Serve, and say how many bytes are held whenever that changes."""
    serving, said = await unit(*words), -1
    while True:
        if serving.holdings.budget.used != said:
            said = serving.holdings.budget.used
            say("holds", said)
        await asyncio.sleep(0.01)


async def produce(folder: Path, serials: str, per_step: str) -> None:
    client = connect(folder)
    for serial in range(int(serials)):
        samples = Samples(serials=[serial], step=1 + serial // int(per_step))
        prompts = Jagged.from_rows([np.arange(serial + 1)] * 2, "int64")
        await client.put(P, {"prompt": prompts}, group_size=2, samples=samples, timeout=60)
        say(serial)
    await client.close()


async def work(folder: Path, task: str, column: str, worker: str, rows: str) -> None:
    client = connect(folder, worker)
    while True:
        leased = (await client.claim(partition=P, task=task, max_rows=int(rows), timeout=60)).rows
        if not leased:
            continue
        say("claimed", *(f"{row.meta.serial}.{row.meta.sample}" for row in leased))
        values = Jagged.from_rows([[row.meta.serial, row.meta.sample] for row in leased], "int32")
        ok = await client.complete(leased, {column: values}, tags=[{"tokens": 2}] * len(leased), timeout=60)
        say("completed", *(int(verdict) for verdict in ok))


async def hold(folder: Path, task: str, worker: str) -> None:
    """Claim, say so, and complete only when told to."""
    client = connect(folder, worker)
    leased = (await client.claim(partition=P, task=task, max_rows=100, timeout=60)).rows
    say("claimed", len(leased))
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    values = Jagged.from_rows([[1]] * len(leased), "int32")
    ok = await client.complete(leased, {"response": values}, timeout=60)
    say("completed", *(int(verdict) for verdict in ok))
    await client.close()


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    roles = {"controller": controller, "unit": serve_unit, "unit-aloud": serve_unit_aloud}
    roles |= {"produce": produce, "work": work, "hold": hold}
    asyncio.run(roles[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:]))
