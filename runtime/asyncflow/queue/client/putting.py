"""Rows of open partitions on their way to storage units: to one after another, where there is room.

Who puts does not number rows: a group is known by this client's name, 128 random bits, and its own count, and a part
that got no answer is put again under the same numbers, here or at another unit, which the controller admits once.

Invariant: a group goes to one unit, whole; no two clients have the same name.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence

from asyncflow.errors import Elsewhere, PeerLost, Refused
from asyncflow.net.frames import BatchHeader, Jagged, encode_batch
from asyncflow.queue.client.patience import patience
from asyncflow.queue.client.placement import Placement
from asyncflow.queue.client.verbs import Ask, Clock, Verb, left_of, persist, together
from asyncflow.queue.protocol.messages import Tag
from asyncflow.queue.protocol.runs import MOST, expand
from asyncflow.queue.protocol.unit_calls import Numbers, PutRows

_SPLIT_BYTES = 8 << 20
"""Bytes of a part below which splitting costs more than it brings: who fetches the rows joins them again."""
_MOST_BYTES = 64 << 20


class Putter:
    """Puts rows for one client; see ``RowVerbs.put``. placement: chooses the units."""

    def __init__(self, *, placement: Placement, worker: str, clock: Clock) -> None:
        self._placement = placement
        self._worker = worker
        self._clock = clock
        self._client = secrets.token_bytes(16)
        self._groups = 0
        self._lock = threading.Lock()

    def put(
        self,
        partition: str,
        columns: Mapping[str, Jagged],
        *,
        tags: Sequence[Mapping[str, Tag]] | None,
        group_size: int,
        outputs: Mapping[str, int],
        timeout: float,
    ) -> Verb[Numbers]:
        """Put rows; give their ids, in their order."""
        rows = _rows_of(columns) if columns else len(tags or ())
        if not rows or rows % group_size or (tags is not None and len(tags) != rows):
            what = f"{rows} rows with {rows if tags is None else len(tags)} sets of tags make no groups of {group_size}"
            raise Refused(what, where="queue client", hint="Give whole groups, and tags for all rows or none")
        groups, deadline = rows // group_size, self._clock() + timeout
        if not self._placement.begun:
            yield from self._placement.begin()
        with self._lock:
            group, self._groups = self._groups, self._groups + groups

        def part(start: int, stop: int, mine: Mapping[str, Jagged]) -> Verb[Numbers]:
            rows = (stop - start) * group_size
            header, frames = encode_batch(mine) if mine else (BatchHeader(rows=rows, columns=[]), [])
            told = [dict(tag) for tag in tags[start * group_size : stop * group_size]] if tags is not None else []
            nbytes = sum(map(len, frames))
            tried: set[int] = set()

            def attempt() -> Verb[Numbers]:
                there = self._placement.there()
                if tried.issuperset(there):
                    tried.clear()
                room_s, answer_s = patience(left_of(deadline, self._clock), nbytes=nbytes, others=len(there) > 1)
                request = PutRows(
                    partition=partition,
                    client=self._client,
                    group=group + start,
                    group_size=group_size,
                    header=header,
                    tags=told,
                    outputs=dict(outputs),
                    wait_s=room_s,
                    producer=self._worker,
                )
                unit = self._placement.choose(rows, there=there, but=tried)
                tried.add(unit)
                try:
                    numbers, _ = yield Ask(unit, "unit.put", request, Numbers, answer_s, frames)
                except Elsewhere as leaving:
                    self._placement.avoid(unit)
                    raise PeerLost(str(leaving), where=f"storage unit {unit}") from leaving
                return Numbers(list(expand(numbers.rows)), numbers.new)

            return persist(attempt, what=f"putting {rows} rows", timeout=timeout, clock=self._clock)

        nbytes = sum([column.nbytes for column in columns.values()])
        if nbytes < 2 * _SPLIT_BYTES and rows <= MOST:
            return (yield from part(0, groups, columns))
        spans = _spans(_cut(groups, nbytes, len(self._placement.there()), rows=rows))
        parts = yield from together([part(a, b, _run(columns, a * group_size, b * group_size)) for a, b in spans])
        return _joined(parts)


def _rows_of(columns: Mapping[str, Jagged]) -> int:
    counts = {len(column) for column in columns.values()}
    if len(counts) != 1:
        lengths = {name: len(column) for name, column in columns.items()}
        raise Refused(f"the columns of one batch differ in rows: {lengths}", where="queue client")
    return counts.pop()


def _cut(groups: int, nbytes: int, units: int, *, rows: int) -> list[int]:
    """Give the groups of each part: one part for each unit, where parts are worth it, and none too large."""
    most_groups = max(1, MOST // (rows // groups))
    parts = max(min(units, nbytes // _SPLIT_BYTES), -(-nbytes // _MOST_BYTES), -(-groups // most_groups))
    parts = min(parts, groups)
    return [groups // parts + (part < groups % parts) for part in range(parts)]


def _spans(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = 0
    for size in sizes:
        yield start, start + size
        start += size


def _run(columns: Mapping[str, Jagged], start: int, stop: int) -> Mapping[str, Jagged]:
    return {name: Jagged.gather([(column, start, stop)]) for name, column in columns.items()}


def _joined(parts: Sequence[Numbers]) -> Numbers:
    if len(parts) == 1:
        return parts[0]
    rows = [row for part in parts for row in part.rows]
    if not any(part.new for part in parts):
        return Numbers(rows)
    return Numbers(rows, [new for part in parts for new in part.new or [True] * len(part.rows)])
