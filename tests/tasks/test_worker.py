"""One process of a task at a real queue: rows are done once, tried again within a bound, and handed back on leaving."""

import asyncio
import io
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncflow.api.load import load_job
from asyncflow.api.names import EVAL, TRAIN
from asyncflow.driver.tasks import tasks_of
from asyncflow.errors import PeerLost, StaleHandle
from asyncflow.queue.client import QueueClient
from asyncflow.queue.controller.controller import Controller
from asyncflow.queue.protocol.calls import Claimed
from asyncflow.queue.protocol.messages import LeasedRow, Samples
from asyncflow.queue.storage.unit import StorageUnit
from asyncflow.rpc.columns import Jagged
from asyncflow.tasks.judging import REWARD_COLUMNS
from asyncflow.tasks.rows import OutputColumn, Result, RowFailure, TaggedValues
from asyncflow.tasks.worker import TaskSettings, TaskWorker
from asyncflow.telemetry.metrics import TaskMetrics

MANIFEST = """
apiVersion: asyncflow.dev/v1alpha1
kind: RLJob
metadata: {name: worker}
spec:
  model: {source: "tiny://reverse-digits"}
  data: {train: {source: "tiny://reverse-digits"}}
  reward: {function: task}
  algorithm: {steps: 3, groupSize: 4}
  sampling: {maxTokens: 8}
  tasks: [{name: mark, function: "m:f", reads: [response_ids], writes: [{name: mark, dtype: int32, most: 1}],
           order: longest}]
"""
SETTINGS = TaskSettings(
    partitions=(TRAIN,),
    task="mark",
    reads=("response_ids",),
    writes=(OutputColumn(name="mark", dtype="int32", most=1),),
    batch=2,
    retries=1,
    lease_s=60.0,
    drain_s=10.0,
)
MADE = {"response_ids": np.int32, "logprobs": np.float32, "versions": np.int64}
LENGTHS = (3, 7, 1, 5)
Computing = Callable[[Sequence[LeasedRow], Mapping[str, Jagged]], Any]


@asynccontextmanager
async def queue_with_responses(folder: Path, *overrides: str) -> AsyncIterator[QueueClient]:
    """A queue in which one group was generated, whose responses have ``LENGTHS`` tokens; overrides: of the job."""
    spec = load_job(io.StringIO(MANIFEST), overrides).spec
    controller = Controller(ledger_dir=folder / "ledger")
    address = await controller.start()
    unit = StorageUnit(index=0, limit_bytes=1 << 20, controller=address)
    place = await unit.start()
    queue = QueueClient(find=lambda role, _: address if role == "controller" else place, units=lambda: [0], worker="w")
    await unit.joined(10)
    await queue.declare(tasks_of(spec), timeout=10)
    columns = {"prompt_ids": Jagged.from_rows([[1]] * 4, np.int32), "task": Jagged.from_rows([[1]] * 4, np.uint8)}
    for partition in (TRAIN, EVAL):
        samples = Samples(serials=[0], step=1, purpose=partition)
        await queue.put(partition, columns, group_size=4, samples=samples, timeout=10)
        rows = (await queue.claim(partition=partition, task="rollout", max_rows=4, timeout=10)).rows
        made = {name: Jagged.from_rows([[0] * n for n in LENGTHS], dtype) for name, dtype in MADE.items()}
        if spec.reward.role is None:
            made["reward"] = Jagged.from_rows([[0]] * 4, np.float32)
        tags = [{"tokens": length} for length in LENGTHS]
        assert await queue.complete(rows, made, tags=tags, timeout=10) == [True] * 4
    try:
        yield queue
    finally:
        await queue.close()
        await unit.close()
        await controller.close()


async def working(
    queue: QueueClient, compute: Computing, *, until: Callable[[], bool], settings: TaskSettings = SETTINGS
) -> TaskWorker:
    """Run a process of the task until a condition holds, then have it leave."""
    worker = TaskWorker(queue=queue, settings=settings, compute=compute, metrics=TaskMetrics())
    running = asyncio.create_task(worker.run())
    async with asyncio.timeout(60):
        while not until() and not running.done():
            await asyncio.sleep(0.01)
        worker.leave()
        await running
    return worker


def outcomes(worker: TaskWorker) -> dict[str, float]:
    """Return how many rows the metrics count, by what became of them."""
    (rows,) = worker._metrics.rows.collect()
    return {sample.labels["outcome"]: sample.value for sample in rows.samples if sample.name.endswith("_total")}


async def decided(queue: QueueClient) -> list[LeasedRow]:
    """Claim as the driver does: the group is ready once the task has done all of its rows."""
    claimed = await queue.claim(partition=TRAIN, task="advantage", max_rows=4, timeout=30)
    return sorted(claimed.rows, key=lambda row: row.meta.sample)


async def test_rows_are_computed_longest_first_and_written_once(tmp_path: Path) -> None:
    seen: list[int] = []

    async def compute(rows: Sequence[LeasedRow], columns: Mapping[str, Jagged]) -> list[Result]:
        seen.extend(columns["response_ids"].lengths.tolist())
        return [{"mark": np.array([10 + row.meta.sample], np.int32)} for row in rows]

    async with queue_with_responses(tmp_path) as queue:
        worker = await working(queue, compute, until=lambda: len(seen) == 4)
        rows = await decided(queue)
        marks = await queue.fetch(rows, ["mark"], timeout=10)
        assert marks["mark"].values.tolist() == [10, 11, 12, 13]
        assert "failure" not in rows[0].meta.tags
    assert sorted(seen[:2]) == [5, 7], "the first claim is of the longest"
    assert sorted(seen) == sorted(LENGTHS)
    assert worker.status()["done"] == 4


async def test_a_row_that_fails_is_tried_again_and_then_given_up_with_its_reason(tmp_path: Path) -> None:
    tries: list[int] = []

    async def compute(rows: Sequence[LeasedRow], columns: Mapping[str, Jagged]) -> list[Result]:
        tries.extend(row.meta.sample for row in rows)
        return [
            RowFailure("raised", "ValueError: odd") if row.meta.sample == 1 else {"mark": np.array([1], np.int32)}
            for row in rows
        ]

    async with queue_with_responses(tmp_path) as queue:
        worker = await working(queue, compute, until=lambda: tries.count(1) == 2 and len(tries) == 5)
        rows = await decided(queue)
        assert [row.meta.tags.get("failure") for row in rows] == [None, "mark: raised", None, None]
        assert rows[1].meta.tags["detail"] == "ValueError: odd"
        assert rows[1].bytes["mark"] == 0
    assert worker.status()["failed"] == {"raised": 1}
    assert worker.status()["first_failure"] == "raised: ValueError: odd"


async def test_a_row_may_be_tried_without_an_end_and_what_became_of_each_try_is_counted(tmp_path: Path) -> None:
    tries: list[int] = []

    async def compute(rows: Sequence[LeasedRow], columns: Mapping[str, Jagged]) -> list[Result]:
        tries.extend(row.meta.sample for row in rows)
        failed = RowFailure("timeout", "it took too long")
        return [failed if tries.count(row.meta.sample) < 4 else {"mark": np.array([1], np.int32)} for row in rows]

    async with queue_with_responses(tmp_path) as queue:
        settings = replace(SETTINGS, retries=None)
        worker = await working(queue, compute, until=lambda: len(tries) == 16, settings=settings)
        assert not any("failure" in row.meta.tags for row in await decided(queue))
    assert outcomes(worker) == {"retried": 12.0, "done": 4.0}
    assert (worker.status()["done"], worker.status()["failed"]) == (4, {})


async def test_rows_that_are_gone_are_passed_over_and_those_beside_them_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row of the first batch is gone, and the unit of the other is unreachable for a moment; both of the second."""
    gone, asked, seen, away = {0, 1, 2}, set[int](), list[int](), [{3}]

    async def compute(rows: Sequence[LeasedRow], columns: Mapping[str, Jagged]) -> list[Result]:
        assert len(columns["response_ids"]) == len(rows)
        seen.extend(row.meta.sample for row in rows)
        return [{"mark": np.array([1], np.int32)} for _ in rows]

    async with queue_with_responses(tmp_path) as queue:
        fetch = queue.fetch

        async def fetched(rows: Sequence[LeasedRow], names: Sequence[str], *, timeout: float) -> dict[str, Jagged]:
            asked.update(samples := {row.meta.sample for row in rows})
            if samples & gone:
                raise StaleHandle("the row was released")
            if samples in away:
                away.remove(samples)
                raise PeerLost("the unit is unreachable")
            return await fetch(rows, names, timeout=timeout)

        monkeypatch.setattr(queue, "fetch", fetched)
        worker = await working(queue, compute, until=lambda: len(seen) == 1 and len(asked) == 4)
    assert seen == [3]
    assert outcomes(worker) == {"done": 1.0}


async def test_what_is_written_after_its_lease_has_ended_is_lost_and_made_again(tmp_path: Path) -> None:
    computed: list[int] = []

    async with queue_with_responses(tmp_path) as queue:

        async def compute(rows: Sequence[LeasedRow], columns: Mapping[str, Jagged]) -> list[Result]:
            if not computed:
                await queue.expire(worker="w", timeout=10)
            computed.extend(row.meta.sample for row in rows)
            return [{"mark": np.array([1], np.int32)} for _ in rows]

        settings = replace(SETTINGS, batch=4)
        worker = await working(queue, compute, until=lambda: len(computed) == 8, settings=settings)
        assert len(await decided(queue)) == 4
    assert outcomes(worker) == {"lost": 4.0, "done": 4.0}
    assert worker.status()["done"] == 4


async def test_a_row_that_takes_its_replica_with_it_is_given_up(tmp_path: Path) -> None:
    """Replicas are lost again and again: their leases end, and nobody computes the rows more often than allowed."""
    calls: list[int] = []

    async def compute(rows: Sequence[LeasedRow], columns: Mapping[str, Jagged]) -> list[Result]:
        calls.append(len(rows))
        return [{"mark": np.array([1], np.int32)} for _ in rows]

    async with queue_with_responses(tmp_path) as queue:
        for _ in range(SETTINGS.retries + 1):
            lost = (await queue.claim(partition=TRAIN, task="mark", max_rows=4, timeout=10)).rows
            assert len(lost) == 4
            await queue.expire(worker="w", timeout=10)
        worker = TaskWorker(queue=queue, settings=SETTINGS, compute=compute, metrics=TaskMetrics())
        running = asyncio.create_task(worker.run())
        rows = await decided(queue)
        worker.leave()
        await running
        assert [row.meta.tags["failure"] for row in rows] == ["mark: died"] * 4
        assert rows[0].meta.tags["detail"].startswith("it was tried 2 times")
    assert calls == []


async def test_an_ended_partition_is_not_asked_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def compute(rows: Sequence[LeasedRow], columns: Mapping[str, Jagged]) -> list[Result]:
        return [{"mark": np.array([1], np.int32)} for _ in rows]

    async with queue_with_responses(tmp_path) as queue:
        claims, claim = Counter[bool](), queue.claim

        async def counted(**given: Any) -> Claimed:
            claimed = await claim(**given)
            claims[claimed.ended] += 1
            return claimed

        monkeypatch.setattr(queue, "claim", counted)
        worker = TaskWorker(queue=queue, settings=SETTINGS, compute=compute, metrics=TaskMetrics())
        running = asyncio.create_task(worker.run())
        while worker.status()["done"] < 4:
            await asyncio.sleep(0.01)
        await queue.close_partition(partition=TRAIN, step=1, timeout=10)
        while not claims[True]:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert claims[True] < 10, "two claim at a time, each once a second"
        worker.leave()
        await asyncio.wait_for(running, 10)


async def test_on_leaving_what_is_computed_ends_and_the_rest_is_handed_back(tmp_path: Path) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def compute(rows: Sequence[LeasedRow], columns: Mapping[str, Jagged]) -> list[Result]:
        begun.set()
        await go.wait()
        return [{"mark": np.array([1], np.int32)} for _ in rows]

    async with queue_with_responses(tmp_path) as queue:
        worker = TaskWorker(queue=queue, settings=SETTINGS, compute=compute, metrics=TaskMetrics())
        running = asyncio.create_task(worker.run())
        await begun.wait()
        while worker.status()["held"] < 4:
            await asyncio.sleep(0.01)
        worker.leave()
        rest = (await queue.claim(partition=TRAIN, task="mark", max_rows=4, timeout=10)).rows
        assert [row.attempt for row in rest] == [1, 1], "the batch that waited was handed back at once"
        go.set()
        await running
        assert worker.status()["done"] == 2
        assert worker.status()["held"] == 0


async def test_rows_whose_unit_is_away_are_handed_back_on_leaving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def compute(rows: Sequence[LeasedRow], columns: Mapping[str, Jagged]) -> list[Result]:
        raise AssertionError

    async def away(*_: Any, **__: Any) -> dict[str, Jagged]:
        raise PeerLost("the unit is unreachable")

    async with queue_with_responses(tmp_path) as queue:
        monkeypatch.setattr(queue, "fetch", away)
        worker = TaskWorker(queue=queue, settings=SETTINGS, compute=compute, metrics=TaskMetrics())
        running = asyncio.create_task(worker.run())
        while worker.status()["held"] < 4:
            await asyncio.sleep(0.01)
        worker.leave()
        await running
        rest = (await queue.claim(partition=TRAIN, task="mark", max_rows=4, timeout=10)).rows
        assert [row.attempt for row in rest] == [1] * 4


async def test_what_takes_longer_than_the_time_to_leave_is_handed_back(tmp_path: Path) -> None:
    begun, never = asyncio.Event(), asyncio.Event()

    async def compute(rows: Sequence[LeasedRow], columns: Mapping[str, Jagged]) -> list[Result]:
        begun.set()
        await never.wait()
        return []

    async with queue_with_responses(tmp_path) as queue:
        settings = replace(SETTINGS, drain_s=0.1, batch=4)
        worker = TaskWorker(queue=queue, settings=settings, compute=compute, metrics=TaskMetrics())
        running = asyncio.create_task(worker.run())
        await begun.wait()
        worker.leave()
        await running
        rest = (await queue.claim(partition=TRAIN, task="mark", max_rows=4, timeout=10)).rows
        assert len(rest) == 4


async def test_rewards_are_written_in_both_partitions_with_the_tags_that_decide(tmp_path: Path) -> None:
    judged: list[tuple[str, int]] = []

    async def compute(rows: Sequence[LeasedRow], columns: Mapping[str, Jagged]) -> list[TaggedValues]:
        judged.extend((row.meta.partition, row.meta.sample) for row in rows)
        details = np.frombuffer(b"{}", np.uint8)
        return [
            TaggedValues(
                {"reward": np.array([row.meta.sample], np.float32), "details": details},
                {"reward": 1.0 * row.meta.sample}
                | ({"failure": "raised", "detail": "KeyError"} if row.meta.sample == 3 else {}),
            )
            for row in rows
        ]

    settings = replace(SETTINGS, partitions=(TRAIN, EVAL), task="reward", writes=REWARD_COLUMNS, batch=4)
    async with queue_with_responses(tmp_path, "reward.role={}", "tasks=[]") as queue:
        worker = await working(queue, compute, until=lambda: len(judged) == 8, settings=settings)
        for task, partition in (("advantage", TRAIN), ("score", EVAL)):
            rows = (await queue.claim(partition=partition, task=task, max_rows=4, timeout=30)).rows
            assert sorted(row.meta.tags["reward"] for row in rows) == [0.0, 1.0, 2.0, 3.0]
            assert [row.meta.sample for row in rows if row.meta.tags.get("failure") == "raised"] == [3]
            assert {row.meta.tags["tokens"] for row in rows} == set(LENGTHS), "what the rollout said of it stays"
            found = await queue.fetch(rows, ["reward", "details"], timeout=10)
            assert found["reward"].values.tolist() == [row.meta.sample for row in rows]
    assert sorted(judged) == [(partition, sample) for partition in (EVAL, TRAIN) for sample in range(4)]
    assert (worker.status()["done"], worker.status()["failed"]) == (6, {"raised": 2})
    assert worker.status()["first_failure"] == "raised: KeyError"
