"""Versions are announced in order, and those that later steps need are kept, carried, written and read again."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asyncflow.errors import Fenced, PeerLost
from asyncflow.flow.schedule import Schedule
from asyncflow.identity import Version
from asyncflow.training import publication as module
from asyncflow.training.publication import Publication
from asyncflow.weights.probe import WeightProbe
from asyncflow.weights.sender import Copied, PublishedSlice
from asyncflow.weights.slices import Arena, Box

PROBE = WeightProbe(np.arange(3, dtype=np.int32), np.zeros(2, np.float32))
DELAYED = Schedule(steps=9, lag=1, exact=True)
WINDOW = Schedule(steps=9, lag=2, exact=False)


class Sender:
    """Copies versions, and announces them as soon as ``goes_on`` is set. fails: what announcing raises, in order."""

    def __init__(self) -> None:
        self.copied: list[Version] = []
        self.announced: list[Version] = []
        self.fails: list[Exception] = []
        self.goes_on = threading.Event()
        self.goes_on.set()

    def copy(self, version: Version, tensors: dict[str, np.ndarray]) -> Copied:
        arena = Arena(
            {
                name: ("float32" if array.dtype == np.float32 else "int32", Box.whole(array.shape))
                for name, array in tensors.items()
            }
        )
        for name, array in tensors.items():
            arena.arrays[name][...] = array
        self.copied.append(version)
        return Copied(version, arena, {name: array.shape for name, array in tensors.items()})

    def part(self, copied: Copied) -> Any:
        assert self.goes_on.wait(20)
        return SimpleNamespace(version=copied.version)

    async def announce(self, copied: Copied, part: Any, *, timeout: float) -> bool:
        assert part.version == copied.version
        if self.fails:
            raise self.fails.pop(0)
        self.announced.append(copied.version)
        return True

    def held(self, version: Version) -> None:
        return None


def weights(step: int) -> dict[str, np.ndarray]:
    return {"w": np.full((4, 2), step, np.float32), **PROBE.tensors}


def publication(sender: Sender, *, schedule: Schedule = DELAYED, lagged: bool = False, **more: Any) -> Publication:
    given = {"attempt": 2, "patience_s": 20.0, "ended": lambda _: None} | more
    return Publication(sender, schedule=schedule, lagged=lagged, **given)  # type: ignore[arg-type]


async def published(*steps: int, **more: Any) -> Publication:
    made = publication(Sender(), **more)
    for step in steps:
        await made.begin(step, lambda step=step: weights(step))
    await made.announced()
    return made


async def test_the_next_version_waits_for_the_one_before_to_be_announced() -> None:
    sender, told, digested = Sender(), [], []
    made = publication(sender, ended=told.append, digested=lambda part: digested.append(part.version.step))
    assert (made.underway, made.seconds) == (-1, None)
    await made.copied()
    await made.announced()
    sender.goes_on.clear()
    await made.begin(1, lambda: weights(1))
    await made.copied()
    assert (made.underway, sender.copied, sender.announced) == (1, [Version(2, 1)], [])
    await made.announced(within_s=0.01)
    second = asyncio.create_task(made.begin(2, lambda: weights(2)))
    await asyncio.sleep(0.01)
    assert not second.done()
    assert not told
    sender.goes_on.set()
    await second
    await made.announced()
    assert sender.announced == sender.copied == [Version(2, 1), Version(2, 2)]
    assert (made.underway, digested, made.seconds) == (-1, [1, 2], told[-1])
    assert len(told) == 2


async def test_a_driver_that_is_away_for_a_while_hears_of_the_version_later() -> None:
    sender = Sender()
    sender.fails = [PeerLost("the driver is unreachable")]
    made = publication(sender)
    await made.begin(1, lambda: weights(1))
    await made.announced()
    assert sender.announced == [Version(2, 1)]


async def test_what_a_publication_failed_with_is_raised_by_whatever_comes_next() -> None:
    sender = Sender()
    sender.fails = [Fenced("attempt 2 was replaced")]
    made = publication(sender)
    await made.begin(1, lambda: weights(1))
    for then in (made.announced, lambda: made.begin(2, lambda: weights(2))):
        with pytest.raises(Fenced):
            await then()
    with pytest.raises(Fenced):
        made.check()
    assert sender.copied == [Version(2, 1)]
    made.close()


async def test_nothing_is_announced_after_the_end() -> None:
    sender = Sender()
    sender.goes_on.clear()
    made = publication(sender)
    await made.begin(1, lambda: weights(1))
    await made.copied()
    made.close()
    sender.goes_on.set()
    await asyncio.sleep(0.02)
    assert (sender.announced, made.underway) == ([], -1)


@pytest.mark.parametrize(
    ("schedule", "lagged", "carried"),
    [
        (DELAYED, False, [4]),
        (Schedule(steps=9, lag=3, exact=True), False, [2, 3, 4]),
        (WINDOW, False, []),
        (WINDOW, True, [4]),
        (Schedule(steps=9, lag=0, exact=True), False, []),
    ],
)
async def test_a_checkpoint_carries_the_versions_that_make_or_judge_the_steps_after_it(
    schedule: Schedule, lagged: bool, carried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AFFORDABLE_BYTES", 0)
    made = await published(0, 1, 2, 3, 4, 5, schedule=schedule, lagged=lagged)
    assert made.carried(5) == carried
    for step in carried:
        part = made.slices(step)["w"]
        assert (part.array.tolist(), part.offset, part.shape) == (weights(step)["w"].tolist(), (0, 0), (4, 2))
    here = [step for step in range(6) if made.weights_of(Version(2, step)) is not None]
    assert here == [*carried, 5], "nothing else is kept"


async def test_versions_that_may_have_made_samples_are_kept_where_they_cost_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = sum(array.nbytes for array in weights(0).values())
    for room, kept in ((3 * size, [3, 4, 5]), (3 * size - 1, [4, 5]), (9 * size, [3, 4, 5]), (0, [5])):
        monkeypatch.setattr(module, "_AFFORDABLE_BYTES", room)
        made = await published(0, 1, 2, 3, 4, 5, schedule=WINDOW)
        assert [step for step in range(6) if made.weights_of(Version(2, step)) is not None] == kept


async def test_weights_of_an_earlier_attempt_are_those_of_this_one_up_to_where_it_began() -> None:
    made = await published(3, 4)
    made.began_at = 3
    found = made.weights_of(Version(1, 3))
    assert found is not None
    assert list(found) == ["w"], "a probe is no weight"
    assert found["w"].tolist() == weights(3)["w"].tolist()
    assert made.weights_of(Version(1, 4)) is None
    assert made.weights_of(Version(2, 4)) is not None


def group(rank: int, world: int) -> Any:
    return SimpleNamespace(rank=rank, world=world)


def test_a_version_is_read_by_any_number_of_ranks_whatever_number_wrote_it(tmp_path: Path) -> None:
    whole = np.arange(12, dtype=np.float32).reshape(6, 2)
    for rank in range(2):
        part = PublishedSlice(array=whole[3 * rank : 3 * rank + 3], offset=(3 * rank, 0), shape=(6, 2))
        folder = tmp_path / f"rank-{rank}"
        folder.mkdir()
        Publication.save(folder, 4, {"w": part, "norm": np.ones(2, np.float32), **PROBE.tensors}, rank=rank)
    assert Publication.read(None, 4, group=group(0, 1), shared=True) == {}
    assert Publication.read(tmp_path, 5, group=group(0, 1), shared=True) == {}
    for world, shared in ((1, True), (3, True), (3, False)):
        parts = [Publication.read(tmp_path, 4, group=group(rank, world), shared=shared) for rank in range(world)]
        if not shared:
            assert [part["w"].array.tolist() for part in parts] == [whole.tolist()] * 3
            continue
        assert np.concatenate([part["w"].array for part in parts]).tolist() == whole.tolist()
        assert {name for name in parts[0] if name not in ("w", "norm")} == set(PROBE.tensors)
        assert all(name in ("w", "norm") for part in parts[1:] for name in part)
