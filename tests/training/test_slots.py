"""Slots of a step come in order, the next one fetched meanwhile, and the loops give each to the trainer once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing

import numpy as np
import pytest

from asyncflow.errors import PeerLost
from asyncflow.flow.schedule import Schedule
from asyncflow.queue.protocol.messages import LeasedRow, RowMeta, Slot, StepTotals
from asyncflow.rpc.columns import Jagged
from asyncflow.training import loops
from asyncflow.training.batch import COLUMNS, MicroBatch
from asyncflow.training.loops import FilledSlot, SlotPrefetcher, repeated, streaming, synchronous
from asyncflow.training.meter import RankMeter
from asyncflow.training.settings import TrainerSettings

SETTINGS = TrainerSettings(
    schedule=Schedule(steps=2, lag=1, exact=True), partition="train", attempt=3, extra_columns=("loss_mask",)
)
TOTALS = StepTotals(groups=2, samples=2, response_tokens=4)


class Queue:
    """A queue with steps of ``slots`` slots, the second of which has no rows for this rank.

    undecided: how often a slot is not decided in time; lost: how often an answer does not come.
    """

    def __init__(self, *, slots: int = 3) -> None:
        self.asked: list[tuple[int, int]] = []
        self.fetched: list[tuple[str, ...]] = []
        self.undecided = self.lost = 0
        self._slots = slots

    async def slot(
        self, *, partition: str, attempt: int, step: int, slot: int, rank: int, tokens: int, timeout: float
    ) -> Slot | None:
        assert (partition, attempt, rank, tokens) == ("train", 3, 1, 64)
        self.asked.append((step, slot))
        if self.lost:
            self.lost -= 1
            raise PeerLost("the controller is unreachable")
        if self.undecided:
            self.undecided -= 1
            return None
        meta = RowMeta(partition="train", serial=slot, sample=0, step=step)
        row = LeasedRow(row=slot, meta=meta, attempt=0, lease="", until=0.0, unit=0, bytes={})
        last = slot == self._slots - 1
        return Slot(step=step, slot=slot, rows=[] if slot == 1 else [row], last=last, totals=TOTALS if last else None)

    async def fetch(self, rows: Sequence[LeasedRow], columns: Sequence[str], *, timeout: float) -> dict[str, Jagged]:
        self.fetched.append(tuple(columns))
        floats = {name: Jagged.from_rows([[1.0] for _ in rows], np.float32) for name in ("reward", "advantage")}
        ids = Jagged.from_rows([[row.row, 7] for row in rows], np.int32)
        return floats | {
            "prompt_ids": ids,
            "response_ids": ids,
            "logprobs": Jagged.from_rows([[-1.0, -1.0] for _ in rows], np.float32),
            "versions": Jagged.from_rows([[0, 0] for _ in rows], np.int64),
            "loss_mask": Jagged.from_rows([[True, True] for _ in rows], np.bool_),
        }


async def nothing() -> None:
    pass


def prefetcher(queue: Queue, *, poll: Callable[[], Awaitable[None]] = nothing) -> SlotPrefetcher:
    return SlotPrefetcher(queue, rank=1, settings=SETTINGS, meter=RankMeter(), poll=poll)  # type: ignore[arg-type]


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_slots_come_in_order_and_one_is_prefetched_but_none_beyond_the_last() -> None:
    queue, serials, asked = Queue(), [], []
    async with aclosing(prefetcher(queue).slots(5, tokens=64)) as slots:
        async for filled in slots:
            await settled()
            asked.append(list(queue.asked))
            serials.append([key.serial for key in filled.batch.keys])
            assert (filled.last, filled.totals) == ((True, TOTALS) if len(serials) == 3 else (False, None))
    assert serials == [[0], [], [2]]
    every = [(5, 0), (5, 1), (5, 2)]
    assert asked == [every[:2], every, every]
    assert queue.asked == every
    assert queue.fetched == [(*COLUMNS, "advantage", "loss_mask")] * 2, "nothing is fetched for a slot without rows"


async def test_slots_are_asked_for_until_they_are_decided_also_by_a_queue_that_was_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = Queue(slots=1)
    queue.lost, queue.undecided = 1, 3
    sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda _: sleep(0))
    got = [filled.last async for filled in prefetcher(queue).slots(1, tokens=64)]
    assert (got, queue.asked) == ([True], [(1, 0)] * 5)


async def test_a_trainer_reacts_while_it_waits_and_what_it_raises_ends_the_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loops, "_POLL_S", 0.001)
    queue, waited = Queue(), []

    async def poll() -> None:
        waited.append(feed.waiting_for)
        if len(waited) == 3:
            raise PeerLost("it is told to leave")

    async def undecided(**_: object) -> None:
        await asyncio.Event().wait()

    queue.slot = undecided  # type: ignore[method-assign, assignment]
    feed = prefetcher(queue, poll=poll)
    with pytest.raises(PeerLost, match="told to leave"):
        async for _ in feed.slots(4, tokens=64):
            pass
    assert waited == ["slot 0 of step 4"] * 3
    assert feed.waiting_for == ""
    assert len(asyncio.all_tasks()) == 1, "nothing is asked for any more"


async def test_a_trainer_reacts_between_two_slots() -> None:
    polled = []

    async def poll() -> None:
        polled.append(len(taken))

    taken: list[FilledSlot] = []
    async for filled in prefetcher(Queue(), poll=poll).slots(1, tokens=64):
        taken.append(filled)
    assert polled == [1, 2]


class Recorder:
    """A trainer of two steps with two slots each that writes down what its loop does."""

    def __init__(self) -> None:
        self.done: list[str] = []

    async def steps(self) -> AsyncIterator[int]:
        for step in (1, 2):
            yield step

    async def slots(self, step: int) -> AsyncGenerator[FilledSlot, None]:
        for number in range(2):
            self.done.append(f"slot {number}")
            totals = StepTotals(groups=step) if number else None
            yield FilledSlot(batch=MicroBatch.empty(), last=bool(number), totals=totals)

    async def accumulate(self, step: int, slot: FilledSlot) -> None:
        self.done.append(f"compute {int(slot.last)}")

    async def revisit(self, step: int, slots: Sequence[FilledSlot]) -> None:
        self.done.append(f"update of {[int(slot.last) for slot in slots]}")

    async def finish(self, step: int, totals: StepTotals | None) -> None:
        assert totals == StepTotals(groups=step)
        self.done.append(f"finish {step}")


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        (synchronous, ["slot 0", "slot 1", "compute 0", "compute 1"]),
        (streaming, ["slot 0", "compute 0", "slot 1", "compute 1"]),
        (repeated, ["slot 0", "slot 1", "update of [0, 1]"]),
    ],
)
async def test_a_loop_gives_the_trainer_each_slot_once_and_then_the_totals(loop, expected) -> None:
    trainer = Recorder()
    await loop(trainer)
    assert trainer.done == [*expected, "finish 1", *expected, "finish 2"]
