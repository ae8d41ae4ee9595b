"""One open partition with users' values: put, read, write, claim and complete arrays, tensors, texts and objects.

Invariant: reading returns the values that were put, in the order of the given rows or keys, without omissions.
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

    Rows are named by their ids or by their keys. Timeouts are in seconds and apply to a whole method, which raises
    DeadlineExceeded when the time is over.
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
        """Declare a task, a consumer of all rows that have the columns ``needs``; see ``TaskSpec``."""
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
        """Put rows, with one value per row in each column, and return their ids. Waits for room.

        keys: names of the rows; existing rows with these keys are written instead. group_size: number of consecutive
        rows in a group. Raises Refused for values that cannot be a column, or do not fit that column.
        """
        encoded = encode_columns(columns)
        if keys is None:
            put = await self.queue.put(self.name, encoded, tags=tags, group_size=group_size, timeout=timeout)
            return put.rows
        if group_size != 1:
            hint = "Leave group_size at 1"
            raise Refused("rows with keys come one by one, not in groups", where=self.name, hint=hint)
        if wrong := [key for key in keys if not isinstance(key, str) or not key]:
            hint = "A key is a text of at least one character"
            raise Refused(f"{wrong[0]!r} cannot be the key of a row", where=self.name, hint=hint)
        check_once(keys, "key")
        check_rows(encoded, tags, rows=len(keys))
        return await self._put_by_key(keys, encoded, tags, deadline=now() + timeout)

    async def _put_by_key(
        self, keys: Sequence[str], columns: Mapping[str, Jagged], tags: Tags | None, *, deadline: float
    ) -> list[int]:
        """Put the rows with new keys and write to the existing rows, until each key has a row."""
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
            existing = [index for index in known if rows[index]]
            waiting = [index for index in known if not rows[index]]
            try:
                await self.queue.write([rows[i] for i in existing], **of(existing), timeout=left(deadline))
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
        """Add or replace columns of rows; tags are merged. See ``QueueClient.write``."""
        deadline = now() + timeout
        ids = await self._ids(rows, timeout)
        await self.queue.write(ids, encode_columns(columns), tags=tags, timeout=left(deadline))

    async def tag(self, rows: Sequence[int] | Sequence[str], tags: Tags, *, timeout: float = TIMEOUT_S) -> None:
        """Merge ``tags`` into the tags of rows."""
        await self.write(rows, {}, tags=tags, timeout=timeout)

    async def get(
        self,
        rows: Sequence[LeasedRow] | Sequence[int] | Sequence[str],
        columns: Sequence[str],
        *,
        timeout: float = TIMEOUT_S,
    ) -> dict[str, Values]:
        """Return columns of rows, which may be claimed ones, in the given order.

        A column is one array if all rows have one shape, otherwise a list; the caller owns it. Raises StaleHandle for a
        missing row or key, Refused for a missing column.
        """
        deadline = now() + timeout
        ids = await self._ids([row.row if isinstance(row, LeasedRow) else row for row in rows], timeout)
        found = await self.queue.fetch(ids, columns, timeout=left(deadline))
        return {name: self._decode(column) for name, column in found.items()}

    async def claim(self, task: str, max_rows: int, *, timeout: float = TIMEOUT_S) -> list[LeasedRow]:
        """Lease rows for a task, as ``QueueClient.claim`` does; none after a timeout or if no more will come."""
        return (await self.queue.claim(partition=self.name, task=task, max_rows=max_rows, timeout=timeout)).rows

    async def complete(
        self,
        rows: Sequence[LeasedRow],
        columns: Mapping[str, Any] | None = None,
        *,
        tags: Tags | None = None,
        timeout: float = TIMEOUT_S,
    ) -> list[bool]:
        """Write the task's columns, which acknowledges its rows; False for rows whose lease had ended."""
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
        """Describe rows (by default the first ``most``) as ``task`` sees them, including leased ones."""
        request = calls.Peek(self.name, task, list(rows), most)
        return await self.queue.ask("open.peek", request, PeekedRows, timeout=timeout)

    async def reset(self, task: str | None = None, *, timeout: float = TIMEOUT_S) -> int:
        """Make every row ready again for one task or all, including leased rows; return the number of affected rows."""
        request = calls.Reset(self.name, task)
        return await self.queue.ask("open.reset", request, int, timeout=timeout)

    async def expect(self, total: int, *, timeout: float = TIMEOUT_S) -> None:
        """Announce the total number of rows: once they exist, consumers end as after ``close``."""
        await self.queue.ask("open.expect", calls.Expect(self.name, total), calls.Done, timeout=timeout)

    async def close(self, *, timeout: float = TIMEOUT_S) -> None:
        """Declare that no more rows will be put: consumers end after the last row. ``clear`` opens the partition again.

        Existing rows may still be written, completed and cleared, and lost rows may be put again.
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
        """Forget rows (by default all) and free their bytes; return how many of the named rows existed."""
        if rows is None:
            await self.queue.clear_partition(partition=self.name, timeout=timeout)
            return 0
        deadline = now() + timeout
        keys, ids = self._named(rows)
        if keys:
            ids += [row for row in (await self._find(keys, timeout)).rows if row]
        return await self.queue.ask("open.clear", calls.ClearRows(self.name, ids), int, timeout=left(deadline))

    async def _ids(self, rows: Sequence[int | str], timeout: float) -> list[int]:
        """Return the ids of rows that may be named by their keys.

        Raises StaleHandle if a key has no row, or its row was lost with a unit.
        """
        keys, ids = self._named(rows)
        if not keys:
            return ids
        if ids:
            raise Refused("rows are named by ids or by keys, not by both", where=self.name, hint="Use one kind")
        found = await self._find(keys, timeout)
        if found.lost:
            what = f"the row of {_listed(found.lost)} was lost with its storage unit"
            raise StaleHandle(what, where=self.name, hint="Put it again under that key")
        if missing := [key for key, row in zip(keys, found.rows, strict=True) if not row]:
            lost = f", or lost with a storage unit, as {found.unnamed} rows were" if found.unnamed else ""
            hint = f"It was never put, or was cleared{lost}; keys() lists the existing ones"
            raise StaleHandle(f"no row has the {_listed(missing)}", where=self.name, hint=hint)
        return found.rows

    async def _find(self, keys: list[str], timeout: float) -> Found:
        return await self.queue.ask("open.find", calls.FindRows(self.name, keys), Found, timeout=timeout)

    def _named(self, rows: Iterable[int | str]) -> tuple[list[str], list[int]]:
        """Return the keys among ``rows``, and the ids. Raises Refused for other values."""
        keys: list[str] = []
        ids: list[int] = []
        for row in rows:
            if isinstance(row, str):
                keys.append(row)
                continue
            try:
                ids.append(operator.index(row))
            except TypeError:
                hint = "Pass ids, as put returned them, or keys"
                raise Refused(f"{row!r} names no row", where=self.name, hint=hint) from None
        return keys, ids


def _listed(keys: Sequence[str]) -> str:
    """List the first keys: ``key 'a', 'b' and 3 others``."""
    more = f" and {len(keys) - 8} others" if len(keys) > 8 else ""
    return f"key {', '.join(map(repr, keys[:8]))}{more}"
