"""One open partition with users' values: put, read, write, claim and complete plain arrays, tensors, texts and objects.

``OpenPartition`` awaits, ``BlockingPartition`` blocks; both do what ``PartitionVerbs`` says.

Invariant: what is read equals what was put, in the order of the rows or keys that were asked for; nothing is left out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from asyncflow.errors import Refused
from asyncflow.queue.client.blocking import BlockingQueue
from asyncflow.queue.client.client import QueueClient
from asyncflow.queue.client.open_values import Values, decode, decode_torch, encode_columns
from asyncflow.queue.client.open_verbs import OpenVerbs
from asyncflow.queue.client.verbs import Verb, left_of
from asyncflow.queue.protocol.messages import LeasedRow, Tag, TaskSpec
from asyncflow.queue.protocol.open_calls import Listing, Progress, Sight

P = ParamSpec("P")
T = TypeVar("T")
Tags = Sequence[Mapping[str, Tag]]

TIMEOUT_S = 60.0


class PartitionVerbs:
    """The verbs of one client about the partition ``name``. tensors: give arrays back as torch tensors.

    verbs: returns those of the client, which are others in a process that was forked. Timeouts are in seconds and for
    the whole of a verb; DeadlineExceeded where they were not enough.
    """

    def __init__(self, verbs: Callable[[], OpenVerbs], name: str, *, tensors: bool = False) -> None:
        self.name = name
        self._verbs_now = verbs
        self._decode: Callable[..., Values] = decode_torch if tensors else decode

    @property
    def _verbs(self) -> OpenVerbs:
        return self._verbs_now()

    def declare(
        self,
        task: str,
        needs: Sequence[str],
        *,
        writes: Sequence[str] = (),
        groups: bool = False,
        clears: bool = False,
        lease_s: float = 60.0,
        timeout: float = TIMEOUT_S,
    ) -> Verb[None]:
        """Make a task known, a consumer of all rows that have the columns ``needs``; see ``TaskSpec``."""
        spec = TaskSpec(
            partition=self.name,
            name=task,
            needs=list(needs),
            writes=list(writes),
            groups=groups,
            clears=clears,
            lease_s=lease_s,
        )
        return self._verbs.declare([spec], timeout=timeout)

    def put(
        self,
        columns: Mapping[str, Any],
        *,
        keys: Sequence[str] | None = None,
        tags: Tags | None = None,
        group_size: int = 1,
        timeout: float = TIMEOUT_S,
    ) -> Verb[list[int]]:
        """Put rows, a value of each column for each; give their ids. Waits for room.

        keys: name the rows; those whose key is known already are written instead. group_size: so many rows, one after
        another, belong together. Raises Refused for values that cannot be a column, or not that column.
        """
        made = encode_columns(columns)
        if keys is None:
            return (yield from self._verbs.put(self.name, made, tags=tags, group_size=group_size, timeout=timeout)).rows
        if group_size != 1:
            raise Refused(
                "rows with keys come one by one, not in groups", where=self.name, hint="Leave group_size at 1"
            )
        return (yield from self._verbs.put_keyed(self.name, keys, made, tags=tags, timeout=timeout))

    def write(
        self,
        rows: Sequence[int] | Sequence[str],
        columns: Mapping[str, Any],
        *,
        tags: Tags | None = None,
        timeout: float = TIMEOUT_S,
    ) -> Verb[None]:
        """Add columns to rows (ids or keys), or replace them; tags are merged. See ``OpenVerbs.write``."""
        deadline = self._verbs.clock() + timeout
        ids = yield from self._ids(rows, timeout)
        left_s = left_of(deadline, self._verbs.clock)
        yield from self._verbs.write(ids, encode_columns(columns), tags=tags, timeout=left_s)

    def tag(self, rows: Sequence[int] | Sequence[str], tags: Tags, *, timeout: float = TIMEOUT_S) -> Verb[None]:
        """Merge ``tags`` into those of rows (ids or keys)."""
        return self.write(rows, {}, tags=tags, timeout=timeout)

    def get(
        self,
        rows: Sequence[LeasedRow] | Sequence[int] | Sequence[str],
        columns: Sequence[str],
        *,
        timeout: float = TIMEOUT_S,
    ) -> Verb[dict[str, Values]]:
        """Return columns of rows (claimed ones, ids or keys), in that order.

        A column is one array where all rows have one shape, else a list; it is the caller's own. Raises StaleHandle for
        a row, key or column that is not there.
        """
        deadline = self._verbs.clock() + timeout
        ids = yield from self._ids([row.row if isinstance(row, LeasedRow) else row for row in rows], timeout)
        left_s = left_of(deadline, self._verbs.clock)
        found = yield from self._verbs.fetch(ids, columns, timeout=left_s)
        return {name: self._decode(column) for name, column in found.items()}

    def claim(self, task: str, max_rows: int, *, timeout: float = TIMEOUT_S) -> Verb[list[LeasedRow]]:
        """Lease rows for a task, waiting until one is ready; none when the time is over. See ``RowVerbs.claim``."""
        return self._verbs.claim(partition=self.name, task=task, max_rows=max_rows, timeout=timeout)

    def complete(
        self,
        rows: Sequence[LeasedRow],
        columns: Mapping[str, Any] | None = None,
        *,
        tags: Tags | None = None,
        timeout: float = TIMEOUT_S,
    ) -> Verb[list[bool]]:
        """Write what the task writes, which acknowledges its rows; False where the lease had ended."""
        return self._verbs.complete(rows, encode_columns(columns or {}), tags=tags, timeout=timeout)

    def keys(self, *, timeout: float = TIMEOUT_S) -> Verb[dict[str, dict[str, Tag]]]:
        """Return the tags of every row that has a key, by key."""
        listing = yield from self.rows(timeout=timeout)
        return {key: tags for key, tags in zip(listing.keys, listing.tags, strict=True) if key}

    def rows(self, *, timeout: float = TIMEOUT_S) -> Verb[Listing]:
        """Return all rows with their keys and tags."""
        return self._verbs.list_rows(self.name, timeout=timeout)

    def peek(
        self, task: str = "", *, rows: Sequence[int] = (), most: int = 100, timeout: float = TIMEOUT_S
    ) -> Verb[Sight]:
        """Look at rows as a task sees them; see ``OpenVerbs.peek``."""
        return self._verbs.peek(self.name, task=task, rows=rows, most=most, timeout=timeout)

    def reset(self, task: str | None = None, *, timeout: float = TIMEOUT_S) -> Verb[int]:
        """Let a task, or all, have every row again."""
        return self._verbs.reset(self.name, task=task, timeout=timeout)

    def expect(self, total: int, *, timeout: float = TIMEOUT_S) -> Verb[None]:
        """Say how many rows will be put in all: when so many are there, consumers end as after ``close``."""
        return self._verbs.expect(self.name, total, timeout=timeout)

    def close(self, *, timeout: float = TIMEOUT_S) -> Verb[None]:
        """Say that no more rows will be put: consumers end when they have had all. ``clear`` opens the partition again.

        Rows that are there may still be written, completed and cleared, and those that were lost put again.
        """
        return self._verbs.close_partition(partition=self.name, step=0, timeout=timeout)

    def produced(self, columns: Sequence[str], *, timeout: float = TIMEOUT_S) -> Verb[Progress]:
        """Return how many rows have all of ``columns``."""
        return self._verbs.produced(self.name, columns, timeout=timeout)

    def consumed(self, task: str, *, timeout: float = TIMEOUT_S) -> Verb[Progress]:
        """Return how many rows a task has completed."""
        return self._verbs.consumed(self.name, task, timeout=timeout)

    def clear(self, rows: Sequence[int] | Sequence[str] | None = None, *, timeout: float = TIMEOUT_S) -> Verb[None]:
        """Forget rows (ids or keys; all by default) and free their bytes; those that are not there are passed over."""
        if rows is None:
            yield from self._verbs.clear_partition(partition=self.name, timeout=timeout)
            return
        deadline = self._verbs.clock() + timeout
        names, ids = self._named(rows)
        if names:
            ids += [row for row in (yield from self._verbs.find(self.name, names, timeout=timeout)) if row]
        yield from self._verbs.clear_rows(self.name, ids, timeout=left_of(deadline, self._verbs.clock))

    def _ids(self, rows: Sequence[int | str], timeout: float) -> Verb[list[int]]:
        """Return the ids of rows that may be named by their keys. Raises StaleHandle where a key is unknown."""
        names, ids = self._named(rows)
        if not names:
            return ids
        if ids:
            raise Refused("rows are named by ids or by keys, not both at once", where=self.name)
        return (yield from self._verbs.rows_of(self.name, names, timeout=timeout))

    def _named(self, rows: Iterable[int | str]) -> tuple[list[str], list[int]]:
        """Return the keys among ``rows``, and the ids. Raises Refused for what is neither."""
        names: list[str] = []
        ids: list[int] = []
        for row in rows:
            if isinstance(row, str):
                names.append(row)
                continue
            try:
                ids.append(operator.index(row))
            except TypeError:
                hint = "Give ids, as put returned them, or keys"
                raise Refused(f"{row!r} names no row", where=self.name, hint=hint) from None
        return names, ids


def _awaited(
    verb: Callable[Concatenate[PartitionVerbs, P], Verb[T]],
) -> Callable[Concatenate[OpenPartition, P], Coroutine[Any, Any, T]]:
    @wraps(verb)
    async def run(partition: OpenPartition, /, *args: P.args, **options: P.kwargs) -> T:
        return await partition.queue.run(verb(partition.verbs, *args, **options))

    return run


def _blocking(
    verb: Callable[Concatenate[PartitionVerbs, P], Verb[T]],
) -> Callable[Concatenate[BlockingPartition, P], T]:
    @wraps(verb)
    def run(partition: BlockingPartition, /, *args: P.args, **options: P.kwargs) -> T:
        return partition.queue.run(verb(partition.verbs, *args, **options))

    return run


class OpenPartition:
    """A partition for whoever awaits; see ``PartitionVerbs``."""

    def __init__(self, queue: QueueClient, name: str, *, tensors: bool = False) -> None:
        self.queue = queue
        self.verbs = PartitionVerbs(lambda: queue.verbs, name, tensors=tensors)

    declare = _awaited(PartitionVerbs.declare)
    put = _awaited(PartitionVerbs.put)
    write = _awaited(PartitionVerbs.write)
    tag = _awaited(PartitionVerbs.tag)
    get = _awaited(PartitionVerbs.get)
    claim = _awaited(PartitionVerbs.claim)
    complete = _awaited(PartitionVerbs.complete)
    keys = _awaited(PartitionVerbs.keys)
    rows = _awaited(PartitionVerbs.rows)
    peek = _awaited(PartitionVerbs.peek)
    reset = _awaited(PartitionVerbs.reset)
    expect = _awaited(PartitionVerbs.expect)
    close = _awaited(PartitionVerbs.close)
    produced = _awaited(PartitionVerbs.produced)
    consumed = _awaited(PartitionVerbs.consumed)
    clear = _awaited(PartitionVerbs.clear)


class BlockingPartition:
    """A partition for whoever blocks; see ``PartitionVerbs``."""

    def __init__(self, queue: BlockingQueue, name: str, *, tensors: bool = False) -> None:
        self.queue = queue
        self.verbs = PartitionVerbs(lambda: queue.verbs, name, tensors=tensors)

    declare = _blocking(PartitionVerbs.declare)
    put = _blocking(PartitionVerbs.put)
    write = _blocking(PartitionVerbs.write)
    tag = _blocking(PartitionVerbs.tag)
    get = _blocking(PartitionVerbs.get)
    claim = _blocking(PartitionVerbs.claim)
    complete = _blocking(PartitionVerbs.complete)
    keys = _blocking(PartitionVerbs.keys)
    rows = _blocking(PartitionVerbs.rows)
    peek = _blocking(PartitionVerbs.peek)
    reset = _blocking(PartitionVerbs.reset)
    expect = _blocking(PartitionVerbs.expect)
    close = _blocking(PartitionVerbs.close)
    produced = _blocking(PartitionVerbs.produced)
    consumed = _blocking(PartitionVerbs.consumed)
    clear = _blocking(PartitionVerbs.clear)
