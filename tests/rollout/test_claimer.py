"""Rows of a claim are never forgotten, whenever the claimer is told to end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from asyncflow.errors import PeerLost
from asyncflow.flow.instance import Instance
from asyncflow.identity import Version
from asyncflow.rollout.leases import Claimer


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


def loaded() -> Instance:
    instance = Instance(swap_at="quota", slots=4)
    instance.loaded(Version(0, 0))
    return instance


def claimer_of(
    queue: object,
    *,
    purpose="train",
    instance=None,
    got=lambda rows: None,
    parked=lambda purpose: None,
    backlog=lambda: 0,
) -> Claimer:
    return Claimer(
        purpose,
        queue=queue,
        instance=instance or loaded(),
        slots=4,
        on_rows=got,
        parked=parked,
        backlog=backlog,
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


class Parked:
    """A queue at which claims find nothing until they are withdrawn, when a row comes all the same."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, int]] = []
        self.withdrawn: list[tuple[str, str]] = []
        self.answers: dict[str, asyncio.Future[list[str]]] = {}

    async def claim(self, *, ticket: str, partition: str, version: int, **_: object) -> SimpleNamespace:
        self.asked.append((ticket, partition, version))
        answer = self.answers[ticket] = asyncio.get_running_loop().create_future()
        return SimpleNamespace(rows=await answer, ended=False)

    async def withdraw(self, ticket: str, *, partition: str, **_: object) -> None:
        self.withdrawn.append((ticket, partition))
        self.answers[ticket].set_result([f"row of {ticket}"])


async def test_a_claim_for_what_is_no_longer_right_is_withdrawn_and_what_it_gives_is_taken():
    queue, instance, got = Parked(), loaded(), []
    claimer = claimer_of(queue, instance=instance, got=got.extend)
    running = asyncio.create_task(claimer.run())
    async with asyncio.timeout(20):
        while not queue.asked:
            await asyncio.sleep(0)
        claimer.changed.set()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not queue.withdrawn, "it would ask for the same again"
        instance.loaded(Version(0, 1))
        claimer.changed.set()
        while len(queue.asked) < 2:
            await asyncio.sleep(0)
    (ticket, partition, version), (other, _, newer) = queue.asked
    assert (partition, version, newer) == ("train", 0, 1)
    assert ticket != other
    assert queue.withdrawn == [(ticket, "train")]
    assert got == [f"row of {ticket}"]
    running.cancel()
    await asyncio.wait([running])


async def test_rows_that_come_after_a_while_are_taken_at_once_and_more_are_asked_for():
    queue, got, parked = Parked(), [], asyncio.Event()
    running = asyncio.create_task(claimer_of(queue, got=got.extend, parked=lambda _: parked.set()).run())
    async with asyncio.timeout(20):
        await parked.wait()
        queue.answers[queue.asked[0][0]].set_result(["a row"])
        while len(queue.asked) < 2:
            await asyncio.sleep(0)
    assert (got, queue.withdrawn) == (["a row"], [])
    running.cancel()
    await asyncio.wait([running])


async def test_rows_of_evaluations_are_claimed_from_their_own_partition():
    queue, parked = Parked(), []
    running = asyncio.create_task(claimer_of(queue, purpose="eval", parked=parked.append).run())
    async with asyncio.timeout(20):
        while not parked:
            await asyncio.sleep(0.005)
    assert [partition for _, partition, _ in queue.asked] == ["eval"]
    assert parked == ["eval"]
    running.cancel()
    await asyncio.wait([running])


async def test_nothing_is_claimed_while_much_is_not_delivered():
    queue, undelivered = Parked(), [17]
    claimer = claimer_of(queue, backlog=lambda: undelivered[0])
    running = asyncio.create_task(claimer.run())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not queue.asked
    undelivered[0] = 16
    claimer.changed.set()
    async with asyncio.timeout(20):
        while not queue.asked:
            await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])


async def test_a_claim_that_fails_is_made_again_after_a_while(monkeypatch: pytest.MonkeyPatch):
    failed, slept, again, sleep = [], [], asyncio.Event(), asyncio.sleep

    async def pass_by(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    class Away:
        async def claim(self, **given: object) -> SimpleNamespace:
            if len(failed) < 2:
                failed.append(given)
                raise PeerLost("the controller is unreachable")
            again.set()
            return await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "sleep", pass_by)
    running = asyncio.create_task(claimer_of(Away()).run())
    async with asyncio.timeout(20):
        await again.wait()
    assert len(slept) == 2, "after each failure it waits"
    running.cancel()
    await asyncio.wait([running])
