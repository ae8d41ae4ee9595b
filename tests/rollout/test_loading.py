"""A loader of weights by itself: between a receiver and an engine that are made up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from asyncflow.errors import AsyncFlowError, StaleHandle
from asyncflow.identity import Version
from asyncflow.rollout.loading import EXACT, WeightLoader
from asyncflow.telemetry.metrics import FollowerMetrics
from asyncflow.weights.probe import WeightProbe

V1, V2, V3 = (Version(0, step) for step in (1, 2, 3))
SOON = 10.0


class Receiver:
    """Holds ``copies``; ``staged`` is the newest of them that was not taken."""

    def __init__(self) -> None:
        self.copies: dict[Version, dict[str, Any]] = {}
        self.current: Version | None = None
        self._changed = asyncio.Event()

    def add(self, version: Version, **tensors: Any) -> None:
        self.copies[version] = {"w": np.full(2, version.step, np.float32), **tensors}
        self._changed.set()

    @property
    def staged(self) -> Version | None:
        return max((v for v in self.copies if self.current is None or v > self.current), default=None)

    def take(self, step: int) -> tuple[Version, dict[str, Any]]:
        self.current = max(version for version in self.copies if version.step == step)
        self._changed.set()
        return self.current, self.copies[self.current]

    def tensors(self, version: Version) -> dict[str, Any]:
        if version not in self.copies:
            raise StaleHandle(f"{version} is not held")
        return self.copies[version]

    def status(self) -> dict[str, Any]:
        return {"version": -1, "staged": -1 if self.staged is None else self.staged.packed}

    async def wait_for(self, predicate: Callable[[], bool], *, what: str, timeout: float) -> None:
        del what, timeout
        while not predicate():
            self._changed.clear()
            await self._changed.wait()


class Engine:
    """An engine that answers a probe with ``logprobs``, None where it can tell none."""

    max_length = 3

    def __init__(self) -> None:
        self.version: Version | None = None
        self.did: list[tuple[str, Version, list[float]]] = []
        self.asked: list[list[int]] = []
        self.logprobs: Any = None

    async def stage(self, version: Version, tensors: dict[str, Any]) -> None:
        self.did.append(("stage", version, tensors["w"].tolist()))

    async def load(self, version: Version, tensors: dict[str, Any]) -> None:
        assert set(tensors) == {"w"}
        self.did.append(("load", version, tensors["w"].tolist()))
        self.version = version

    async def probe(self, ids: list[int]) -> Any:
        self.asked.append(ids)
        return self.logprobs


def world(*, merge: Callable[..., Any] | None = None) -> tuple[WeightLoader, Receiver, Engine]:
    receiver, engine = Receiver(), Engine()
    loader = WeightLoader(receiver, engine, metrics=FollowerMetrics(), probe_gap=EXACT, merge=merge)  # type: ignore[arg-type]
    return loader, receiver, engine


async def until(predicate: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON):
        while not predicate():
            await asyncio.sleep(0)


def probe_of(*logprobs: float) -> dict[str, Any]:
    """Return the tensors of a probe of one token more than these."""
    return WeightProbe(np.arange(1 + len(logprobs), dtype=np.int32), np.array(logprobs, np.float32)).tensors


async def test_every_newer_version_is_staged_once_the_engine_has_one():
    loader, receiver, engine = world()
    staging = asyncio.create_task(loader.stage_all())
    receiver.add(V1)
    await asyncio.sleep(0)
    await loader.load(await loader.prepare(1))
    assert receiver.current == V1
    for _ in range(5):
        await asyncio.sleep(0)
    assert not staging.done(), "there is nothing to stage"
    receiver.add(V2)
    await until(lambda: len(engine.did) == 2)
    receiver.add(V3)
    await until(lambda: len(engine.did) == 3)
    assert engine.did == [("load", V1, [1, 1]), ("stage", V2, [2, 2]), ("stage", V3, [3, 3])]
    staging.cancel()


async def test_a_version_is_merged_once_and_in_another_thread_for_whoever_needs_it():
    merged, here = [], threading.get_ident()

    def merge(tensors: dict[str, Any]) -> dict[str, Any]:
        assert threading.get_ident() != here
        merged.append(int(tensors["w"][0]))
        return {"w": tensors["w"] + 10}

    loader, receiver, engine = world(merge=merge)
    for version in (V1, V2):
        receiver.add(version, **probe_of(-1.0))
    staging = asyncio.create_task(loader.stage(V2))
    prepared, _ = await asyncio.gather(loader.prepare(2), staging)
    await loader.load(prepared)
    assert (prepared.version, prepared.weights["w"].tolist(), merged) == (V2, [12, 12], [2])
    await loader.stage(V1)
    await loader.load(await loader.prepare(2))
    await loader.load(await loader.prepare(1))
    loads = [("load", V2, [12, 12]), ("stage", V1, [11, 11]), ("load", V2, [12, 12]), ("load", V1, [11, 11])]
    assert engine.did == [("stage", V2, [12, 12]), *loads], "none is taken for another"
    assert merged[:2] == [2, 1]


async def test_who_gives_up_a_preparation_keeps_it_from_nobody_else():
    may_end = threading.Event()

    def merge(tensors: dict[str, Any]) -> dict[str, Any]:
        may_end.wait(SOON)
        return tensors

    loader, receiver, engine = world(merge=merge)
    receiver.add(V1)
    given_up, goes_on = asyncio.create_task(loader.stage(V1)), asyncio.create_task(loader.stage(V1))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.sleep(0)
    may_end.set()
    await asyncio.wait_for(goes_on, SOON)
    assert engine.did == [("stage", V1, [1, 1])]


@pytest.mark.parametrize(
    ("most", "found", "wrong"),
    [
        (5, [-1.0, -2.0, -3.0], None),
        (4, [-1.0, -2.0], None),
        (4, None, None),
        (4, [-1.0, -2.5], r"differ by 0\.25 on average"),
        (4, [-1.0, np.nan], "differ by nan on average"),
    ],
)
async def test_what_is_loaded_is_proved_by_as_many_tokens_as_the_engine_takes(most, found, wrong):
    loader, receiver, engine = world()
    receiver.add(V1, **probe_of(-1.0, -2.0, -3.0))
    engine.max_length = most
    engine.logprobs = None if found is None else np.array(found, np.float32)
    prepared = await loader.prepare(1)
    if wrong is None:
        await loader.load(prepared)
    else:
        with pytest.raises(AsyncFlowError, match=f"does not have the weights of θ1: .*{wrong}"):
            await loader.load(prepared)
    assert engine.asked == [list(range(most - 1))]


async def test_an_engine_that_kept_the_version_before_is_refuted():
    loader, receiver, engine = world()
    receiver.add(V1, **probe_of(-1.0, -2.0))
    receiver.add(V2, **probe_of(-1.0005, -2.0005))
    engine.max_length, engine.logprobs = 4, np.array([-1.0, -2.0], np.float32)
    await loader.load(await loader.prepare(1))
    with pytest.raises(AsyncFlowError, match="of the version before"):
        await loader.load(await loader.prepare(2))
    gap = loader._metrics.registry.get_sample_value("asyncflow_follower_probe_gap")
    assert gap == pytest.approx(5e-4, rel=1e-3)


async def test_the_status_is_that_of_the_receiver_but_of_what_is_loaded():
    loader, receiver, _ = world()
    receiver.add(V1)
    receiver.add(V2)
    assert loader.status() == {"version": -1, "staged": V2.packed, "swaps": 0}
    await loader.load(await loader.prepare(1))
    loader.swapped(1, 0.5)
    assert loader.status() == {"version": V1.packed, "staged": V2.packed, "swaps": 1, "swap_s": 0.5}
    value = loader._metrics.registry.get_sample_value
    names = ("version_step", "swaps_total", "swap_seconds_sum")
    assert [value(f"asyncflow_follower_{name}") for name in names] == [1, 1, 0.5]
    await loader.stage(V2)
    assert 0 <= loader.status()["stage_s"] < SOON
