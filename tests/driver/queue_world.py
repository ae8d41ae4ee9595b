"""A real queue with one storage unit and the tasks of a job, for tests that play the job's roles themselves."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from asyncflow.api.job import RLJobSpec
from asyncflow.driver.tasks import tasks_of
from asyncflow.queue.client import QueueClient
from asyncflow.queue.controller.controller import Controller
from asyncflow.queue.protocol.messages import LeasedRow, Tag
from asyncflow.queue.storage.unit import StorageUnit
from asyncflow.rpc.columns import Jagged


@asynccontextmanager
async def queue_of(spec: RLJobSpec, folder: Path) -> AsyncIterator[tuple[QueueClient, Controller]]:
    controller = Controller(ledger_dir=folder / "ledger")
    address = await controller.start()
    unit = StorageUnit(index=0, limit_bytes=1 << 20, controller=address)
    place = await unit.start()
    queue = QueueClient(
        find=lambda role, _: address if role == "controller" else place, units=lambda: [0], worker="test"
    )
    await unit.joined(10)
    await queue.declare(tasks_of(spec), timeout=10)
    try:
        yield queue, controller
    finally:
        await queue.close()
        await unit.close()
        await controller.close()


async def claim_all(queue: QueueClient, *, partition: str, rows: int) -> list[LeasedRow]:
    """Claim for generation until there are so many rows."""
    claimed: list[LeasedRow] = []
    while len(claimed) < rows:
        claimed += (await queue.claim(partition=partition, task="rollout", max_rows=rows, timeout=10)).rows
    return claimed


async def answer_all(queue: QueueClient, rows: list[LeasedRow], tags: Sequence[dict[str, Tag]]) -> list[bool]:
    """Complete rows as a rollout does, each with a response of one token and its tags."""
    dtypes = {"response_ids": np.int32, "logprobs": np.float32, "versions": np.int64, "reward": np.float32}
    columns = {name: Jagged.from_rows([[0]] * len(rows), dtype) for name, dtype in dtypes.items()}
    return await queue.complete(rows, columns, tags=list(tags), timeout=10)
