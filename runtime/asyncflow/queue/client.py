"""What all roles use to talk to the queue. Control goes to the controller, columns go straight to the units.

Every method has a deadline and survives the restart of whomever it talks to: calls that got no answer are made again,
which is safe (see ``calls``). What cannot survive, rows on a unit that died, says so: writes are fenced, reads raise
StaleHandle.

Invariant: all rows of one prompt go to one unit; columns come back in the order of the rows asked for.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence

import msgspec

from asyncflow.errors import AsyncFlowError
from asyncflow.net.frames import BatchHeader, Jagged, decode_batch, encode_batch
from asyncflow.net.keys import Keys
from asyncflow.net.membership import Membership
from asyncflow.net.rpc import persist
from asyncflow.queue import calls, unit_calls
from asyncflow.queue.control import GRACE_S, PARK_S, ControlClient, now
from asyncflow.queue.creation import Creator
from asyncflow.queue.messages import (
    LeasedRow,
    RowMeta,
    StagedRow,
    Tag,
)
from asyncflow.queue.scatter import join, part_of, parts_by, scatter, together

log = logging.getLogger(__name__)

_MOST = 1 << 40
_GOODBYE_S = 2.0
_EMPTY = BatchHeader(rows=0, columns=[])


class QueueClient(ControlClient):
    """One process's client.

    controller: the controller's address, or a function that gives it; unit: gives the address of the unit with an
    index; units: the indices of the units that are there; worker: who holds the leases (its incarnation); attempt: of
    the role, which creations carry (see ``take_over``); keys: the job's key. Timeouts are in seconds and for the whole
    of a method; DeadlineExceeded where they were not enough.
    """

    def __init__(
        self,
        *,
        controller: str | Callable[[], str | None],
        unit: Callable[[int], str | None],
        units: Callable[[], Sequence[int]],
        worker: str,
        attempt: int = 0,
        keys: Keys | None = None,
    ) -> None:
        super().__init__(controller=controller, unit=unit, units=units, worker=worker, attempt=attempt, keys=keys)
        self._creator = Creator(self._peers, attempt)
        self._ticket_base = uuid.uuid4().hex[:8]
        self._ticket_numbers = itertools.count()
        self._goodbyes: set[asyncio.Task[None]] = set()

    @classmethod
    def of(cls, membership: Membership, *, keys: Keys | None = None) -> QueueClient:
        """Make the client of a member of the job, which finds controller and units by its directory."""
        return cls(
            controller=lambda: membership.address("controller"),
            unit=lambda index: membership.address("storage", index),
            units=lambda: [member.index for member in membership.peers("storage")],
            worker=membership.member.incarnation,
            attempt=membership.member.attempt,
            keys=keys,
        )

    async def close(self) -> None:
        """Close all connections."""
        if self._goodbyes:
            await asyncio.wait(self._goodbyes)
        await super().close()

    async def create(
        self,
        metas: Sequence[RowMeta],
        columns: Mapping[str, Jagged],
        *,
        group_size: int,
        outputs: Mapping[str, int] | None = None,
        timeout: float,
    ) -> list[bool]:
        """Create samples, whole groups of ``group_size`` at a time, with their first columns (one row for each meta).

        outputs: most bytes of each column that a sample gets later; it is taken in only with room for them too. False
        for a sample that exists or existed already; one that is wanted is created again. Waits for room. Raises
        Refused for a group that is not whole, or columns that do not fit the partition's; Fenced where a newer attempt
        of this creator has taken over.
        """
        return await self._creator.create(metas, columns, group_size=group_size, outputs=outputs or {}, timeout=timeout)

    async def claim(
        self,
        *,
        partition: str,
        task: str,
        max_rows: int,
        timeout: float,
        version: int | None = None,
        accept: Sequence[int] = (),
        max_groups: int | None = None,
    ) -> list[LeasedRow]:
        """Lease up to ``max_rows`` rows (at least one group where the task takes groups), waiting until one is ready.

        version: step of the weights that the caller has; accept: further steps that it could load. Gives rows of the
        first kind if there are any, else of the second, never both; none when the time is over or nothing will come.
        """
        request = self._claim_rows(partition, task, max_rows, max_groups, version, accept)
        return (await self._claim(request, timeout)).rows

    async def claim_or_end(self, *, partition: str, task: str, max_rows: int, timeout: float) -> calls.Claimed:
        """Do as ``claim`` for a task without versions, and tell whether a closed partition has nothing more for it."""
        return await self._claim(self._claim_rows(partition, task, max_rows, None, None, ()), timeout)

    async def fetch(
        self, rows: Sequence[LeasedRow | StagedRow], columns: Sequence[str], *, timeout: float
    ) -> dict[str, Jagged]:
        """Give ``columns`` of ``rows`` in the order given, with one call a unit; for no rows, empty ones (int64).

        Raises StaleHandle for a row that was cleared or lost.
        """
        by_unit = parts_by(row.unit for row in rows)

        async def get(unit: int, indices: list[int]) -> dict[str, Jagged]:
            request = unit_calls.FetchRows([rows[i].row for i in indices], list(columns))
            reply, frames = await self._peers.ask_unit(unit, "unit.fetch", request, unit_calls.Fetched, timeout=timeout)
            return decode_batch(reply.header, frames, max_bytes=_MOST)

        if not rows:
            return {name: Jagged.from_rows([], "int64") for name in columns}
        parts = await together(get(unit, indices) for unit, indices in by_unit.items())
        return join(parts, by_unit.values())

    async def complete(
        self,
        rows: Sequence[LeasedRow],
        columns: Mapping[str, Jagged],
        *,
        tags: Sequence[Mapping[str, Tag]] | None = None,
        timeout: float,
    ) -> list[bool]:
        """Write the outputs of leased rows, which acknowledges them; tags are merged into the rows' own.

        False where the lease has ended or the row is gone: nothing was changed. Waits for room.
        """
        return await self._write(rows, columns, tags=tags, reason="", timeout=timeout)

    async def give_back(
        self,
        rows: Sequence[LeasedRow],
        *,
        reason: str,
        columns: Mapping[str, Jagged] | None = None,
        timeout: float,
    ) -> list[bool]:
        """Give leased rows back, ready with attempt + 1. columns: what there is so far, kept for the next holder."""
        if columns:
            return await self._write(rows, columns, tags=None, reason=reason or "given back", timeout=timeout)
        return await self._end(rows, reason=reason or "given back", drop=False, timeout=timeout)

    async def drop(self, rows: Sequence[LeasedRow], *, reason: str, timeout: float) -> list[bool]:
        """Give leased rows up for ever; they count as filtered if ``reason`` begins so, else as dropped."""
        return await self._end(rows, reason=reason, drop=True, timeout=timeout)

    async def _write(
        self,
        rows: Sequence[LeasedRow],
        columns: Mapping[str, Jagged],
        *,
        tags: Sequence[Mapping[str, Tag]] | None,
        reason: str,
        timeout: float,
    ) -> list[bool]:
        async def send(indices: list[int]) -> list[bool]:
            header, frames = encode_batch(part_of(columns, indices, len(rows))) if columns else (_EMPTY, [])
            request = unit_calls.WriteRows(
                lease=rows[indices[0]].lease,
                rows=[rows[i].row for i in indices],
                header=header,
                tags=[dict(tags[i]) for i in indices] if tags is not None else [],
                reason=reason,
                wait_s=0.9 * timeout,
            )
            verdicts, _ = await self._peers.ask_unit(
                rows[indices[0]].unit, "unit.write", request, calls.Verdicts, timeout=timeout, frames=frames
            )
            return verdicts.ok

        return await scatter(((row.lease, row.unit) for row in rows), send)

    async def _end(self, rows: Sequence[LeasedRow], *, reason: str, drop: bool, timeout: float) -> list[bool]:
        async def send(indices: list[int]) -> list[bool]:
            request = calls.EndRows(rows[indices[0]].lease, [rows[i].row for i in indices], reason, drop)
            return (await self._peers.ask("queue.end", request, calls.Verdicts, timeout=timeout)).ok

        return await scatter((row.lease for row in rows), send)

    def _claim_rows(
        self,
        partition: str,
        task: str,
        max_rows: int,
        max_groups: int | None,
        version: int | None,
        accept: Sequence[int],
    ) -> calls.ClaimRows:
        ticket = f"{self._ticket_base}-{next(self._ticket_numbers)}"
        return calls.ClaimRows(partition, task, self.worker, ticket, max_rows, max_groups, version, list(accept), 0.0)

    async def _claim(self, request: calls.ClaimRows, timeout: float) -> calls.Claimed:
        deadline = now() + timeout

        async def attempt() -> calls.Claimed:
            wait_s = min(PARK_S, max(0.0, deadline - now()))
            parked = msgspec.structs.replace(request, wait_s=wait_s)
            return await self._peers.ask_once("queue.claim", parked, calls.Claimed, timeout=wait_s + GRACE_S)

        what = f"claiming from {request.partition}/{request.task}"
        try:
            while True:
                claimed = await persist(attempt, what=what, timeout=max(0.0, deadline - now()) + GRACE_S)
                if claimed.rows or claimed.ended or now() >= deadline:
                    return claimed
        except asyncio.CancelledError:
            self._say_goodbye(request.ticket)
            raise

    def _say_goodbye(self, ticket: str) -> None:
        """Let the controller know, if it can be reached at once, that nobody waits for this claim any more."""

        async def abandon() -> None:
            request = calls.Abandon(self.worker, ticket)
            try:
                await self._peers.ask_once("queue.abandon", request, calls.Done, timeout=_GOODBYE_S)
            except AsyncFlowError as error:
                log.info("a claim was abandoned without a goodbye: %s", error)

        task = asyncio.create_task(abandon(), name="goodbye")
        self._goodbyes.add(task)
        task.add_done_callback(self._goodbyes.discard)
