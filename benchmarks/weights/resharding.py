"""Compute the bytes to reshard Qwen2.5-32B from TP8 DP2 to TP4 DP4, by three methods, from the shapes alone.

* pull: the bytes that receivers of AsyncFlow pull, with the boxes and the ``route`` of a real transfer. Trainer and
  rollouts have different devices, so a receiver has no part of the version; versions are staged in host memory.
* allgather-swap of MindSpeed RL: the ranks of one tensor-parallel group gather the missing parts of their new shards,
  and the old shards move to host memory and back, with trainer and rollouts on the same devices.
* both layouts kept: the redundant bytes by MindSpeed RL's equation 3, for dense layers TW/UTP on each device.

    python benchmarks/weights/resharding.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from math import prod

from asyncflow.weights.slices import Box, route

ITEMSIZE = 2
GIB = 1 << 30

Tensor = tuple[tuple[int, ...], int | None]
"""The shape, and the axis along which tensor parallelism splits it."""


def qwen2_32b() -> Iterator[Tensor]:
    """Yield the tensors of Qwen2.5-32B."""
    hidden, inner, vocabulary, heads, key_values, head = 5120, 27648, 152064, 40, 8, 128
    yield (vocabulary, hidden), 0
    yield (vocabulary, hidden), 0
    yield (hidden,), None
    for _ in range(64):
        for width in (heads, key_values, key_values):
            yield (width * head, hidden), 0
            yield (width * head,), 0
        yield (hidden, heads * head), 1
        yield (inner, hidden), 0
        yield (inner, hidden), 0
        yield (hidden, inner), 1
        yield (hidden,), None
        yield (hidden,), None


def shard(shape: tuple[int, ...], axis: int | None, rank: int, ranks: int) -> Box:
    """Return the box that a rank of a tensor-parallel group holds."""
    offset, extent = [0] * len(shape), list(shape)
    if axis is not None:
        extent[axis] = shape[axis] // ranks
        offset[axis] = rank * extent[axis]
    return Box(tuple(offset), tuple(extent))


def pulled(tensors: list[Tensor], *, rank: int, update: int, generation: int) -> int:
    """Return the bytes that one receiver pulls, by the routes of a real transfer."""
    total = 0
    for shape, axis in tensors:
        wanted = shard(shape, axis, rank, generation)
        routes, missing = route([wanted], {holder: shard(shape, axis, holder, update) for holder in range(update)})
        assert not missing
        total += sum(box.volume for boxes in routes.values() for box in boxes) * ITEMSIZE
    return total


def held(tensors: list[Tensor], ranks: int) -> int:
    """Return the size of one rank's shard in bytes."""
    return sum(shard(shape, axis, 0, ranks).volume for shape, axis in tensors) * ITEMSIZE


def count(tensors: list[Tensor], *, update: int, generation: int) -> dict[str, float]:
    """Return the figures of one device, in GiB, by description."""
    old, new = held(tensors, update), held(tensors, generation)
    return {
        "model": sum(prod(shape) for shape, _ in tensors) * ITEMSIZE / GIB,
        "pull: sent to one receiver": pulled(tensors, rank=1, update=update, generation=generation) / GIB,
        "pull: the least that the layouts allow": new / GIB,
        "pull: trainer's shard on a rollout's device": 0.0,
        "allgather-swap: received by one device": (new - old) / GIB,
        "allgather-swap: between device and host, there and back": 2 * old / GIB,
        "both layouts kept: redundant on one device (eq. 3)": old / GIB,
    }


def main() -> None:
    """Print the table."""
    for what, gib in count(list(qwen2_32b()), update=8, generation=4).items():
        sys.stdout.write(f"{what:60} {gib:6.2f} GiB\n")


if __name__ == "__main__":
    main()
