"""Trainers' layouts into rollouts' layouts, over real sockets: every bit, and hardly a byte more than needed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from weights_world import Relay, RelayedTransport

from asyncflow.identity import Version
from asyncflow.weights.sender import PublishedSlice
from asyncflow.weights.slices import Box

SOON = 40.0
LAYERS = 4
HIDDEN = 256
SPLIT = {"embed": 0, "head": 0, "qkv": 0, "up": 0, "out": 1, "down": 1}

Holds = Callable[[str, tuple[int, ...]], Box | None]
Weights = Mapping[str, np.ndarray]


def model(seed: int) -> dict[str, np.ndarray]:
    """A transformer's tensors as bits of bfloat16: split by columns, split by rows, and norms that all ranks have."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"embed": (1000, HIDDEN), "head": (1000, HIDDEN), "norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes[f"{layer}.qkv"] = (3 * HIDDEN, HIDDEN)
        shapes[f"{layer}.out"] = (HIDDEN, HIDDEN)
        shapes[f"{layer}.up"] = (4 * HIDDEN, HIDDEN)
        shapes[f"{layer}.down"] = (HIDDEN, 4 * HIDDEN)
        shapes[f"{layer}.norm"] = (HIDDEN,)
    return {name: rng.integers(0, 2**16, shape, dtype=np.uint16) for name, shape in shapes.items()}


def cut(shape: tuple[int, ...], axis: int, rank: int, ranks: int) -> Box:
    """Return the part of a rank along an axis, in chunks of equal size except for the last ones."""
    size = -(-shape[axis] // ranks)
    start = min(rank * size, shape[axis])
    stop = min(start + size, shape[axis])
    offset, extent = [0] * len(shape), list(shape)
    offset[axis], extent[axis] = start, stop - start
    return Box(tuple(offset), tuple(extent))


def tensor_parallel(rank: int, ranks: int, *, stage: int = 0, stages: int = 1) -> Holds:
    """Return what a rank of a tensor-parallel group holds, of one pipeline stage of several."""

    def holds(name: str, shape: tuple[int, ...]) -> Box | None:
        layer, _, kind = name.rpartition(".")
        at = {"embed": 0, "head": stages - 1, "norm": stages - 1}[kind] if not layer else int(layer) * stages // LAYERS
        if at != stage:
            return None
        return cut(shape, SPLIT[kind], rank, ranks) if kind in SPLIT else Box.whole(shape)

    return holds


def fully_sharded(rank: int, ranks: int) -> Holds:
    """Return what a rank of FSDP holds: its chunk of every tensor along the first axis."""

    def holds(_name: str, shape: tuple[int, ...]) -> Box | None:
        box = cut(shape, 0, rank, ranks)
        return box if box.volume else None

    return holds


TP2PP2 = [tensor_parallel(rank, 2, stage=stage, stages=2) for stage in range(2) for rank in range(2)]
TP4 = [tensor_parallel(rank, 4) for rank in range(4)]
TP2 = [tensor_parallel(rank, 2) for rank in range(2)]
TP1 = [tensor_parallel(0, 1)]
FSDP8 = [fully_sharded(rank, 8) for rank in range(8)]


def part_of(weights: Weights, holds: Holds) -> dict[str, np.ndarray]:
    """Return what a rank holds of the model."""
    parts = {}
    for name, array in weights.items():
        box = holds(name, array.shape)
        if box is not None:
            parts[name] = array[tuple(slice(at, at + size) for at, size in zip(box.offset, box.extent, strict=True))]
    return parts


async def publish(world: Any, weights: Weights, ranks: list[Holds]) -> list[Relay]:
    """Publish the model from all ranks, each behind a relay that counts what it sends."""
    relays = []
    for rank, holds in enumerate(ranks):
        relays.append(Relay())
        transport = RelayedTransport(name=f"rank-{rank}", relay=relays[-1])
        sender = await world.sender(f"rank-{rank}", part=rank, parts=len(ranks), transport=transport)
        slices = {
            name: PublishedSlice(array=array, offset=holds(name, weights[name].shape).offset, shape=weights[name].shape)
            for name, array in part_of(weights, holds).items()
        }
        complete = await sender.publish(Version(0, 1), slices, timeout=SOON)
        assert complete == (rank == len(ranks) - 1)
    return relays


@pytest.mark.parametrize(
    ("trainer", "rollout"),
    [(TP2PP2, TP4), (TP4, TP1), (FSDP8, TP2), (TP4, TP2), (TP2, TP4)],
    ids=["TP2PP2-TP4", "TP4-TP1", "FSDP8-TP2", "TP4-TP2", "TP2-TP4"],
)
async def test_a_layout_becomes_another_and_no_byte_moves_in_vain(world, trainer, rollout):
    weights = model(7)
    receivers = []
    for rank, holds in enumerate(rollout):
        relay = Relay()
        transport = RelayedTransport(name=f"rollout-{rank}", relay=relay)
        receivers.append((await world.receiver(f"rollout-{rank}", layout=holds, transport=transport), relay))
    relays = await publish(world, weights, trainer)
    await asyncio.gather(*(receiver.ensure(1, timeout=SOON) for receiver, _ in receivers))
    needed = 0
    for (receiver, _), holds in zip(receivers, rollout, strict=True):
        taken, expected = receiver.take(1)[1], part_of(weights, holds)
        assert taken.keys() == expected.keys()
        assert all(np.array_equal(taken[name], array) for name, array in expected.items())
        needed += sum(array.nbytes for array in expected.values())
    moved = sum(relay.passed for relay in (*relays, *(relay for _, relay in receivers)))
    assert needed <= moved <= 1.02 * needed
