"""What a claim gives is never forgotten, whenever the claimer is told to end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from asyncflow.flow.instance import Instance
from asyncflow.identity import Version
from asyncflow.rollout.job import RolloutSettings
from asyncflow.rollout.leases import Claimer

SETTINGS = RolloutSettings(temperature=1.0, max_tokens=8, stop_ids=(1,), seed=7)


class Till:
    """A queue that answers one claim, when a test says so. withdrawn: whether that claim heard nothing of it."""

    def __init__(self) -> None:
        self.rows = [object()]
        self.answer: asyncio.Future[list[object]] = asyncio.get_running_loop().create_future()
        self.asked = asyncio.Event()
        self.withdrawn = False

    def ticket(self) -> str:
        return "t-1"

    async def claim(self, **_: object) -> SimpleNamespace:
        if self.asked.is_set():
            await asyncio.Event().wait()
        self.asked.set()
        try:
            return SimpleNamespace(rows=await self.answer)
        except asyncio.CancelledError:
            self.withdrawn = True
            raise


def claimer_of(queue: object, *, got=lambda rows: None, parked=lambda purpose: None) -> Claimer:
    instance = Instance(swap_at="quota", slots=4)
    instance.loaded(Version(0, 0))
    return Claimer(
        "train",
        queue=queue,
        instance=instance,
        settings=SETTINGS,
        slots=4,
        got=got,
        parked=parked,
        backlog=lambda: 0,
    )


@pytest.mark.parametrize("first", range(6))
@pytest.mark.parametrize("between", range(1, 4))
async def test_rows_are_taken_or_their_claim_is_withdrawn(first, between):
    till, got = Till(), []
    running = asyncio.create_task(claimer_of(till, got=got.extend).run())
    await till.asked.wait()
    till.answer.set_result(till.rows)
    for _ in range(first):
        await asyncio.sleep(0)
    while not running.done():
        running.cancel()
        for _ in range(between):
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert got == ([] if till.withdrawn else till.rows)


async def test_an_ended_partition_is_not_asked_again_and_again():
    asked, parked = [], asyncio.Event()

    class Ended:
        async def claim(self, **given: object) -> SimpleNamespace:
            asked.append(given)
            return SimpleNamespace(rows=[], ended=True)

    running = asyncio.create_task(claimer_of(Ended(), parked=lambda _: parked.set()).run())
    async with asyncio.timeout(20):
        await parked.wait()
    assert len(asked) < 4
    running.cancel()
    await asyncio.wait([running])
