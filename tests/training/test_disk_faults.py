"""A disk that fails while a checkpoint is written: it is written later, and only a disk that never recovers ends it."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from train_world import GROUPS, PARTITION, SIZE, World, counting, join_trainer

from asyncflow.errors import CheckpointError
from asyncflow.flow.schedule import Schedule
from asyncflow.queue.ledger.audit import audit_ledger
from asyncflow.training import saving as saving_module
from asyncflow.training.checkpoint import CheckpointManifest, Checkpoints

OPERATIONS = ("open", "mkdir", "fsync", "rename", "replace")


class Disk:
    """Fails operation after operation in ``folder``: the first that a checkpoint does, then the second of the next."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.number = 0
        self.at = -1
        self.failed: list[str] = []

    @contextmanager
    def watched(self) -> Iterator[Disk]:
        with pytest.MonkeyPatch.context() as patch:
            for name in OPERATIONS:
                patch.setattr(os, name, self._failing(name, getattr(os, name)))
            yield self

    def fail(self, at: int) -> None:
        self.number, self.at = 0, at

    def _failing(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def do(*args: Any, **options: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{args[0]}") if isinstance(args[0], int) else str(args[0])
            if self.at >= 0 and path.startswith(str(self.folder)):
                number, self.number = self.number, self.number + 1
                if number == self.at:
                    self.at = -1
                    self.failed.append(f"{name} {Path(path).name}")
                    raise OSError((errno.EIO, errno.ENOSPC)[number % 2], f"{name} failed")
            return real(*args, **options)

        return do


def counts(folder: Path) -> list[int]:
    latest = Checkpoints(folder / "checkpoints").latest()
    assert latest is not None
    latest.verify()
    counted: list[int] = np.load(latest.folder / "counts.npy").tolist()
    return counted


async def test_whatever_fails_while_a_checkpoint_is_written_the_next_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving_module, "_RETRY_S", 0.0)
    steps, disk, wanted = 30, Disk(tmp_path / "checkpoints"), iter(range(100))
    async with World(tmp_path) as world:
        await world.dispatch(1, steps)
        schedule = Schedule(steps=steps, lag=1, exact=True)
        joined = await join_trainer(
            world.places, counting(steps=steps), attempt=0, schedule=schedule, checkpoint_every=1
        )
        checkpoints, failures = joined.trainer._checkpoints, iter(range(100))
        write = checkpoints.write

        def watched(manifest: CheckpointManifest, *fill: Callable[[Path], None]) -> Any:
            if next(wanted) % 2 == 0:
                disk.fail(next(failures))
            with disk.watched():
                return write(manifest, *fill)

        checkpoints.write = watched  # type: ignore[method-assign]
        assert await joined.run() == steps
        await world.queue.close_partition(partition=PARTITION, step=steps, timeout=10)
    assert len(disk.failed) >= 8, disk.failed
    assert "replace .manifest.json" in " ".join(disk.failed)
    assert counts(tmp_path) == [1] * (steps * GROUPS * SIZE)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 3, "two checkpoints and the attempt"
    report = audit_ledger(tmp_path / "ledger")
    assert (report.ok, report.trained) == (True, steps * GROUPS * SIZE), report


async def test_a_disk_that_does_not_recover_ends_the_training_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving_module, "_RETRY_S", 0.01)
    monkeypatch.setattr(saving_module, "DISK_S", 0.3)
    tries: list[int] = []
    async with World(tmp_path) as world:
        await world.dispatch(1, 2)
        schedule = Schedule(steps=2, lag=1, exact=True)
        joined = await join_trainer(world.places, counting(steps=2), attempt=0, schedule=schedule, checkpoint_every=1)
        write = joined.trainer._checkpoints.write

        def full(manifest: CheckpointManifest, *_: object) -> Any:
            tries.append(manifest.step)
            return write(manifest, no_room)

        def no_room(_: Path) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        joined.trainer._checkpoints.write = full  # type: ignore[method-assign]
        with pytest.raises(
            CheckpointError, match=r"no checkpoint could be written for [0-9]+ s: .*No space left"
        ) as ended:
            await asyncio.wait_for(joined.run(), 20)
    assert str(ended.value).count("\n") == 0
    assert tries[0] == 1
    assert tries.count(2) > 1


async def test_a_trainer_that_leaves_while_the_disk_fails_leaves_with_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving_module, "_RETRY_S", 60.0)
    async with World(tmp_path) as world:
        await world.dispatch(1, 3)
        schedule = Schedule(steps=5, lag=1, exact=True)
        joined = await join_trainer(world.places, counting(steps=5), attempt=0, schedule=schedule, checkpoint_every=2)
        running = asyncio.create_task(joined.run())
        while joined.trainer.step < 3 or joined.trainer._saver.saving:
            await asyncio.sleep(0.01)

        def fail(*_: object) -> Any:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr("asyncflow.training.checkpoint.sync", fail)
        joined.trainer.leave()
        assert await asyncio.wait_for(running, 20) == 3
    saved = Checkpoints(tmp_path / "checkpoints").latest()
    assert saved is not None
    assert saved.manifest.step == 2
