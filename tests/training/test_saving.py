"""A checkpoint is written when the ledger is on disk, told of when it is written, and put off where either fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asyncflow.errors import AsyncFlowError, DiskError, Fenced, PeerLost, Refused
from asyncflow.flow.schedule import Schedule
from asyncflow.training.checkpoint import CheckpointManifest
from asyncflow.training.ranks import SingleProcess
from asyncflow.training.saving import Saver
from asyncflow.training.settings import TrainerSettings
from asyncflow.training.slice_files import SliceFiles
from asyncflow.weights.probe import WeightProbe, is_probe
from asyncflow.weights.sender import PublishedSlice
from asyncflow.weights.slices import Box

SETTINGS = TrainerSettings(
    schedule=Schedule(steps=9, lag=1, exact=True), partition="train", attempt=3, patience_s=20.0, leave_s=0.01
)


HALF = {
    "w": PublishedSlice(array=np.ones((2, 2), np.float32), offset=(2, 0), shape=(4, 2)),
    **WeightProbe(np.arange(3, dtype=np.int32), np.zeros(2, np.float32)).tensors,
}


def full_tensors(weights: dict[str, PublishedSlice]) -> Iterator[tuple[str, Any]]:
    for name, part in weights.items():
        yield name, np.full(part.shape, 5, np.float32)


class Rank(SingleProcess):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def gather(self, array: Any, *, what: str) -> Any:
        return array[None]


class Scene(SimpleNamespace):
    """A saver whose queue, disk and backend write down what they do. fails: what each of them raises next."""

    def __init__(self, compute: ThreadPoolExecutor, *, shared: bool = True, rank: int = 0) -> None:
        self.done: list[str] = []
        self.saved: list[float] = []
        self.failures = 0
        self.fails: dict[str, list[AsyncFlowError]] = {"sync": [], "write": [], "commit": []}
        self.synced, self.leaving = asyncio.Event(), asyncio.Event()
        self.synced.set()
        self.folder: Path | None = None
        self.publication = SimpleNamespace(carried=lambda step: [step - 1], slices=lambda _: HALF, began_at=0)
        self.saver = Saver(
            SimpleNamespace(group=Rank(rank), shared=shared, write=self.write),  # type: ignore[arg-type]
            queue=SimpleNamespace(sync=self.sync, commit=self.commit),  # type: ignore[arg-type]
            backend=SimpleNamespace(snapshot=self.snapshot, full_tensors=full_tensors),  # type: ignore[arg-type]
            publication=self.publication,  # type: ignore[arg-type]
            settings=SETTINGS,
            compute=compute,
            leaving=self.leaving,
            failed=self.failed,
            saved=self.saved.append,
        )

    def failed(self) -> None:
        self.failures += 1

    def did(self, what: str) -> None:
        if self.fails[what]:
            raise self.fails[what].pop(0)

    def snapshot(self, *, shared: bool) -> Callable[[Path], None]:
        self.done.append("copy")
        return lambda _: None

    async def sync(self, *, timeout: float) -> None:
        await self.synced.wait()
        self.did("sync")
        self.done.append("sync")

    def write(self, manifest: CheckpointManifest, *fill: Callable[[Path], None]) -> None:
        self.did("write")
        for put in fill if self.folder else ():
            put(self.folder)
        assert (manifest.attempt, manifest.samples, manifest.carried) == (3, 8, [manifest.step - 1])
        self.done.append(f"write {manifest.step}")

    async def commit(self, *, partition: str, attempt: int, step: int, timeout: float) -> None:
        self.did("commit")
        assert (partition, attempt) == ("train", 3)
        self.done.append(f"commit {step}")

    async def save(self, step: int) -> None:
        await self.saver.begin(step, samples=8)
        await self.saver.finished()


@pytest.fixture
async def compute() -> AsyncIterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as thread:
        yield thread


async def test_the_ledger_is_on_disk_before_a_checkpoint_and_hears_of_it_afterwards(compute) -> None:
    scene = Scene(compute)
    scene.synced.clear()
    await scene.saver.begin(1, samples=8)
    assert (scene.done, scene.saver.saving, scene.saver.newest, scene.saver.committed) == (["copy"], True, 1, 0)
    second = asyncio.create_task(scene.saver.begin(2, samples=8))
    await asyncio.sleep(0.01)
    assert scene.done == ["copy"], "the next one begins when this one has ended"
    scene.synced.set()
    await second
    await scene.saver.finished()
    assert scene.done == ["copy", "sync", "write 1", "commit 1", "copy", "sync", "write 2", "commit 2"]
    assert (scene.saver.committed, scene.saver.saving, len(scene.saved)) == (2, False, 2)


async def test_training_waits_for_a_checkpoint_that_the_other_ranks_cannot_see(compute) -> None:
    scene = Scene(compute, shared=False)
    await scene.saver.begin(1, samples=8)
    assert (scene.done, scene.saver.saving) == (["copy", "sync", "write 1", "commit 1"], False)


async def test_the_first_rank_alone_speaks_to_the_queue(compute) -> None:
    scene = Scene(compute, rank=1)
    await scene.save(1)
    assert scene.done == ["copy", "write 1"]
    assert scene.saver.committed == 1


@pytest.mark.parametrize("what", ["sync", "write"])
async def test_a_checkpoint_that_a_disk_refuses_is_put_off(compute, what) -> None:
    scene = Scene(compute)
    scene.fails[what] = [Refused("no space left") if what == "sync" else DiskError("no space left")]
    assert scene.saver.retry_in_s is None
    await scene.save(1)
    assert "write 1" not in scene.done
    assert "commit 1" not in scene.done
    assert (scene.failures, scene.saved, scene.saver.committed, scene.saver.newest) == (1, [], 0, 0)
    assert 0 < scene.saver.retry_in_s <= 1
    await scene.save(2)
    assert (scene.saver.committed, scene.saver.retry_in_s) == (2, None)
    assert scene.done[-2:] == ["write 2", "commit 2"]


async def test_what_nobody_can_wait_out_is_raised(compute) -> None:
    scene = Scene(compute)
    scene.fails["write"] = [Fenced("attempt 3 was replaced")]
    await scene.saver.begin(1, samples=8)
    with pytest.raises(Fenced):
        await scene.saver.begin(2, samples=8)
    with pytest.raises(Fenced):
        scene.saver.check()
    await scene.saver.close()


async def test_a_queue_that_is_away_for_a_while_hears_of_the_checkpoint_later(compute) -> None:
    scene = Scene(compute)
    scene.fails["commit"] = [PeerLost("the controller is unreachable")]
    await scene.save(1)
    assert scene.done[-1] == "commit 1"


async def test_a_trainer_that_leaves_saves_what_is_not_saved_and_nothing_without_the_ledger(compute) -> None:
    scene = Scene(compute)
    scene.saver.resumed(4)
    await scene.saver.save_and_leave(4, samples=8)
    assert scene.done == [], "it is there"
    await scene.saver.save_and_leave(5, samples=8)
    assert scene.done[-2:] == ["write 5", "commit 5"]
    scene.leaving.set()
    scene.synced.clear()
    await scene.saver.save_and_leave(6, samples=8)
    assert scene.done[-1] == "copy"
    assert scene.saver.committed == 5


@pytest.mark.parametrize(
    ("shared", "rank", "began_at", "written", "value"),
    [
        (True, 0, 0, Box((2, 0), (2, 2)), 1),
        (True, 1, 0, Box((2, 0), (2, 2)), 1),
        (False, 0, 0, Box.whole((4, 2)), 5),
        (False, 0, 1, Box((2, 0), (2, 2)), 1),
        (False, 1, 0, None, 0),
    ],
)
async def test_each_rank_writes_its_part_of_older_versions_or_the_first_all_of_it(
    compute, tmp_path: Path, shared, rank, began_at, written, value
) -> None:
    """``began_at``: what the first rank read from a checkpoint that nobody else sees is whole already."""
    scene = Scene(compute, shared=shared, rank=rank)
    scene.folder, scene.publication.began_at = tmp_path, began_at
    await scene.save(1)
    files = sorted(await asyncio.to_thread(lambda: list(tmp_path.iterdir())))
    assert len(files) == (written is not None)
    if written is not None:
        found = SliceFiles(files, framework="numpy")
        assert found.array("w", written).tolist() == np.full(written.extent, value).tolist()
        assert any(map(is_probe, found.shapes)) == (rank == 0)


async def test_the_end_waits_for_what_is_being_written(compute) -> None:
    scene = Scene(compute)
    scene.synced.clear()
    await scene.saver.begin(1, samples=8)
    closing = asyncio.create_task(scene.saver.close())
    await asyncio.sleep(0.01)
    assert not closing.done()
    scene.synced.set()
    await closing
    assert scene.done[-1] == "commit 1"
