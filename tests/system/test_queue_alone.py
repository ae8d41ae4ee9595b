"""A queue that stands alone: controller and units as in pods, whoever comes as a client, and the deaths of both."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pod_world import TOLD_TO_END, Pods, pods

from asyncflow.api.load import load
from asyncflow.api.names import LEAVE_ENV
from asyncflow.api.queue import QueueStatus, TransferQueue
from asyncflow.plan.queue import queue_roles
from asyncflow.queue.client import QueueClient, aconnect
from asyncflow.queue.ledger.audit import audit_ledger
from asyncflow.queue.protocol.messages import LeasedRow, Samples, TaskSpec
from asyncflow.rpc.columns import Jagged

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

MANIFEST = """
apiVersion: asyncflow.dev/v1alpha1
kind: TransferQueue
metadata: {name: scores}
spec: {storageUnits: 2, bytesPerUnit: 4Mi, ledger: {sync: always}}
"""
P = "corpus"
SIZE = 2
TASKS = [
    TaskSpec(partition=P, name="write", needs=["prompt"], writes=["answer"], groups=True, lease_s=3600.0),
    TaskSpec(partition=P, name="read", needs=["answer"], lease_s=3600.0),
]


def queue_of(file: Path) -> TransferQueue:
    queue = load(file)
    assert isinstance(queue, TransferQueue)
    return queue


async def create(client: QueueClient, *serials: int) -> None:
    prompts = Jagged.from_rows([np.full(3, serial) for serial in serials for _ in range(SIZE)], "int32")
    samples = Samples(serials=list(serials), step=1)
    await client.put(P, {"prompt": prompts}, group_size=SIZE, samples=samples, timeout=60)


async def claim(client: QueueClient, task: str, *, rows: int) -> list[LeasedRow]:
    got: list[LeasedRow] = []
    while len(got) < rows:
        claimed = (await client.claim(partition=P, task=task, max_rows=rows - len(got), timeout=60)).rows
        assert claimed, f"{len(got)} of {rows} rows came"
        got += claimed
    return got


async def answer(client: QueueClient, rows: list[LeasedRow]) -> list[bool]:
    prompts = (await client.fetch(rows, ["prompt"], timeout=60))["prompt"]
    answers = Jagged.from_rows([[int(prompts.row(i)[0]) + 1] for i in range(len(rows))], "int32")
    return await client.complete(rows, {"answer": answers}, timeout=60)


async def until(made: Pods, what: str, happened: Callable[[], bool]) -> None:
    await asyncio.to_thread(made.until, what, happened)


async def test_a_queue_serves_whoever_joins_and_survives_deaths(tmp_path: Path) -> None:
    file = tmp_path / "queue.yaml"
    file.write_text(MANIFEST)
    with pods(tmp_path, file, [], leader="controller") as made:
        made.place(*queue_roles(queue_of(file)))
        made.start()
        await until(made, "readiness", lambda: all(pod.ask("/readyz") for pod in made.pods.values()))

        def status() -> QueueStatus:
            return QueueStatus.model_validate(made.status())

        async with aconnect(made.address, credentials=made.issuer.credentials("client")) as client:
            await client.declare(TASKS, timeout=60)
            await create(client, *range(8))
            assert status().ready_units == 2
            assert (status().rows, status().partitions, status().limit) == (16, 1, 8 << 20)
            assert all(await answer(client, await claim(client, "write", rows=8)))

            async with aconnect(made.address, credentials=made.issuer.credentials("client")) as leaving:
                assert len(await claim(leaving, "write", rows=4)) == 4
            taken_over = await claim(client, "write", rows=8)
            assert {row.attempt for row in taken_over} == {0, 1}
            assert all(await answer(client, taken_over))

            made.kill("controller-0", keep="controller-0")
            read = await claim(client, "read", rows=8)
            assert (await client.complete(read, {}, timeout=60)) == [True] * 8
            await create(client, 8, 9)
            assert all(await answer(client, await claim(client, "write", rows=4)))
            await until(made, "the units of old", lambda: status().ready_units == 2)

            before = await client.wanted(partition=P, known=-1, timeout=60)
            assert not before.keys
            made.kill("storage-1")
            lost = (await client.wanted(partition=P, known=before.revision, timeout=60)).keys
            assert {meta.serial for meta in lost} in ({0, 2, 4, 6, 8}, {1, 3, 5, 7, 9}), "every second group"
            await until(made, "the new unit", lambda: status().ready_units == 2)
            await create(client, *{meta.serial for meta in lost})
            open_rows = await claim(client, "write", rows=len(lost))
            assert {row.meta.key for row in open_rows} == {meta.key for meta in lost}
            assert all(await answer(client, open_rows))
        assert b"asyncflow_controller_ledger_bytes" in made.pods["controller-0"].ask("/metrics").encode()
        for pod in made.pods.values():
            assert pod.end(signal.SIGTERM, within_s=20) == TOLD_TO_END
        report = audit_ledger(made.pods["controller-0"].folder / "ledger")
        assert (report.dispatched, report.duplicated) == (20, 0)


async def test_a_unit_that_is_given_time_to_end_takes_its_rows_to_the_others(tmp_path: Path) -> None:
    file = tmp_path / "queue.yaml"
    file.write_text(MANIFEST)
    with pods(tmp_path, file, [], leader="controller") as made:
        made.place(*(replace(role, env={**role.env, LEAVE_ENV: "60"}) for role in queue_roles(queue_of(file))))
        made.start()
        await until(made, "readiness", lambda: all(pod.ask("/readyz") for pod in made.pods.values()))
        async with aconnect(made.address, credentials=made.issuer.credentials("client")) as client:
            await client.declare(TASKS, timeout=60)
            await create(client, *range(8))
            leased = await claim(client, "write", rows=16)
            assert {row.unit for row in leased} == {0, 1}
            unit = made.pods["storage-1"]
            ended = asyncio.create_task(asyncio.to_thread(unit.end, signal.SIGTERM, within_s=30))
            assert all(await answer(client, leased[:8]))
            assert await ended == TOLD_TO_END
            assert [(each.unit, each.rows) for each in await client.list_units(timeout=60)] == [(0, 16)]
            assert not (await client.wanted(partition=P, known=-1, timeout=60)).keys
            assert all(await answer(client, leased[8:]))
            read = await claim(client, "read", rows=16)
            assert len((await client.fetch(read, ["answer"], timeout=60))["answer"]) == 16
            last = made.pods["storage-0"]
            assert await asyncio.to_thread(last.end, signal.SIGTERM, within_s=20) == TOLD_TO_END


def test_a_queue_has_no_trainer(tmp_path: Path) -> None:
    file = tmp_path / "queue.yaml"
    file.write_text(MANIFEST)
    with pods(tmp_path, file, [], leader="controller") as made:
        made.place(replace(queue_roles(queue_of(file))[0], name="trainer"))
        made.start()
        assert made.finish(within_s=60) == {"trainer-0": 2}
        assert "kind = 'TransferQueue': it has no trainer" in made.pods["trainer-0"].log.read_text()
