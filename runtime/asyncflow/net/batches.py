"""Cutting what is too much for one call.

Invariant: batches hold everything once and in order, and none is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


def batches(things: Iterable[T], most: int) -> Iterator[list[T]]:
    """Yield ``most`` things at a time, at the end those that are left."""
    left = iter(things)
    while batch := list(islice(left, most)):
        yield batch


def weighed_batches(
    things: Iterable[T], weigh: Callable[[T], int], *, heaviest: int, most: int | None = None
) -> Iterator[list[T]]:
    """Yield batches that weigh at most ``heaviest``, of at most ``most`` things; what is heavier alone stands alone."""
    batch: list[T] = []
    total = 0
    for thing in things:
        weight = weigh(thing)
        if batch and (len(batch) == most or total + weight > heaviest):
            yield batch
            batch, total = [], 0
        batch.append(thing)
        total += weight
    if batch:
        yield batch
