"""The clients of the fault test: producers, consumers of three tasks, and the ranks of a trainer that counts.

    python fault_clients.py KIND ADDRESS CERTIFICATE FOLDER INDEX ATTEMPT

Each client is a process, and writes a line to a diary in FOLDER after each action; ``diary`` reads them.

Invariant: the values of a row are a function of its number, and every process checks the values that it receives. The
trainer identifies a row by its values, not by the queue's metadata, and counts it in an array of the checkpoint.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from asyncflow.errors import DeadlineExceeded, StaleHandle
from asyncflow.queue.client import QueueClient, aconnect
from asyncflow.queue.protocol.messages import Samples, TaskSpec
from asyncflow.rpc.columns import Jagged, batches
from asyncflow.rpc.tls import Credentials

P = "faults"
LEASE_S = 2.5
SAMPLES, GROUPS = 4, 6
"""The number of samples of a prompt, and of prompts in a step."""
RANKS, PRODUCERS = 2, 2
CHECKPOINT_STEPS = 2
CHAIN = {"rollout": ("prompt", "response"), "reward": ("response", "reward"), "reference": ("reward", "reference")}
"""The column that each consumer reads, and the column that it writes."""
TASKS = [
    *(TaskSpec(partition=P, name=n, needs=[a], writes=[b], lease_s=LEASE_S) for n, (a, b) in CHAIN.items()),
    TaskSpec(partition=P, name="train", needs=["reference"], kind="gang"),
]
ROWS_LOST = 3
"""The exit status of a rank whose rows were lost while it used them: the gang restarts, as a job's trainer does."""
_CALL_S = 90.0
_IDLE_S = 3.0
_WORK_S, _TRAIN_S = 0.15, 0.02
_SLOT_WEIGHT = 8

Counts = npt.NDArray[np.int64]
Line = dict[str, Any]
T = TypeVar("T")


def diary(folder: Path, member: str, attempt: int) -> list[Line]:
    """Return the lines that an attempt of a member wrote."""
    file = _diary_file(folder, member, attempt)
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def newest_checkpoint(folder: Path) -> tuple[int, list[Path]]:
    """Return the step and the files of the newest checkpoint that all ranks of one attempt have written."""
    found: dict[tuple[int, str], list[Path]] = {}
    for file in folder.glob("step-*.rank-*.npy"):
        step, attempt, _rank, _ = file.name.split(".")
        found.setdefault((int(step.removeprefix("step-")), attempt), []).append(file)
    whole = [(step, sorted(files)) for (step, _), files in found.items() if len(files) == RANKS]
    return max(whole, default=(0, []))


def expected(column: str, number: int) -> list[int]:
    """Return the values of a row."""
    if column == "prompt":
        return list(range(number, number + 1 + number % 5))
    if column == "response":
        return [number + 7 * i for i in range(1 + number % 11)]
    return [number, 2 * number] if column == "reward" else [number] * (1 + number % 3)


def publish(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    draft = path.with_name("draft-" + path.name)
    draft.write_bytes(content)
    draft.rename(path)


async def produce(queue: QueueClient, say: Callable[..., None], folder: Path, index: int, _attempt: int) -> None:
    """Create this producer's half of the prompts, and create lost prompts again."""

    async def create(serials: Sequence[int], did: str) -> None:
        assigned = [serial for serial in serials if serial % PRODUCERS == index]
        for step, some in groupby(assigned, key=lambda serial: 1 + serial // GROUPS):
            for part in batches(some, 4):
                prompts = _column("prompt", [serial * SAMPLES + j for serial in part for j in range(SAMPLES)])
                samples = Samples(serials=part, step=step)
                put = await queue.put(P, {"prompt": prompts}, group_size=SAMPLES, samples=samples, timeout=_CALL_S)
                say(did, serials=part, new=sum(put.new))

    revision = -1
    while True:
        goal = int((folder / "goal").read_text())
        known = await queue.snapshot(partition=P, timeout=_CALL_S)
        await create([*known.missing, *range(known.next_serial, goal)], "created")
        wanted = await _soon(queue.wanted(partition=P, known=revision, timeout=0.3))
        if wanted is not None and wanted.revision != revision:
            await create(sorted({meta.serial for meta in wanted.keys}), "created again")
            revision = wanted.revision
        say("waited")


async def consume(task: str, queue: QueueClient, say: Callable[..., None]) -> None:
    """Lease rows, work on them for a short time, and complete them."""
    needs, writes = CHAIN[task]
    while True:
        claimed = await _soon(queue.claim(partition=P, task=task, max_rows=4, timeout=_IDLE_S))
        if claimed is None or not (rows := claimed.rows):
            say("waited")
            continue
        numbers = [row.meta.serial * SAMPLES + row.meta.sample for row in rows]
        ids = [row.row for row in rows]
        say("claimed", rows=numbers, ids=ids, tries=[row.attempt for row in rows])
        try:
            columns = await queue.fetch(rows, [needs], timeout=_CALL_S)
        except StaleHandle:
            await queue.give_back(rows, reason="some of them were lost", timeout=_CALL_S)
            say("gave back", rows=numbers)
            continue
        assert _numbers(needs, columns[needs]) == numbers
        await asyncio.sleep(_WORK_S)
        ok = await queue.complete(rows, {writes: _column(writes, numbers)}, timeout=_CALL_S)
        say("completed", rows=numbers, ids=ids, ok=ok)


async def train(queue: QueueClient, say: Callable[..., None], folder: Path, rank: int, attempt: int) -> None:
    """Count the rows in the slots of one rank; write the counts to every checkpoint, which rank 0 then commits."""
    step, files = newest_checkpoint(folder)
    counts: Counts = np.load(files[rank]) if files else np.zeros(0, np.int64)
    await queue.begin(partition=P, attempt=attempt, step=step, world=RANKS, timeout=_CALL_S)
    say("began", step=step)
    while True:
        step, slot, last = step + 1, 0, False
        while not last:
            place = {"step": step, "slot": slot, "rank": rank}
            found = await _soon(queue.slot(partition=P, attempt=attempt, **place, tokens=_SLOT_WEIGHT, timeout=_IDLE_S))
            if found is None:
                say("waited")
                continue
            columns = await queue.fetch(found.rows, list(_COLUMNS), timeout=_CALL_S)
            numbers = _numbers("prompt", columns["prompt"])
            assert all(_numbers(name, columns[name]) == numbers for name in _COLUMNS)
            counts = _sum(counts, np.bincount(numbers))
            say("counted", step=step, rows=numbers)
            await asyncio.sleep(_TRAIN_S)
            slot, last = slot + 1, found.last
        await queue.step_done(partition=P, attempt=attempt, step=step, rank=rank, timeout=_CALL_S)
        if step % CHECKPOINT_STEPS:
            continue
        name = f"step-{step}.attempt-{attempt}.rank-{{}}.npy"
        np.save(written := io.BytesIO(), counts)
        publish(folder / name.format(rank), written.getvalue())
        if rank == 0:
            while not all((folder / name.format(other)).exists() for other in range(RANKS)):
                await asyncio.sleep(0.02)
            await queue.commit(partition=P, attempt=attempt, step=step, timeout=_CALL_S)
            say("committed", step=step)


async def _soon(waiting: Awaitable[T]) -> T | None:
    """Return the result; None if the controller was unreachable until the deadline."""
    try:
        return await waiting
    except DeadlineExceeded:
        return None


_COLUMNS = ("prompt", *(writes for _, writes in CHAIN.values()))


def _column(name: str, numbers: Sequence[int]) -> Jagged:
    return Jagged.from_rows([expected(name, number) for number in numbers], "int64")


def _numbers(name: str, column: Jagged) -> list[int]:
    """Return the number of each row of a column. Raises AssertionError if the values of a row are wrong."""
    rows = [column.row(i).tolist() for i in range(len(column.offsets) - 1)]
    for row in rows:
        assert row == expected(name, row[0]), f"{name} holds {row}"
    return [row[0] for row in rows]


def _sum(some: Counts, others: Counts) -> Counts:
    total = np.zeros(max(len(some), len(others)), np.int64)
    total[: len(some)] += some
    total[: len(others)] += others
    return total


def total_counts(files: Sequence[Path]) -> Counts:
    """Return the sum of all ranks' counts of each row."""
    total: Counts = np.zeros(0, np.int64)
    for file in files:
        total = _sum(total, np.load(file))
    return total


def _diary_file(folder: Path, member: str, attempt: int) -> Path:
    return folder / f"{member}-{attempt}.jsonl"


async def main(kind: str, address: str, certificate: Path, folder: Path, index: int, attempt: int) -> int:
    file = os.open(_diary_file(folder, f"{kind}{index}", attempt), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(did: str, **what: object) -> None:
        os.write(file, (json.dumps({"t": time.monotonic(), "did": did, **what}) + "\n").encode())

    async with aconnect(address, credentials=Credentials(certificate), timeout=_CALL_S) as queue:
        say("joined")
        try:
            if kind == "trainer":
                await train(queue, say, folder, index, attempt)
            elif kind == "producer":
                await produce(queue, say, folder, index, attempt)
            else:
                await consume(kind, queue, say)
        except StaleHandle as lost:
            say("rows lost", why=str(lost))
            return ROWS_LOST
    return 0


if __name__ == "__main__":
    _, kind, address, certificate, folder, index, attempt = sys.argv
    sys.exit(asyncio.run(main(kind, address, Path(certificate), Path(folder), int(index), int(attempt))))
