"""Rows of open partitions on their way to a storage unit: to one after another, until one has room.

Who puts does not number rows: a group is known by this client's name, 128 random bits, and its own count, and what got
no answer is put again under the same numbers, at the same unit or another, which the controller admits once.

Invariants: all rows of a put go to one unit in one message, so the controller admits them all at once or not at all; no
two clients have the same name.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence

from asyncflow.errors import Elsewhere, PeerLost, Refused
from asyncflow.net.frames import BatchHeader, Jagged, encode_batch
from asyncflow.net.rpc.wire import MAX_MESSAGE
from asyncflow.queue.client.patience import patience
from asyncflow.queue.client.placement import Placement
from asyncflow.queue.client.verbs import Ask, Clock, Verb, left_of, persist
from asyncflow.queue.protocol.messages import Tag
from asyncflow.queue.protocol.runs import MOST, expand
from asyncflow.queue.protocol.unit_calls import Numbers, PutRows

_MOST_BYTES = MAX_MESSAGE - (64 << 20)
"""Bytes of the columns of one put; the rest of its message is for their offsets and for tags."""


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
        nbytes = sum(column.nbytes for column in columns.values())
        if nbytes > _MOST_BYTES or rows > MOST:
            what = f"{rows} rows of {nbytes} bytes are more than one put takes: {MOST} rows and {_MOST_BYTES} bytes"
            raise Refused(what, where=partition, hint="Put fewer rows at a time")
        deadline = self._clock() + timeout
        if not self._placement.begun:
            yield from self._placement.begin()
        with self._lock:
            group, self._groups = self._groups, self._groups + rows // group_size
        header, frames = encode_batch(columns) if columns else (BatchHeader(rows=rows, columns=[]), [])
        told = [dict(tag) for tag in tags] if tags is not None else []
        tried: set[int] = set()

        def attempt() -> Verb[Numbers]:
            there = self._placement.there()
            if tried.issuperset(there):
                tried.clear()
            room_s, answer_s = patience(left_of(deadline, self._clock), nbytes=nbytes, others=len(there) > 1)
            request = PutRows(
                partition=partition,
                client=self._client,
                group=group,
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

        return (yield from persist(attempt, what=f"putting {rows} rows", timeout=timeout, clock=self._clock))


def _rows_of(columns: Mapping[str, Jagged]) -> int:
    counts = {len(column) for column in columns.values()}
    if len(counts) != 1:
        lengths = {name: len(column) for name, column in columns.items()}
        raise Refused(f"the columns of one batch differ in rows: {lengths}", where="queue client")
    return counts.pop()
