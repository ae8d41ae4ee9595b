"""Where rows lie, and calls to the storage units there: batches cut by unit, and the answers joined again.

Rows are looked for where their holder was told that they lie, or where their ids say; where they have moved, the
controller tells.

Invariants: each row is answered for once, by the unit where it lies, or is named among those that lie nowhere; answers
come in the order of what was asked, whatever the order of the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

from asyncflow.errors import Elsewhere, PeerLost, Refused, StaleHandle
from asyncflow.identity import unit_of
from asyncflow.queue.peers import Peer, Peers, left, now, together
from asyncflow.queue.protocol.batches import RowBatch
from asyncflow.queue.protocol.calls import NOWHERE, AskWhere
from asyncflow.queue.protocol.messages import LeasedRow, StagedRow, Tag
from asyncflow.queue.protocol.unit_calls import FetchRows, WriteRows
from asyncflow.rpc.columns import BatchHeader, Buffer, Jagged, decode_batch, encode_batch
from asyncflow.rpc.retry import retry_within

_MOST_BYTES = 1 << 40
_AWAY_S = 5.0
"""How long a unit that is away, or takes nothing new, is called before the controller is asked again."""

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
Rows: TypeAlias = RowBatch | Sequence[LeasedRow | StagedRow | int]
"""Rows by their ids, or as they were given to their holder."""
Tags: TypeAlias = Sequence[Mapping[str, Tag]]
"""Tags of rows, one mapping for each row."""
Part: TypeAlias = tuple[Sequence[int], T | None]
"""The indices of rows and the result of their call; None for rows that lie nowhere."""


async def fetch_cells(peers: Peers, rows: Rows, columns: Sequence[str], *, timeout: float) -> dict[str, Jagged]:
    """Return ``columns`` of ``rows``; see ``QueueClient.fetch``."""
    asked, units = located(rows)
    if not asked:
        return {name: Jagged.from_rows([], "int64") for name in columns}
    unit_of_row = dict(zip(asked, units, strict=True))
    once = list(unit_of_row)

    async def call(unit: int, indices: Sequence[int], seconds: float) -> dict[str, Jagged]:
        request = FetchRows([once[i] for i in indices], list(columns))
        header, frames = await peers.call(Peer("storage", unit), "unit.fetch", request, BatchHeader, timeout=seconds)
        return decode_batch(header, frames, max_bytes=_MOST_BYTES)

    parts = await call_where_they_lie(
        peers, once, list(unit_of_row.values()), call, what="fetching rows", timeout=timeout
    )
    if lost := [once[i] for indices, got in parts if got is None for i in indices]:
        hint = "It was cleared, or was lost with its unit; a job makes a lost sample again, others put it again"
        raise StaleHandle(f"row {lost[0]} is not there, with {len(lost) - 1} others", where="fetch", hint=hint)
    fetched = [got for _, got in parts if got is not None]
    joined = {name: Jagged.gather([(got[name], 0, len(got[name])) for got in fetched]) for name in columns}
    came = [once[i] for indices, _ in parts for i in indices]
    if came == asked:
        return joined
    places = {row: place for place, row in enumerate(came)}
    return {name: column.take([places[row] for row in asked]) for name, column in joined.items()}


async def write_cells(
    peers: Peers,
    rows: Rows,
    columns: Mapping[str, Jagged],
    *,
    lease: str = "",
    tags: Tags | None = None,
    reason: str = "",
    producer: str = "",
    timeout: float,
) -> list[bool]:
    """Write ``columns`` and ``tags`` to ``rows``, and return whether each was written.

    lease: for all rows, if not their own; reason: why they are returned unfinished, if they are; producer: whoever
    waits for room, in turn with others.
    """
    ids, units = located(rows)
    leases: list[str] = []
    if isinstance(rows, RowBatch):
        lease = rows.lease
    elif not lease:
        leases = [row.lease for row in rows if isinstance(row, LeasedRow)]

    async def call(unit: int, indices: Sequence[int], seconds: float) -> list[bool]:
        header, frames = encoded(part_of(columns, indices, len(ids)))
        request = WriteRows(
            lease=lease or leases[indices[0]],
            rows=[ids[i] for i in indices],
            header=header,
            tags=[dict(tags[i]) for i in indices] if tags is not None else [],
            reason=reason,
            wait_s=0.9 * seconds,
            producer=producer,
        )
        written, _ = await peers.call(
            Peer("storage", unit), "unit.write", request, list[bool], timeout=seconds, frames=frames
        )
        return written

    parts = await call_where_they_lie(peers, ids, units, call, apart=leases, what="writing rows", timeout=timeout)
    return in_order((indices, [False] * len(indices) if ok is None else ok) for indices, ok in parts)


async def call_where_they_lie(
    peers: Peers,
    rows: Sequence[int],
    units: Sequence[int],
    call: Callable[[int, Sequence[int], float], Coroutine[Any, Any, T]],
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

    async def at_all(parts: Iterable[tuple[int, Sequence[int]]]) -> list[Part[T]]:
        found = await together(
            retry_within(
                partial(attempt, unit, indices), what=f"{what} at {Peer('storage', unit)}", timeout=left(deadline)
            )
            for unit, indices in parts
        )
        return [part for parts_of_unit in found for part in parts_of_unit]

    async def attempt(unit: int, indices: Sequence[int], seconds: float) -> list[Part[T]]:
        there = unit in peers.units()
        if not there and (found := await ask_where(indices, seconds)).keys() != {unit}:
            return await spread(found)
        try:
            return [(indices, await call(unit, indices, seconds if there else min(_AWAY_S, seconds)))]
        except Elsewhere as moved:
            found = await ask_where(indices, left(deadline))
            if found.keys() == {unit}:
                raise PeerLost(f"rows are on their way: {moved}", where=f"storage unit {unit}") from moved
        return await spread(found)

    async def ask_where(indices: Sequence[int], seconds: float) -> dict[int, list[int]]:
        request = AskWhere([rows[index] for index in indices])
        places = parts_by(await peers.ask("queue.where", request, list[int], timeout=seconds))
        return {unit: [indices[place] for place in of_unit] for unit, of_unit in places.items()}

    async def spread(found: dict[int, list[int]]) -> list[Part[T]]:
        nowhere = found.pop(NOWHERE, None)
        parts = await at_all(found.items())
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


def part_of(columns: Mapping[str, Jagged], indices: Sequence[int], rows: int) -> dict[str, Jagged]:
    """Return the rows ``indices`` of ``columns``, which must have ``rows`` rows each (Refused otherwise)."""
    for name, column in columns.items():
        if len(column) != rows:
            raise Refused(f"column {name} has {len(column)} rows, not {rows}", where="queue client")
    return dict(columns) if len(indices) == rows else {name: column.take(indices) for name, column in columns.items()}


def encoded(columns: Mapping[str, Jagged], *, rows: int = 0) -> tuple[BatchHeader, list[Buffer]]:
    """Return the header and frames of ``columns``; rows: for the header of a batch without columns."""
    return encode_batch(columns) if columns else (BatchHeader(rows=rows, columns=[]), [])


def in_order(parts: Iterable[tuple[Sequence[int], Sequence[T]]]) -> list[T]:
    """Return the answers for rows that are named by their indices, by index."""
    made: dict[int, T] = {}
    for indices, answers in parts:
        made.update(zip(indices, answers, strict=True))
    return [made[index] for index in range(len(made))]
