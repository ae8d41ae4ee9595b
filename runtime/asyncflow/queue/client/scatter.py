"""A batch cut by where its rows lie, and what came of the parts put together again.

Invariant: answers come in the order of what was given, whatever the order of the parts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from asyncflow.errors import Refused
from asyncflow.net.frames import Array, Jagged

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def parts_by(keys: Iterable[K]) -> Mapping[K, Sequence[int]]:
    """Return the indices of equal ``keys``, by key."""
    every = list(keys)
    if every and every.count(every[0]) == len(every):
        return {every[0]: range(len(every))}
    parts: dict[K, list[int]] = {}
    for index, key in enumerate(every):
        parts.setdefault(key, []).append(index)
    return parts


def part_of(columns: Mapping[str, Jagged], indices: Sequence[int], rows: int) -> dict[str, Jagged]:
    """Return the rows ``indices`` of ``columns``, which must have ``rows`` rows each (Refused otherwise)."""
    for name, column in columns.items():
        if len(column) != rows:
            raise Refused(f"column {name} has {len(column)} rows, not {rows}", where="queue client")
    return dict(columns) if len(indices) == rows else {name: column.take(indices) for name, column in columns.items()}


def join(parts: Sequence[dict[str, Jagged]], indices: Sequence[Sequence[int]]) -> dict[str, Jagged]:
    """Put columns of parts together so that the row which stands for index i comes at place i."""
    if len(parts) <= 1:
        return parts[0] if parts else {}
    runs = _runs(indices)
    if len(runs) == len(parts):
        return {name: Jagged.gather([(parts[part][name], a, b) for part, a, b in runs]) for name in parts[0]}
    order = np.argsort(np.concatenate([np.asarray(mine) for mine in indices]))
    return {name: _interleaved([part[name] for part in parts], runs, order) for name in parts[0]}


def repeated(columns: Mapping[str, Jagged], names: Sequence[K], asked: Sequence[K]) -> dict[str, Jagged]:
    """Return the rows that have ``names`` in the order in which they are ``asked`` for, some of them more than once."""
    places = {name: place for place, name in enumerate(names)}
    indices = [places[name] for name in asked]
    return {name: column.take(indices) for name, column in columns.items()}


def _interleaved(columns: Sequence[Jagged], runs: Sequence[tuple[int, int, int]], order: Array) -> Jagged:
    """Put the rows of ``columns`` together by ``runs``; order: where each comes from, if they lay one after another."""
    if len(forms := {column.form for column in columns}) > 1:
        raise ValueError(f"rows of {', '.join(sorted(forms))} cannot be one column")
    bounds = [column.offsets.tolist() for column in columns]
    values = np.concatenate([columns[part].values[bounds[part][a] : bounds[part][b]] for part, a, b in runs])
    lengths = np.concatenate([column.lengths for column in columns])[order]
    return Jagged.trusted(values, lengths, columns[0].dtype, columns[0].inner)


def spread_out(parts: Iterable[tuple[Sequence[int], Sequence[T] | None]], count: int, otherwise: T) -> list[T]:
    """Return what came of each of ``count`` rows, by index; ``otherwise`` for those of which nothing came."""
    made = [otherwise] * count
    for indices, answers in parts:
        if answers is not None:
            for index, answer in zip(indices, answers, strict=True):
                made[index] = answer
    return made


def _runs(indices: Iterable[Sequence[int]]) -> list[tuple[int, int, int]]:
    """Return where rows 0, 1, ... are: (part, start, stop) for as many as lie one after another in one part."""
    places = {index: (part, place) for part, mine in enumerate(indices) for place, index in enumerate(mine)}
    runs: list[tuple[int, int, int]] = []
    for index in range(len(places)):
        part, place = places[index]
        if runs and runs[-1][0] == part and runs[-1][2] == place:
            runs[-1] = (part, runs[-1][1], place + 1)
        else:
            runs.append((part, place, place + 1))
    return runs
