"""Publishing goes on beside the training: what is published is what the step made, and training hardly waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from train_world import JoinedTrainer, World, counting, join_trainer, training

from asyncflow.errors import Fenced
from asyncflow.flow.schedule import Schedule
from asyncflow.identity import Version
from asyncflow.training.backend import TrainerBackend
from asyncflow.training.ranks import ProcessGroup
from asyncflow.weights.probe import split_probe

STEPS = 4
DELAYED = Schedule(steps=STEPS, lag=1, exact=True)


class Watched:
    """Backends that keep a copy of the weights after each step, and count their micro-batches."""

    def __init__(self, kind: Callable[[ProcessGroup], TrainerBackend]) -> None:
        self.made: dict[int, dict[str, np.ndarray]] = {}
        self.micro_batches = 0
        self._kind = kind

    def __call__(self, group: ProcessGroup) -> TrainerBackend:
        backend = self._kind(group)
        finish, compute = backend.finish_step, backend.micro_batch

        def finish_step(step: int) -> dict[str, float]:
            metrics = finish(step)
            self.made[step] = {name: array.copy() for name, array in backend.tensors()}
            return metrics

        def micro_batch(*batch: Any, **how: Any) -> None:
            self.micro_batches += 1
            compute(*batch, **how)

        backend.finish_step, backend.micro_batch = finish_step, micro_batch  # type: ignore[method-assign]
        return backend


def hold(joined: JoinedTrainer, what: str, *, from_step: int) -> threading.Event:
    """Make the sender stop in ``what`` it does with versions from ``from_step`` on, until the event is set."""
    go_on, done = threading.Event(), getattr(joined.sender, what)

    def held_up(first: Any, *rest: Any) -> Any:
        version = first if isinstance(first, Version) else first.version
        if version.step >= from_step:
            assert go_on.wait(20)
        return done(first, *rest)

    setattr(joined.sender, what, held_up)
    return go_on


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("held_up", ["copy", "part"])
async def test_the_next_step_is_computed_meanwhile_and_each_version_is_what_its_step_made(
    tmp_path: Path, tiny_folder: Path, held_up: str
) -> None:
    async with World(tmp_path) as world:
        await world.dispatch(1, STEPS)
        watched = Watched(training(steps=STEPS))
        joined = await join_trainer(world.places, watched, attempt=0, schedule=DELAYED, model=tiny_folder)
        go_on = hold(joined, held_up, from_step=1)
        published: dict[int, dict[str, np.ndarray]] = {}
        announce = joined.sender.announce

        async def announced(copied: Any, part: Any, **how: Any) -> bool:
            published[copied.version.step] = {name: array.copy() for name, array in copied.arena.arrays.items()}
            return await announce(copied, part, **how)

        joined.sender.announce = announced  # type: ignore[method-assign]
        running = asyncio.create_task(joined.run())
        await until(lambda: bool(watched.made))
        first = watched.micro_batches
        await until(lambda: watched.micro_batches > first)
        if held_up == "part":
            await until(lambda: len(watched.made) == 2)
        await asyncio.sleep(0.2)
        assert list(watched.made) == ([1] if held_up == "copy" else [1, 2]), "weights change only when they are copied"
        assert world.catalogue.newest == Version(0, 0)
        go_on.set()
        assert await running == STEPS
        assert world.catalogue.newest == Version(0, STEPS)
    for step, weights in watched.made.items():
        assert weights.keys() == split_probe(published[step])[0].keys()
        for name, array in weights.items():
            assert array.tobytes() == published[step][name].tobytes(), (step, name)


async def test_all_versions_are_announced_when_the_trainer_is_done(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        await world.dispatch(1, STEPS)
        joined = await join_trainer(world.places, counting(steps=STEPS), attempt=0, schedule=DELAYED)
        go_on = hold(joined, "part", from_step=STEPS)
        running = asyncio.create_task(joined.run())
        await until(lambda: len(joined.talk.reports) == STEPS)
        await asyncio.sleep(0.1)
        assert not running.done()
        go_on.set()
        assert await running == STEPS
        assert world.catalogue.newest == Version(0, STEPS)


async def test_each_publication_is_told_once_when_it_ends(tmp_path: Path) -> None:
    told: list[float] = []
    async with World(tmp_path) as world:
        await world.dispatch(1, STEPS)
        schedule = Schedule(steps=STEPS, lag=3, exact=True, sync_every=2)
        joined = await join_trainer(
            world.places, counting(steps=STEPS), attempt=0, schedule=schedule, announced=told.append
        )
        assert await joined.run() == STEPS
    assert [said.published for said in joined.talk.reports] == [False, True, False, True]
    assert len(told) == 3, "θ_0, θ_2 and θ_4"
    assert all(seconds > 0 for seconds in told)


async def test_a_trainer_that_is_told_to_leave_does_not_wait_for_a_publication_without_end(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        await world.dispatch(1, STEPS)
        joined = await join_trainer(world.places, counting(steps=STEPS), attempt=0, schedule=DELAYED)
        go_on = hold(joined, "part", from_step=1)
        running = asyncio.create_task(joined.run())
        await until(lambda: len(joined.talk.reports) == 1)
        joined.trainer.leave()
        assert await asyncio.wait_for(running, 10) in (1, 2)
        go_on.set()


async def test_a_trainer_learns_from_a_refused_publication_that_it_was_replaced(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        await world.dispatch(1, 1)
        joined = await join_trainer(world.places, counting(steps=STEPS), attempt=0, schedule=DELAYED)
        go_on = hold(joined, "part", from_step=1)
        running = asyncio.create_task(joined.run())
        await until(lambda: len(joined.talk.reports) == 1)
        world.catalogue.fence(1)
        go_on.set()
        with pytest.raises(Fenced):
            await asyncio.wait_for(running, 10)
