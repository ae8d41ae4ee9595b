"""Samples of a group that are scored together: the function sees all of them, whoever leaves when."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from asyncflow.data.base import Message, Prompt
from asyncflow.queue.protocol.messages import LeasedRow, RowMeta
from asyncflow.rewards.wire import RewardResult
from asyncflow.rollout.engines.base import Completion
from asyncflow.rollout.job import ClaimedGroup, Job
from asyncflow.rollout.scoring import Scoring
from asyncflow.rollout.worker import RolloutWorker

sys.path.insert(0, str(Path(__file__).parent))
from rollout_world import ANY, running_world, until


@pytest.fixture
async def world(tmp_path):
    async with running_world(tmp_path) as world:
        yield world


async def test_a_group_is_scored_whole_and_its_details_are_delivered(world):
    await world.rollout("r0", reward="rollout_reward:of_group", tokens=6, sigma=0.5, slots=2)
    await world.put([0, 1, 2], step=1, oldest=0)
    await world.publish(0)
    rows, _ = await world.made(12)
    assert [row.meta.tags["reward"] for row in rows] == [4.0] * 12
    column = (await world.queue.fetch(rows, ["details"], timeout=10))["details"]
    details = [json.loads(column.row(index).tobytes()) for index in range(12)]
    assert all(each["of"] == 4 for each in details)
    assert all(any(each["longest"] for each in details[at : at + 4]) for at in (0, 4, 8))


async def test_a_group_that_comes_apart_is_scored_whole_by_the_next_holder(world):
    slow = await world.rollout("slow", reward="rollout_reward:of_group", tokens=6, sigma=0.9, token_s=0.05, slots=16)
    await world.publish(0)
    await world.put(range(4), step=1, oldest=0)
    await until(lambda: any(job.generated for job in slow.worker._in_flight), "a sample that waits for its group")
    waiting = {job.row.meta.key: job.response for job in slow.worker._in_flight if job.generated}
    await slow.leave()
    assert (await world.queue.stats(timeout=10)).leased.get("train/rollout", 0) == 0
    await world.rollout("fast", reward="rollout_reward:of_group")
    rows, columns = await world.made(16)
    assert [row.meta.key for row in rows] == [(serial, sample) for serial in range(4) for sample in range(4)]
    assert [row.meta.tags["reward"] for row in rows] == [4.0] * 16
    assert waiting
    for row, ids in zip(rows, columns["response_ids"], strict=True):
        if (made := waiting.get(row.meta.key)) is not None and row.attempt:
            assert ids.tolist() == made.ids.tolist(), "the next holder goes on behind what was made"


async def test_a_group_of_more_samples_than_may_be_undelivered_is_made_while_versions_change(world):
    settings = {"reward": "rollout_reward:of_group", "swap_at": "sequence", "slots": 1, "tokens": 6, "token_s": 0.005}
    worker = (await world.rollout("r0", **settings)).worker
    await world.publish(0)
    await world.put([0], step=1, oldest=0, newest=ANY, group=12)
    for step in range(1, 10):
        await until(lambda: worker.meter.delivered or made(worker) > step, "the next sample")  # noqa: B023
        await world.publish(step)
    rows, _ = await world.made(12)
    assert [row.meta.tags["reward"] for row in rows] == [12.0] * 12


def test_a_sample_that_awaits_its_group_is_no_backlog_until_the_group_is_scored() -> None:
    jobs = jobs_of(3)
    assert not any(job.awaits_group for job in jobs), "each is scored alone"
    example = jobs[0].example([Message("assistant", "0")])
    jobs[0].group.examples |= dict.fromkeys(jobs[:2], example)
    assert [job.awaits_group for job in jobs] == [True, True, False]
    jobs[0].group.examples[jobs[2]] = example
    assert not any(job.awaits_group for job in jobs)


def made(worker: RolloutWorker) -> int:
    return sum(job.generated for job in worker._in_flight)


class Together:
    """Rewards that are given when they are let."""

    by_group = True

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.let = asyncio.Event()

    async def score(self, examples):
        self.asked.append([example.response for example in examples])
        await self.let.wait()
        return [RewardResult(value=float(example.response)) for example in examples]


def jobs_of(count: int) -> list[Job]:
    group = ClaimedGroup()
    made = Completion(ids=np.zeros(3, np.int32), logprobs=np.zeros(3), versions=np.zeros(3, np.int64), finish="stop")
    metas = [RowMeta(partition="train", serial=1, sample=sample, step=1) for sample in range(count)]
    return [
        Job(
            row=LeasedRow(row=meta.sample, meta=meta, attempt=0, lease="a", until=1.0, unit=0, bytes={}),
            group=group,
            prompt=Prompt(question="q", answer="a"),
            response=made,
        )
        for meta in metas
    ]


def begin(scoring: Scoring, jobs: list[Job]) -> list[asyncio.Task[RewardResult | None]]:
    said = [[Message("assistant", str(job.row.meta.sample))] for job in jobs]
    return [asyncio.create_task(scoring.score(*each)) for each in zip(jobs, said, strict=True)]


async def test_samples_are_scored_in_their_order_whichever_is_made_first() -> None:
    rewards = Together()
    rewards.let.set()
    jobs = jobs_of(3)
    results = await asyncio.gather(*begin(Scoring(rewards, sizes={"train": 3}), jobs[::-1]))
    assert rewards.asked == [["0", "1", "2"]]
    assert [result.value for result in results if result is not None] == [2.0, 1.0, 0.0]


@pytest.mark.parametrize("waiting", [2, 3])
async def test_who_waits_or_is_being_scored_is_let_go_when_another_leaves(waiting: int) -> None:
    rewards = Together()
    jobs = jobs_of(3)
    tasks = begin(Scoring(rewards, sizes={"train": 3}), jobs[:waiting])
    while waiting == 3 and not rewards.asked:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    jobs[-1].gone = True
    jobs[-1].group.break_up()
    rewards.let.set()
    assert await asyncio.gather(*tasks) == [None] * waiting


async def test_a_part_of_a_group_whose_others_were_delivered_before_has_no_reward() -> None:
    rewards = Together()
    results = await asyncio.gather(*begin(Scoring(rewards, sizes={"train": 3}), jobs_of(2)))
    assert [(result.failure, result.detail) for result in results if result is not None] == [
        ("incomplete", "the function needs all samples of a prompt, but only 2 of 3 are available")
    ] * 2
    assert rewards.asked == []
