"""One open partition with users' values: put, read, write, claim and complete plain arrays, tensors, texts and objects.

Invariant: what is read equals what was put, in the order of the rows or keys that were asked for; nothing is left out.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from asyncflow.errors import Refused, StaleHandle
from asyncflow.queue.client import QueueClient, check_once
from asyncflow.queue.peers import Tags, check_rows, left, now
from asyncflow.queue.protocol import calls
from asyncflow.queue.protocol.messages import Found, LeasedRow, Listing, PeekedRows, Progress, Tag, TaskSpec
from asyncflow.queue.values import Values, decode, decode_torch, encode_columns
from asyncflow.rpc.columns import Jagged

TIMEOUT_S = 60.0


class Partition:
    """The partition ``name`` as one client sees it. tensors: return arrays as torch tensors.

    Rows are named by their ids or by their keys. Timeouts are in seconds and for the whole of a method, which raises
    DeadlineExceeded where they were not enough.
    """

    def __init__(self, queue: QueueClient, name: str, *, tensors: bool = False) -> None:
        self.queue = queue
        self.name = name
        self._decode = decode_torch if tensors else decode

    async def declare(
        self,
        task: str,
        needs: Sequence[str],
        *,
        writes: Sequence[str] = (),
        groups: bool = False,
        clears: bool = False,
        lease_s: float = 60.0,
        timeout: float = TIMEOUT_S,
    ) -> None:
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
        await self.queue.declare([spec], timeout=timeout)

    async def put(
        self,
        columns: Mapping[str, Any],
        *,
        keys: Sequence[str] | None = None,
        tags: Tags | None = None,
        group_size: int = 1,
        timeout: float = TIMEOUT_S,
    ) -> list[int]:
        """Put rows, a value of each column for each, and return their ids. Waits for room.

        keys: name the rows; those whose key is known already are written instead. group_size: so many rows, one after
        another, belong together. Raises Refused for values that cannot be a column, or not that column.
        """
        made = encode_columns(columns)
        if keys is None:
            put = await self.queue.put(self.name, made, tags=tags, group_size=group_size, timeout=timeout)
            return put.rows
        if group_size != 1:
            hint = "Leave group_size at 1"
            raise Refused("rows with keys come one by one, not in groups", where=self.name, hint=hint)
        if wrong := [key for key in keys if not isinstance(key, str) or not key]:
            hint = "A key is a text of at least one character"
            raise Refused(f"{wrong[0]!r} cannot be the key of a row", where=self.name, hint=hint)
        check_once(keys, "key")
        check_rows(made, tags, rows=len(keys))
        return await self._put_by_key(keys, made, tags, deadline=now() + timeout)

    async def _put_by_key(
        self, keys: Sequence[str], columns: Mapping[str, Jagged], tags: Tags | None, *, deadline: float
    ) -> list[int]:
        """Put the keys that are new and write to the rows of the others, until each has a row."""
        rows, waiting = [0] * len(keys), list(range(len(keys)))

        def of(indices: Sequence[int]) -> dict[str, Any]:
            part = {name: column.take(indices) for name, column in columns.items()}
            return {"columns": part, "tags": [tags[i] for i in indices] if tags is not None else None}

        while waiting:
            names = [keys[i] for i in waiting]
            put = await self.queue.put(self.name, keys=names, **of(waiting), timeout=left(deadline))
            for index, row in zip(waiting, put.rows, strict=True):
                rows[index] = row
            known = [index for index, new in zip(waiting, put.new, strict=True) if not new]
            there = [index for index in known if rows[index]]
            waiting = [index for index in known if not rows[index]]
            try:
                await self.queue.write([rows[i] for i in there], **of(there), timeout=left(deadline))
            except StaleHandle:
                waiting = known
        return rows

    async def write(
        self,
        rows: Sequence[int] | Sequence[str],
        columns: Mapping[str, Any],
        *,
        tags: Tags | None = None,
        timeout: float = TIMEOUT_S,
    ) -> None:
        """Add columns to rows, or replace them; tags are merged. See ``QueueClient.write``."""
        deadline = now() + timeout
        ids = await self._ids(rows, timeout)
        await self.queue.write(ids, encode_columns(columns), tags=tags, timeout=left(deadline))

    async def tag(self, rows: Sequence[int] | Sequence[str], tags: Tags, *, timeout: float = TIMEOUT_S) -> None:
        """Merge ``tags`` into those of rows."""
        await self.write(rows, {}, tags=tags, timeout=timeout)

    async def get(
        self,
        rows: Sequence[LeasedRow] | Sequence[int] | Sequence[str],
        columns: Sequence[str],
        *,
        timeout: float = TIMEOUT_S,
    ) -> dict[str, Values]:
        """Return columns of rows, which may also be claimed ones, in that order.

        A column is one array where all rows have one shape, else a list; it is the caller's own. Raises StaleHandle for
        a row, key or column that is not there.
        """
        deadline = now() + timeout
        ids = await self._ids([row.row if isinstance(row, LeasedRow) else row for row in rows], timeout)
        found = await self.queue.fetch(ids, columns, timeout=left(deadline))
        return {name: self._decode(column) for name, column in found.items()}

    async def claim(self, task: str, max_rows: int, *, timeout: float = TIMEOUT_S) -> list[LeasedRow]:
        """Lease rows for a task, as ``QueueClient.claim`` does; none when the time is over or none will come."""
        return (await self.queue.claim(partition=self.name, task=task, max_rows=max_rows, timeout=timeout)).rows

    async def complete(
        self,
        rows: Sequence[LeasedRow],
        columns: Mapping[str, Any] | None = None,
        *,
        tags: Tags | None = None,
        timeout: float = TIMEOUT_S,
    ) -> list[bool]:
        """Write what the task writes, which acknowledges its rows; False where the lease had ended."""
        return await self.queue.complete(rows, encode_columns(columns or {}), tags=tags, timeout=timeout)

    async def keys(self, *, timeout: float = TIMEOUT_S) -> dict[str, dict[str, Tag]]:
        """Return the tags of every row that has a key, by key."""
        listing = await self.rows(timeout=timeout)
        return {key: tags for key, tags in zip(listing.keys, listing.tags, strict=True) if key}

    async def rows(self, *, timeout: float = TIMEOUT_S) -> Listing:
        """Return all rows with their keys and tags, in the order in which they were put."""
        return await self.queue.ask("open.list", calls.InPartition(self.name), Listing, timeout=timeout)

    async def peek(
        self, task: str = "", *, rows: Sequence[int] = (), most: int = 100, timeout: float = TIMEOUT_S
    ) -> PeekedRows:
        """Look at rows (at the first ``most`` if none are named) as ``task`` sees them, whoever has them."""
        request = calls.Peek(self.name, task, list(rows), most)
        return await self.queue.ask("open.peek", request, PeekedRows, timeout=timeout)

    async def reset(self, task: str | None = None, *, timeout: float = TIMEOUT_S) -> int:
        """Make every row ready again for a task, or all, also those that are held now; return how many it had."""
        request = calls.Reset(self.name, task)
        return await self.queue.ask("open.reset", request, int, timeout=timeout)

    async def expect(self, total: int, *, timeout: float = TIMEOUT_S) -> None:
        """Say how many rows will be put in all: when so many are there, consumers end as after ``close``."""
        await self.queue.ask("open.expect", calls.Expect(self.name, total), calls.Done, timeout=timeout)

    async def close(self, *, timeout: float = TIMEOUT_S) -> None:
        """Say that no more rows will be put: consumers end when they have had all. ``clear`` opens the partition again.

        Rows that are there may still be written, completed and cleared, and those that were lost put again.
        """
        await self.queue.close_partition(partition=self.name, step=0, timeout=timeout)

    async def produced(self, columns: Sequence[str], *, timeout: float = TIMEOUT_S) -> Progress:
        """Return how many rows have all of ``columns``."""
        request = calls.AskProgress(self.name, list(columns), "")
        return await self.queue.ask("open.progress", request, Progress, timeout=timeout)

    async def consumed(self, task: str, *, timeout: float = TIMEOUT_S) -> Progress:
        """Return how many rows a task has completed."""
        return await self.queue.ask("open.progress", calls.AskProgress(self.name, [], task), Progress, timeout=timeout)

    async def clear(self, rows: Sequence[int] | Sequence[str] | None = None, *, timeout: float = TIMEOUT_S) -> int:
        """Forget rows (all by default) and free their bytes; return how many of the named ones were there."""
        if rows is None:
            await self.queue.clear_partition(partition=self.name, timeout=timeout)
            return 0
        deadline = now() + timeout
        keys, ids = self._named(rows)
        if keys:
            ids += [row for row in (await self._find(keys, timeout)).rows if row]
        request = calls.ClearRows(self.name, ids)
        return await self.queue.ask("open.clear", request, int, timeout=left(deadline))

    async def _ids(self, rows: Sequence[int | str], timeout: float) -> list[int]:
        """Return the ids of rows that may be named by their keys.

        Raises StaleHandle where a key has no row, or has lost it with a unit.
        """
        keys, ids = self._named(rows)
        if not keys:
            return ids
        if ids:
            raise Refused("rows are named by ids or by keys, not both at once", where=self.name)
        found = await self._find(keys, timeout)
        if found.lost:
            words = f"the row of {_listed(found.lost)} was lost with its storage unit"
            raise StaleHandle(words, where=self.name, hint="Put it again under that key")
        if missing := [key for key, row in zip(keys, found.rows, strict=True) if not row]:
            gone = f", or lost with a storage unit, as {found.unnamed} rows were" if found.unnamed else ""
            hint = f"It was never put, or was cleared{gone}; keys() tells which there are"
            raise StaleHandle(f"no row has the {_listed(missing)}", where=self.name, hint=hint)
        return found.rows

    async def _find(self, keys: list[str], timeout: float) -> Found:
        return await self.queue.ask("open.find", calls.FindRows(self.name, keys), Found, timeout=timeout)

    def _named(self, rows: Iterable[int | str]) -> tuple[list[str], list[int]]:
        """Return the keys among ``rows``, and the ids. Raises Refused for what is neither."""
        keys: list[str] = []
        ids: list[int] = []
        for row in rows:
            if isinstance(row, str):
                keys.append(row)
                continue
            try:
                ids.append(operator.index(row))
            except TypeError:
                hint = "Give ids, as put returned them, or keys"
                raise Refused(f"{row!r} names no row", where=self.name, hint=hint) from None
        return keys, ids


def _listed(keys: Sequence[str]) -> str:
    """Name a few keys: ``key 'a', 'b' and 3 others``."""
    more = f" and {len(keys) - 8} others" if len(keys) > 8 else ""
    return f"key {', '.join(map(repr, keys[:8]))}{more}"
