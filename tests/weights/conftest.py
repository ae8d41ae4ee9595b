"""Fixtures of the weights room; ``weights_world`` beside it is shared with the processes that tests start."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from weights_world import Worker, World


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    await world.start_driver()
    yield world
    await world.close()


@pytest.fixture
async def spawn():
    workers = []

    async def start(*arguments) -> Worker:
        script = Path(__file__).with_name("worker_process.py")
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(script), *map(str, arguments), stdin=PIPE, stdout=PIPE
        )
        workers.append(Worker(process))
        return workers[-1]

    yield start
    for worker in workers:
        if worker.process.returncode is None:
            worker.process.kill()
        await worker.process.wait()


@pytest.fixture
def weights() -> Callable[[int], dict[str, np.ndarray]]:
    """A small model of many dtypes and shapes, made of a seed."""

    def make(seed: int, scale: int = 1) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        return {
            "embed": rng.standard_normal((512 * scale, 64)).astype(np.float32),
            "layer.0.proj": rng.integers(0, 2**16, (96, 80), dtype=np.uint16),
            "layer.0.norm": rng.standard_normal(80).astype(np.float32),
            "scale": np.array(rng.standard_normal(), np.float32),
            "empty": np.zeros((0, 4), np.float32),
            "steps": np.array([seed], np.int64),
            "mask": rng.integers(0, 2, (3, 5, 7)).astype(bool),
        }

    return make
