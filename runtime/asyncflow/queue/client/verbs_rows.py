"""The verbs that move rows: control goes to the controller, columns go straight to the units.

Every verb survives the restart of whomever it talks to. What cannot survive, rows on a unit that died, says so: writes
are fenced, reads raise StaleHandle.

Invariant: all rows of one prompt go to one unit; a row is found wherever it lies (``routing``); columns come back in
the order of the rows asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from asyncflow.errors import StaleHandle
from asyncflow.identity import unit_of
from asyncflow.net.frames import BatchHeader, Jagged, decode_batch, encode_batch
from asyncflow.queue.client.claiming import Claimer
from asyncflow.queue.client.creation import Creator
from asyncflow.queue.client.placement import Placement
from asyncflow.queue.client.putting import Putter
from asyncflow.queue.client.routing import at_homes
from asyncflow.queue.client.scatter import join, part_of, repeated, spread_out
from asyncflow.queue.client.verbs import Ask, Clock, Verb, scatter, shard
from asyncflow.queue.client.verbs_control import ControlVerbs
from asyncflow.queue.protocol import calls, unit_calls
from asyncflow.queue.protocol.lot import Lot
from asyncflow.queue.protocol.messages import KEY_TAG, LeasedRow, RowMeta, StagedRow, Tag
from asyncflow.queue.protocol.runs import shrink
from asyncflow.queue.protocol.shard_calls import controller_of

_MOST = 1 << 40
_EMPTY = BatchHeader(rows=0, columns=[])

Rows: TypeAlias = Lot | Sequence[LeasedRow | StagedRow | int]
"""Rows to read: by their ids, or as they were given to their holder."""


class RowVerbs(ControlVerbs):
    """All verbs of one client; see ``ControlVerbs`` for the arguments."""

    def __init__(
        self, *, units: Callable[[], Sequence[int]], worker: str, attempt: int = 0, clock: Clock = time.monotonic
    ) -> None:
        super().__init__(units=units, worker=worker, attempt=attempt, clock=clock)
        placement = Placement(units=units, clock=clock)
        self._creator = Creator(placement=placement, worker=worker, attempt=attempt, clock=clock)
        self._putter = Putter(placement=placement, worker=worker, clock=clock)
        self._claimer = Claimer(self)

    def create(
        self,
        metas: Sequence[RowMeta],
        columns: Mapping[str, Jagged],
        *,
        group_size: int,
        outputs: Mapping[str, int] | None = None,
        timeout: float,
    ) -> Verb[list[bool]]:
        """Create samples, whole groups of ``group_size`` at a time, with their first columns (one row for each meta).

        outputs: most bytes of each column that a sample gets later; it is taken in only with room for them too. False
        for a sample that exists or existed already; one that is wanted is created again. Waits for room. Raises
        Refused for a group that is not whole, or columns that do not fit the partition's; Fenced where a newer attempt
        of this creator has taken over.
        """
        return self._creator.create(metas, columns, group_size=group_size, outputs=outputs or {}, timeout=timeout)

    def put(
        self,
        partition: str,
        columns: Mapping[str, Jagged],
        *,
        keys: Sequence[str] | None = None,
        tags: Sequence[Mapping[str, Tag]] | None = None,
        group_size: int = 1,
        outputs: Mapping[str, int] | None = None,
        timeout: float,
    ) -> Verb[unit_calls.Numbers]:
        """Put rows into an open partition, ``group_size`` of them a group; give their ids in their order.

        keys: names of the rows, unique in the partition: a row whose key is there already is left as it is, and
        ``Numbers.new`` says so; outputs: most bytes of each column that a row gets later, kept free for it. Waits for
        room. All rows are put, on one unit, or none. Raises Refused for columns that do not fit the partition's, and
        for more than 960 MiB, 1,048,576 rows, or what no unit holds.
        """
        if keys is not None:
            tags = [{**tag, KEY_TAG: key} for tag, key in zip(tags or [{}] * len(keys), keys, strict=True)]
        return self._putter.put(
            partition, columns, tags=tags, group_size=group_size, outputs=outputs or {}, timeout=timeout
        )

    def claim(
        self,
        *,
        partition: str,
        task: str,
        max_rows: int,
        timeout: float,
        version: int | None = None,
        accept: Sequence[int] = (),
        max_groups: int | None = None,
        ticket: str = "",
    ) -> Verb[list[LeasedRow]]:
        """Lease up to ``max_rows`` rows (at least one group where the task takes groups), waiting until one is ready.

        version: step of the weights that the caller has; accept: further steps that it could load. Gives rows of the
        first kind if there are any, else of the second, never both; none when the time is over or nothing will come.
        ticket: a name for ``withdraw`` that the caller gives to no other claim.

        Raises DeadlineExceeded where the controller has not answered ``GRACE_S`` after that time.
        """
        named = ticket or self._claimer.ticket()
        request = calls.ClaimRows(
            partition, task, self.worker, named, max_rows, max_groups, version, list(accept), wait_s=0.0
        )
        return (yield from self._claimer.claim(request, timeout=timeout)).rows

    def withdraw(self, ticket: str, *, partition: str, task: str, timeout: float) -> Verb[None]:
        """Have the claim ``ticket`` end now: with the rows that it was granted already, or without any.

        Unlike a claim that is cancelled, it gives no rows back that somebody just got.
        """
        request = calls.Withdraw(self.worker, ticket)
        return self._claimer.withdraw(request, partition=partition, task=task, timeout=timeout)

    def claim_or_end(
        self, *, partition: str, task: str, max_rows: int, until_done: bool = False, timeout: float
    ) -> Verb[calls.Claimed]:
        """Do as ``claim`` for a task without versions, and tell whether a closed partition has nothing more for it.

        until_done: it has not as long as others hold rows of the task, which may come back.
        """
        ticket = self._claimer.ticket()
        request = calls.ClaimRows(
            partition, task, self.worker, ticket, max_rows, None, None, [], wait_s=0.0, until_done=until_done
        )
        return self._claimer.claim(request, timeout=timeout)

    def claim_lot(
        self,
        *,
        partition: str,
        task: str,
        max_rows: int,
        min_rows: int = 1,
        max_tokens: int = 0,
        done: Sequence[str] = (),
        timeout: float,
    ) -> Verb[calls.Claimed]:
        """Do as ``claim_or_end``, giving the rows column by column; None when the time is over or nothing will come.

        min_rows: that many or none; max_tokens: most tokens of all rows, 0 for any number; done: leases of a task that
        writes nothing, whose rows are acknowledged herewith (``late`` names those that were not in force any more).
        """
        ticket = self._claimer.ticket()
        request = calls.ClaimRows(
            partition, task, self.worker, ticket, max_rows, None, None, [], 0.0, list(done), min_rows, max_tokens
        )
        return self._claimer.claim(request, timeout=timeout)

    def acknowledge(self, leases: Sequence[str], *, timeout: float) -> Verb[list[bool]]:
        """Complete all rows of leases of tasks that write nothing; False where a lease was not in force any more."""
        return self._claimer.acknowledge(leases, timeout=timeout)

    def fetch(self, rows: Rows, columns: Sequence[str], *, timeout: float) -> Verb[dict[str, Jagged]]:
        """Return ``columns`` of ``rows`` in the order given, with one call a unit; for no rows, empty ones (int64).

        The arrays are writable and the caller's own.

        Raises StaleHandle for a row that was cleared or lost, Refused for more than 1 GiB of one unit.
        """
        asked, homes = located(rows)
        if not asked:
            return {name: Jagged.from_rows([], "int64") for name in columns}
        lies = dict(zip(asked, homes, strict=True))
        numbers = list(lies)

        def get(unit: int, indices: Sequence[int], seconds: float) -> Verb[dict[str, Jagged]]:
            mine = numbers if len(indices) == len(numbers) else [numbers[i] for i in indices]
            request = unit_calls.FetchRows(shrink(mine), list(columns))
            reply, frames = yield Ask(unit, "unit.fetch", request, unit_calls.Fetched, seconds)
            return decode_batch(reply.header, frames, max_bytes=_MOST)

        parts = yield from at_homes(self, numbers, list(lies.values()), get, what="fetching rows", timeout=timeout)
        if lost := [numbers[i] for indices, got in parts if got is None for i in indices]:
            hint = "It was cleared, or was lost with its unit; a job makes a lost sample again, others put it again"
            raise StaleHandle(f"row {lost[0]} is not there, with {len(lost) - 1} others", where="fetch", hint=hint)
        once = join([got for _, got in parts if got is not None], [indices for indices, _ in parts])
        return once if len(numbers) == len(asked) else repeated(once, numbers, asked)

    def complete(
        self,
        rows: Lot | Sequence[LeasedRow],
        columns: Mapping[str, Jagged],
        *,
        tags: Sequence[Mapping[str, Tag]] | None = None,
        timeout: float,
    ) -> Verb[list[bool]]:
        """Write the outputs of leased rows, which acknowledges them; tags are merged into the rows' own.

        False where the lease has ended or the row is gone: nothing was changed. Waits for room.
        """
        return self._write(rows, columns, tags=tags, reason="", timeout=timeout)

    def give_back(
        self,
        rows: Sequence[LeasedRow],
        *,
        reason: str,
        columns: Mapping[str, Jagged] | None = None,
        timeout: float,
    ) -> Verb[list[bool]]:
        """Return leased rows back, ready with attempt + 1. columns: what there is so far, kept for the next holder."""
        if columns:
            return self._write(rows, columns, tags=None, reason=reason or "given back", timeout=timeout)
        return self._end(rows, reason=reason or "given back", drop=False, timeout=timeout)

    def drop(self, rows: Sequence[LeasedRow], *, reason: str, timeout: float) -> Verb[list[bool]]:
        """Return leased rows up for ever; they count as filtered if ``reason`` begins so, else as dropped."""
        return self._end(rows, reason=reason, drop=True, timeout=timeout)

    def _write(
        self,
        rows: Lot | Sequence[LeasedRow],
        columns: Mapping[str, Jagged],
        *,
        tags: Sequence[Mapping[str, Tag]] | None,
        reason: str,
        timeout: float,
    ) -> Verb[list[bool]]:
        numbers, homes = located(rows)
        leases = () if isinstance(rows, Lot) else [row.lease for row in rows]

        def send(unit: int, indices: Sequence[int], seconds: float) -> Verb[list[bool]]:
            header, frames = encode_batch(part_of(columns, indices, len(numbers))) if columns else (_EMPTY, [])
            request = unit_calls.WriteRows(
                lease=rows.lease if isinstance(rows, Lot) else leases[indices[0]],
                rows=shrink([numbers[i] for i in indices]),
                header=header,
                tags=[dict(tags[i]) for i in indices] if tags is not None else [],
                reason=reason,
                wait_s=0.9 * seconds,
                producer=self.worker,
            )
            verdicts: calls.Verdicts
            verdicts, _ = yield Ask(unit, "unit.write", request, calls.Verdicts, seconds, frames)
            return verdicts.ok

        parts = yield from at_homes(self, numbers, homes, send, apart=leases, what="writing rows", timeout=timeout)
        return spread_out(parts, len(numbers), False)

    def _end(self, rows: Sequence[LeasedRow], *, reason: str, drop: bool, timeout: float) -> Verb[list[bool]]:
        def send(indices: Sequence[int]) -> Verb[list[bool]]:
            lease = rows[indices[0]].lease
            request = calls.EndRows(lease, shrink([rows[i].row for i in indices]), reason, drop)
            peer = shard(controller_of(lease))
            return (yield from self.ask("queue.end", request, calls.Verdicts, timeout=timeout, peer=peer)).ok

        return scatter((row.lease for row in rows), send)


def located(rows: Rows) -> tuple[list[int], list[int]]:
    """Return the ids of rows, and the unit of each as their holder was told it, or as its id says."""
    if isinstance(rows, Lot):
        return rows.rows, rows.homes
    numbers = [row if isinstance(row, int) else row.row for row in rows]
    return numbers, [unit_of(row) if isinstance(row, int) else row.unit for row in rows]
