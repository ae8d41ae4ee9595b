"""Rows that are sent to who waits for them, from units that are killed: what comes is always what was claimed."""

import asyncio
from contextlib import closing

import pytest

from asyncflow.errors import StaleHandle
from asyncflow.net.frames import Jagged
from asyncflow.net.rpc.blocking_link import BlockingLink
from asyncflow.queue.client.blocking import BlockingQueue

pytestmark = pytest.mark.process

P = "train"
SERIALS = 40


def address_in(path):
    return (path.read_text() or None) if path.exists() else None


def take(folder, done):
    """Claim, fetch and complete until all serials are done; give how many lots were fetched."""
    lots = 0
    made = BlockingQueue(
        controller=lambda: address_in(folder / "controller"),
        unit=lambda index: address_in(folder / f"unit-{index}"),
        units=lambda: [0, 1],
        worker="taker",
    )
    with closing(made) as queue:
        while len(done) < SERIALS:
            claim = queue.claim_lot(partition=P, task="rollout", max_rows=2, columns=["prompt"], timeout=60)
            lot = claim.lot
            if lot is None:
                continue
            try:
                prompts = queue.fetch(lot, ["prompt"], timeout=60)["prompt"]
            except StaleHandle:
                continue
            lots += 1
            assert [prompts.row(index).tolist() for index in range(len(lot.rows))] == [
                list(range(serial + 1)) for serial in lot.serials
            ]
            written = Jagged.from_rows([[serial] for serial in lot.serials], "int32")
            ok = queue.complete(lot, {"response": written}, timeout=60)
            done.update(serial for serial, mine in zip(lot.serials, ok, strict=True) if mine)
    return lots


async def restart(crew, name, *words):
    await crew.kill(name)
    (crew.folder / name).unlink(missing_ok=True)  # the one before may not have said yet where it is
    await crew.start(name, *words)


@pytest.mark.timeout(100)
async def test_rows_that_come_unasked_are_those_that_were_claimed(crew, monkeypatch):
    asked, send, done = [], BlockingLink.send, set()

    def listen(link, call, method, *words, **options):
        asked.append(method)
        send(link, call, method, *words, **options)

    monkeypatch.setattr(BlockingLink, "send", listen)
    await crew.start_queue(lease_s=2, units=2)
    taking = asyncio.create_task(asyncio.to_thread(take, crew.folder, done))
    for serial in range(SERIALS):
        if serial in (12, 24):
            await restart(crew, "unit-0", "unit", 0, 1 << 20)
        elif serial == 18:
            await restart(crew, "controller", "controller")
        await crew.create(serial)
        await asyncio.sleep(0.02)
    known = -1
    while not taking.done():
        wanted = await crew.client.wanted(partition=P, known=known, timeout=1)
        known = wanted.revision
        for serial in sorted({meta.serial for meta in wanted.keys}):
            await crew.create(serial)
    assert asked.count("unit.fetch") < await taking
    assert done == set(range(SERIALS))
