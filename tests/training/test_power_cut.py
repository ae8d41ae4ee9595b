"""Power that is cut as soon as a checkpoint is complete, with the ledger's default class: training goes on there."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from train_world import GROUPS, PARTITION, SIZE, World, counting, join_trainer

from asyncflow.flow.schedule import Schedule
from asyncflow.queue.ledger.audit import audit_ledger
from asyncflow.queue.ledger.log import newest
from asyncflow.training.checkpoint import MANIFEST, Checkpoints

STEPS = 6
DELAYED = Schedule(steps=STEPS, lag=1, exact=True)


@contextmanager
def power_cuts(run: Path, images: Path) -> Iterator[list[Path]]:
    """Keep what the disk would hold if the power were cut when a checkpoint's manifest has got its name."""
    made: list[Path] = []
    synced: dict[int, int] = {}

    def noting(real: object) -> object:
        def sync(descriptor: int) -> None:
            real(descriptor)  # type: ignore[operator]
            told = os.fstat(descriptor)
            synced[told.st_ino] = told.st_size

        return sync

    def replace(source: Path, target: Path, real: object = os.replace) -> None:
        real(source, target)  # type: ignore[operator]
        if Path(target).name != MANIFEST:
            return
        image = images / f"cut-{len(made)}"
        shutil.copytree(run / "checkpoints", image / "checkpoints")
        ledger = newest(run / "ledger")
        assert ledger is not None
        (image / "ledger").mkdir()
        shutil.copy(ledger, image / "ledger" / ledger.name)
        os.truncate(image / "ledger" / ledger.name, synced[ledger.stat().st_ino])
        made.append(image)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, noting(getattr(os, name)))
        patch.setattr(os, "replace", replace)
        yield made


async def dispatch_again(world: World, first: int) -> None:
    """Create what the ledger no longer knows, or needs again."""
    for step in range(first, STEPS + 1):
        await world.queue.open_step(partition=PARTITION, step=step, groups=GROUPS, group_size=SIZE, timeout=10)
        for serial in range((step - 1) * GROUPS, step * GROUPS):
            await world.put(serial, step=step)


async def test_what_a_checkpoint_holds_the_ledger_holds_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with power_cuts(run, tmp_path) as images:
        async with World(run) as world:
            await world.dispatch(1, STEPS)
            joined = await join_trainer(world.places, counting(steps=STEPS), attempt=0, schedule=DELAYED)
            assert await joined.run() == STEPS
    assert len(images) == STEPS // 2
    for image in images:
        saved = Checkpoints(image / "checkpoints").latest()
        assert saved is not None
        async with World(image) as world:
            joined = await join_trainer(world.places, counting(steps=STEPS), attempt=1, schedule=DELAYED)
            running = asyncio.create_task(joined.run())
            while not joined.trainer.begun:  # until then, rows of steps after the checkpoint count as trained
                await asyncio.sleep(0.01)
            await dispatch_again(world, saved.manifest.step + 1)
            assert await running == STEPS
            await world.queue.close_partition(partition=PARTITION, step=STEPS, timeout=10)
        last = Checkpoints(image / "checkpoints").latest()
        assert last is not None
        assert np.load(last.folder / "counts.npy").tolist() == [1] * (STEPS * GROUPS * SIZE)
        report = audit_ledger(image / "ledger")
        assert (report.ok, report.trained) == (True, STEPS * GROUPS * SIZE), report
