"""The verbs for rows of open partitions, by their ids: written, tagged, found, looked at, taken again and cleared.

Ids are handles: they say where the row was put, are never used again, and one whose row is gone is refused, for
reading as for writing. Put, claim and complete are as for all rows (``RowVerbs``).

Invariant: a verb that names rows does what it says to all of them, or raises; no row is passed over in silence but by
``clear_rows``, for which one that is not there is as good as cleared.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Mapping, Sequence

from asyncflow.errors import Refused, StaleHandle
from asyncflow.identity import units_of
from asyncflow.net.frames import BatchHeader, Jagged, encode_batch
from asyncflow.queue.client.routing import at_homes
from asyncflow.queue.client.scatter import part_of, spread_out
from asyncflow.queue.client.verbs import Clock, Verb, left_of, once, together
from asyncflow.queue.client.verbs_rows import RowVerbs
from asyncflow.queue.protocol import calls, open_calls, unit_calls
from asyncflow.queue.protocol.messages import KEY_TAG, Tag
from asyncflow.queue.protocol.open_calls import WRITE, Found, Listing, Progress, Sight
from asyncflow.queue.protocol.runs import shrink
from asyncflow.queue.protocol.views import PartitionView

_NO_COLUMNS = BatchHeader(rows=0, columns=[])


class OpenVerbs(RowVerbs):
    """All verbs of one client; see ``ControlVerbs`` for the arguments."""

    def __init__(
        self, *, units: Callable[[], Sequence[int]], worker: str, attempt: int = 0, clock: Clock = time.monotonic
    ) -> None:
        super().__init__(units=units, worker=worker, attempt=attempt, clock=clock)
        self._writer = f"{WRITE}{uuid.uuid4().hex}-"
        self._writes = itertools.count()

    def write(
        self,
        rows: Sequence[int],
        columns: Mapping[str, Jagged],
        *,
        tags: Sequence[Mapping[str, Tag]] | None = None,
        timeout: float,
    ) -> Verb[None]:
        """Add columns to rows, or replace them there; tags are merged into the rows' own. Waits for room.

        Raises StaleHandle for a row that is not there, Refused for columns that do not fit the partition's; of the rows
        of one storage unit then none was written.
        """
        _check_once(rows, "row")
        _check_tags(tags, len(rows))
        if not rows:
            return
        writer = f"{self._writer}{next(self._writes)}"

        def send(unit: int, indices: Sequence[int], seconds: float) -> Verb[list[bool]]:
            header, frames = encode_batch(part_of(columns, indices, len(rows))) if columns else (_NO_COLUMNS, [])
            request = unit_calls.WriteRows(
                lease=writer,
                rows=shrink([rows[i] for i in indices]),
                header=header,
                tags=[dict(tags[i]) for i in indices] if tags is not None else [],
                reason="",
                wait_s=0.9 * seconds,
            )
            verdicts, _ = yield from once(unit, "unit.write", request, calls.Verdicts, timeout=seconds, frames=frames)
            return verdicts.ok

        homes = units_of(rows)
        parts = yield from at_homes(self, rows, homes, send, what="writing rows", timeout=timeout)
        written = spread_out(parts, len(rows), False)
        if gone := [row for row, ok in zip(rows, written, strict=True) if not ok]:
            raise StaleHandle(f"rows {gone} were lost with their unit", where="write", hint="Put them again")

    def tag(self, rows: Sequence[int], tags: Sequence[Mapping[str, Tag]], *, timeout: float) -> Verb[None]:
        """Merge ``tags`` into those of the rows; raises as ``write`` does."""
        return self.write(rows, {}, tags=tags, timeout=timeout)

    def put_keyed(
        self,
        partition: str,
        keys: Sequence[str],
        columns: Mapping[str, Jagged],
        *,
        tags: Sequence[Mapping[str, Tag]] | None = None,
        timeout: float,
    ) -> Verb[list[int]]:
        """Put rows by their keys: a new row for a new key, else the columns and tags are written to the one it has."""
        _check_keys(keys, partition)
        _check_tags(tags, len(keys))
        deadline, rows = self.clock() + timeout, [0] * len(keys)
        named = [{**(tags[i] if tags is not None else {}), KEY_TAG: key} for i, key in enumerate(keys)]
        left = list(range(len(keys)))
        while left:
            part, mine = part_of(columns, left, len(keys)), [named[i] for i in left]
            answer = yield from self.put(partition, part, tags=mine, timeout=left_of(deadline, self.clock))
            for index, row in zip(left, answer.rows, strict=True):
                rows[index] = row
            had = [index for index, new in zip(left, answer.new, strict=True) if not new] if answer.new else []
            left = yield from self._update(columns, had, rows, tags, len(keys), deadline)
        return rows

    def _update(
        self,
        columns: Mapping[str, Jagged],
        indices: Sequence[int],
        rows: Sequence[int],
        tags: Sequence[Mapping[str, Tag]] | None,
        count: int,
        deadline: float,
    ) -> Verb[list[int]]:
        """Write to rows whose keys were taken; give the indices of those that must be put again, their rows cleared."""
        there = [index for index in indices if rows[index]]
        merged = [tags[i] for i in there] if tags is not None else None
        try:
            part, numbers = part_of(columns, there, count), [rows[i] for i in there]
            yield from self.write(numbers, part, tags=merged, timeout=left_of(deadline, self.clock))
        except StaleHandle:
            return list(indices)
        return [index for index in indices if not rows[index]]

    def list_rows(self, partition: str, *, timeout: float) -> Verb[Listing]:
        """Return the rows of a partition with their keys and tags, in the order in which they were put."""
        return self.ask("open.list", open_calls.ListRows(partition), Listing, timeout=timeout)

    def list_all(self, *, timeout: float) -> Verb[dict[str, Listing]]:
        """Return those of every partition, by its name, each as it is when its turn comes."""
        deadline = self.clock() + timeout
        names = yield from self.partitions(timeout=timeout)
        left_s = left_of(deadline, self.clock)
        listings = yield from together(self.list_rows(name, timeout=left_s) for name in names)
        return dict(zip(names, listings, strict=True))

    def find(self, partition: str, keys: Sequence[str], *, timeout: float) -> Verb[list[int]]:
        """Return the rows with these keys, 0 where there is none."""
        return (yield from self._find(partition, keys, timeout=timeout)).rows

    def rows_of(self, partition: str, keys: Sequence[str], *, timeout: float) -> Verb[list[int]]:
        """Return the rows with these keys. Raises StaleHandle where one has none, or has lost it with a unit."""
        found = yield from self._find(partition, keys, timeout=timeout)
        if lost := found.lost:
            words = f"the row of {_listed('key', lost)} was lost with its storage unit"
            raise StaleHandle(words, where=partition, hint="Put it again under that key")
        if missing := [key for key, row in zip(keys, found.rows, strict=True) if not row]:
            gone = f", or lost with a storage unit, as {found.unnamed} rows were" if found.unnamed else ""
            hint = f"It was never put, or was cleared{gone}; list_rows tells which there are"
            raise StaleHandle(f"no row has the {_listed('key', missing)}", where=partition, hint=hint)
        return found.rows

    def _find(self, partition: str, keys: Sequence[str], *, timeout: float) -> Verb[Found]:
        return self.ask("open.find", open_calls.FindRows(partition, list(keys)), Found, timeout=timeout)

    def peek(
        self, partition: str, *, task: str = "", rows: Sequence[int] = (), most: int = 100, timeout: float
    ) -> Verb[Sight]:
        """Look at rows (at the first ``most`` if none are named) as ``task`` sees them, whoever has them."""
        request = open_calls.Peek(partition, task, list(rows), most)
        return self.ask("open.peek", request, Sight, timeout=timeout)

    def reset(self, partition: str, *, task: str | None = None, timeout: float) -> Verb[int]:
        """Let a task, or all tasks, have every row again, also those that are held now; give how many it had."""
        request = open_calls.Reset(partition, task)
        return (yield from self.ask("open.reset", request, open_calls.Counted, timeout=timeout)).rows

    def expect(self, partition: str, total: int, *, timeout: float) -> Verb[None]:
        """Say how many rows will be put in all: before that many are there, not all are produced or consumed."""
        yield from self.ask("open.expect", open_calls.Expect(partition, total), calls.Done, timeout=timeout)

    def produced(self, partition: str, columns: Sequence[str], *, timeout: float) -> Verb[Progress]:
        """Return how many rows have all of ``columns``."""
        return self.ask(
            "open.progress", open_calls.AskProgress(partition, list(columns), ""), Progress, timeout=timeout
        )

    def consumed(self, partition: str, task: str, *, timeout: float) -> Verb[Progress]:
        """Return how many rows a task has completed."""
        request = open_calls.AskProgress(partition, [], task)
        return self.ask("open.progress", request, Progress, timeout=timeout)

    def show(self, partition: str, *, timeout: float) -> Verb[PartitionView]:
        """Return how far the tasks of a partition are, and what they wait for."""
        return self.ask("queue.show", calls.InPartition(partition), PartitionView, timeout=timeout)

    def clear_rows(self, partition: str, rows: Sequence[int], *, timeout: float) -> Verb[int]:
        """Forget rows for ever and free their bytes; give how many were there."""
        request = open_calls.ClearRows(partition, list(rows))
        return (yield from self.ask("open.clear", request, open_calls.Counted, timeout=timeout)).rows

    def partitions(self, *, timeout: float) -> Verb[dict[str, int]]:
        """Return the partitions and how many rows each has."""
        told = yield from self.ask(
            "open.partitions", open_calls.ListPartitions(), open_calls.Partitions, timeout=timeout
        )
        return told.rows


def _listed(what: str, names: Sequence[str]) -> str:
    """Name a few in words: ``key 'a', 'b' and 3 others``."""
    more = f" and {len(names) - 8} others" if len(names) > 8 else ""
    return f"{what} {', '.join(map(repr, names[:8]))}{more}"


def _check_tags(tags: Sequence[Mapping[str, Tag]] | None, count: int) -> None:
    if tags is not None and len(tags) != count:
        raise Refused(f"{count} rows came with {len(tags)} sets of tags", where="queue client", hint="Give one a row")


def _check_keys(keys: Sequence[str], partition: str) -> None:
    if wrong := [key for key in keys if not isinstance(key, str) or not key]:
        hint = "A key is a text of at least one character"
        raise Refused(f"{wrong[0]!r} cannot be the key of a row", where=partition, hint=hint)
    _check_once(keys, "key")


def _check_once(names: Sequence[int] | Sequence[str], what: str) -> None:
    if len(set(names)) != len(names):
        twice = sorted({str(name) for name in names if list(names).count(name) > 1})[:8]
        raise Refused(f"{what} {', '.join(twice)} is named twice", where="queue client", hint=f"Name each {what} once")
