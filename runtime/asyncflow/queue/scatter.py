"""A batch cut by where its rows lie, sent in parts at once, and the answers put together again.

Invariant: answers come in the order of what was given, whatever the order of the parts.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from asyncflow.errors import Refused
from asyncflow.net.frames import Jagged

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def parts_by(keys: Iterable[K]) -> dict[K, list[int]]:
    """Give the indices of equal ``keys``, by key."""
    parts: dict[K, list[int]] = {}
    for index, key in enumerate(keys):
        parts.setdefault(key, []).append(index)
    return parts


def batches(weights: Mapping[K, int], *, most: int) -> list[list[K]]:
    """Give the keys in order, in batches that weigh at most ``most``; a key that is heavier stands alone."""
    made: list[list[K]] = []
    left = 0
    for key, weight in weights.items():
        if not made or weight > left:
            made.append([])
            left = most
        made[-1].append(key)
        left -= weight
    return made


async def together(jobs: Iterable[Coroutine[None, None, T]]) -> list[T]:
    """Await ``jobs`` at once; when one fails the others are cancelled."""
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def scatter(keys: Iterable[Hashable], send: Callable[[list[int]], Coroutine[None, None, list[T]]]) -> list[T]:
    """Send the indices of equal ``keys`` together; give the answers, one for each index, in order."""
    parts = parts_by(keys)
    answers = await together(send(indices) for indices in parts.values())
    by_index = dict(zip(itertools.chain(*parts.values()), itertools.chain(*answers), strict=True))
    return [by_index[index] for index in range(len(by_index))]


def part_of(columns: Mapping[str, Jagged], indices: Sequence[int], rows: int) -> dict[str, Jagged]:
    """Give the rows ``indices`` of ``columns``, which must have ``rows`` rows each (Refused otherwise)."""
    for name, column in columns.items():
        if len(column) != rows:
            raise Refused(f"column {name} has {len(column)} rows, not {rows}", where="queue client")
    return dict(columns) if len(indices) == rows else {name: column.take(indices) for name, column in columns.items()}


def join(parts: Sequence[dict[str, Jagged]], indices: Iterable[Sequence[int]]) -> dict[str, Jagged]:
    """Put columns of parts together so that the row which stands for index i comes at place i."""
    if len(parts) <= 1:
        return parts[0] if parts else {}
    places = {index: place for place, index in enumerate(itertools.chain(*indices))}
    order = [places[index] for index in range(len(places))]
    return {name: Jagged.concat([part[name] for part in parts]).take(order) for name in parts[0]}
