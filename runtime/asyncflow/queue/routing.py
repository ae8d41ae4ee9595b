"""Where rows lie, and calls to the storage units there: batches cut by unit, and the answers joined again.

Rows are looked for where their holder was told that they lie, or where their ids say; where they have moved, the
controller tells.

Invariants: each row is answered for once, by the unit where it lies, or is named among those that lie nowhere; answers
come in the order of what was asked, whatever the order of the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, TypeAlias, TypeVar

from asyncflow.errors import Elsewhere, PeerLost, Refused
from asyncflow.identity import unit_of
from asyncflow.queue.peers import Peer, Peers, left, now, together
from asyncflow.queue.protocol.batches import RowBatch
from asyncflow.queue.protocol.calls import NOWHERE, AskWhere
from asyncflow.queue.protocol.messages import LeasedRow, Tag
from asyncflow.rpc.columns import BatchHeader, Buffer, Jagged, encode_batch
from asyncflow.rpc.retry import retry_within

_AWAY_S = 5.0
"""How long a unit that is away, or takes nothing new, is called before the controller is asked again."""

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
Rows: TypeAlias = RowBatch | Sequence[LeasedRow | int]
"""Rows by their ids, or as they were given to their holder."""
Tags: TypeAlias = Sequence[Mapping[str, Tag]]
"""Tags of rows, one mapping for each row."""
Part: TypeAlias = tuple[Sequence[int], T | None]
"""The indices of rows and the result of their call; None for rows that lie nowhere."""


async def call_where_they_lie(
    peers: Peers,
    rows: Sequence[int],
    units: Sequence[int],
    call: Callable[[Peer, Sequence[int], float], Coroutine[Any, Any, T]],
    *,
    apart: Sequence[Hashable] = (),
    what: str,
    timeout: float,
) -> list[Part[T]]:
    """Await ``call(unit, indices of rows, seconds)`` for the rows at each unit, and return the result of each call.

    units: where each of ``rows`` was last known to lie; apart: for each row what must be the same within one call.
    Calls that were lost are repeated, and rows that moved are followed; other errors pass through.
    """
    deadline = now() + timeout

    async def at_all(places: Iterable[tuple[int, Sequence[int]]]) -> list[Part[T]]:
        unit = partial(Peer, "storage")
        found = await together(
            retry_within(partial(attempt, unit(at), indices), what=f"{what} at {unit(at)}", timeout=left(deadline))
            for at, indices in places
        )
        return list(chain.from_iterable(found))

    async def attempt(unit: Peer, indices: Sequence[int], seconds: float) -> list[Part[T]]:
        if unit.number in peers.units():
            with suppress(Elsewhere):
                return [(indices, await call(unit, indices, seconds))]
        request = AskWhere([rows[index] for index in indices])
        units_now = await peers.ask("queue.where", request, list[int], timeout=left(deadline))
        places = {at: [indices[place] for place in there] for at, there in parts_by(units_now).items()}
        if places.keys() == {unit.number}:
            try:
                return [(indices, await call(unit, indices, min(_AWAY_S, left(deadline))))]
            except Elsewhere as moved:
                raise PeerLost(f"rows are on their way: {moved}", where=str(unit)) from moved
        nowhere = places.pop(NOWHERE, None)
        parts = await at_all(places.items())
        return [*parts, (nowhere, None)] if nowhere else parts

    keys = zip(units, apart, strict=True) if apart else units
    return await at_all((units[indices[0]], indices) for indices in parts_by(keys).values())


def located(rows: Rows) -> tuple[list[int], list[int]]:
    """Return the ids of rows, and the unit of each as their holder was told it, or as its id says."""
    if isinstance(rows, RowBatch):
        return rows.rows, rows.units
    ids = [row if isinstance(row, int) else row.row for row in rows]
    return ids, [unit_of(row) if isinstance(row, int) else row.unit for row in rows]


def parts_by(keys: Iterable[K]) -> dict[K, list[int]]:
    """Return the indices of equal ``keys``, by key."""
    parts: dict[K, list[int]] = {}
    for index, key in enumerate(keys):
        parts.setdefault(key, []).append(index)
    return parts


async def scatter(keys: Iterable[K], call: Callable[[Sequence[int]], Coroutine[Any, Any, list[T]]]) -> list[T]:
    """Await ``call`` with the indices of equal ``keys``, and return the answers, one for each index, in order."""
    parts = parts_by(keys).values()
    return in_order(zip(parts, await together(call(indices) for indices in parts), strict=True))


def check_rows(columns: Mapping[str, Jagged], tags: Tags | None, *, rows: int) -> None:
    """Refuse columns, or tags, of another number of rows."""
    for name, column in columns.items():
        if len(column) != rows:
            hint = "Give each column a value for every row"
            raise Refused(f"column {name} has {len(column)} rows, not {rows}", where="queue client", hint=hint)
    if tags is not None and len(tags) != rows:
        raise Refused(f"{rows} rows came with {len(tags)} sets of tags", where="queue client", hint="Give one a row")


def encoded(columns: Mapping[str, Jagged], indices: Sequence[int], *, rows: int) -> tuple[BatchHeader, list[Buffer]]:
    """Return header and frames of the rows ``indices`` of ``columns``, which have ``rows`` rows each."""
    if not columns:
        return BatchHeader(rows=len(indices), columns=[]), []
    whole = len(indices) == rows
    return encode_batch(columns if whole else {name: column.take(indices) for name, column in columns.items()})


def in_order(parts: Iterable[tuple[Sequence[int], Sequence[T]]]) -> list[T]:
    """Return the answers for rows that are named by their indices, by index."""
    made: dict[int, T] = {}
    for indices, answers in parts:
        made.update(zip(indices, answers, strict=True))
    return [made[index] for index in range(len(made))]
