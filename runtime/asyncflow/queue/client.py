"""The client of a queue for an event loop, for all roles and for users who join by its address (``aconnect``).

Every method has a deadline and survives restarts of controllers and units. Row ids are handles: they are never used
again, and the id of a row that no longer exists is refused for reading (StaleHandle) and writing.

Invariants: a claim keeps its ticket when it is repeated, and tells the controller when it is cancelled, so that no row
stays leased without a holder. A method that names rows takes effect on all of them, or raises. Columns are returned in
the order of the named rows.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Self

from msgspec.structs import replace

from asyncflow.api.names import CLIENT
from asyncflow.errors import Misdirected, Refused, StaleHandle
from asyncflow.queue.peers import (
    CONTROLLER,
    Peer,
    Peers,
    Rows,
    Tags,
    call_at_units,
    check_rows,
    gather_all,
    group_indices,
    in_order,
    left,
    locate,
    now,
    pack_rows,
    scatter,
)
from asyncflow.queue.protocol import calls, messages, unit_calls
from asyncflow.queue.protocol.calls import WRITE, Claimed, Drain, controller_of
from asyncflow.queue.protocol.messages import LeasedRow, Listing, PartitionView, Slot, UnitView
from asyncflow.queue.putting import LEAVING, Putter
from asyncflow.rpc.access import worker_name
from asyncflow.rpc.columns import BatchHeader, Jagged, decode_batch
from asyncflow.rpc.membership import Member, Membership
from asyncflow.rpc.tls import Credentials

JOIN_S = 30.0
_CONTROLLERS = 4
"""Limit of controllers to call until one is found that decides about a task."""
_ABANDON_S = 2.0
_MOST_BYTES = 1 << 40
_INDICES = 1 << 62


class QueueClient:
    """One process's client.

    find: returns the address of controller or storage unit i, by its role, None if there is none yet; units: returns
    the indices of the units that accept new rows; worker: holder of the leases (an incarnation); attempt: attempt of
    the role, which its samples carry (see ``take_over``); credentials: of this process. Timeouts are in seconds and
    apply to a whole method, which raises DeadlineExceeded when the time is over.
    """

    def __init__(
        self,
        *,
        find: Callable[[str, int], str | None],
        units: Callable[[], Sequence[int]],
        worker: str,
        attempt: int = 0,
        credentials: Credentials | None = None,
    ) -> None:
        self.worker = worker
        self.attempt = attempt
        self.peers = Peers(find=find, units=units, credentials=credentials)
        self.ask = self.peers.ask
        self._putter = Putter(self.peers, worker=worker)
        self._deciding: dict[tuple[str, str], Peer] = {}  # tasks never move
        self._name = uuid.uuid4().hex
        self._numbers = itertools.count()

    @classmethod
    def of(cls, membership: Membership, *, credentials: Credentials | None = None, worker: str = "") -> QueueClient:
        """Return the client of a member, which finds controllers and units in its directory.

        worker: holder of the leases, if not this member.
        """
        return cls(
            find=membership.address,
            units=lambda: [unit.index for unit in membership.peers("storage") if not unit.info.get(LEAVING)],
            worker=worker or membership.member.incarnation,
            attempt=membership.member.attempt,
            credentials=credentials,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self.peers.close()

    async def declare(self, tasks: Sequence[messages.TaskSpec], *, timeout: float) -> None:
        """Declare tasks; repeating a declaration has no effect."""
        await self.ask("queue.declare", calls.Declare(list(tasks)), calls.Done, timeout=timeout)

    async def put(
        self,
        partition: str,
        columns: Mapping[str, Jagged],
        *,
        keys: Sequence[str] | None = None,
        tags: Tags | None = None,
        group_size: int = 1,
        outputs: Mapping[str, int] | None = None,
        samples: messages.Samples | None = None,
        timeout: float,
    ) -> unit_calls.RowIds:
        """Put rows in groups of ``group_size``, and return their ids in order. Waits for room.

        keys: names of the rows, unique in the partition: an existing row with the key is not changed, as ``RowIds.new``
        reports; outputs: most bytes of each column that a row gets later, which are reserved. All rows are put, on one
        unit, or none.

        samples: the groups that a job puts into its own partition, for its steps or evaluations. They may be on several
        units, each group whole; each exists as a whole or not at all. An existing or former group is not changed and
        not ``new``; a wanted one is put again.

        Raises Refused for columns that do not fit the partition, for more bytes than any unit can hold, and without
        ``samples`` for more than 960 MiB or 1,048,576 rows; Fenced if a newer attempt of the creator has taken over.
        """
        rows = len(next(iter(columns.values()), tags or ()) if keys is None else keys)
        check_rows(columns, tags, rows=rows)
        if keys is not None:
            tags = [{**tag, messages.KEY_TAG: key} for tag, key in zip(tags or [{}] * rows, keys, strict=True)]
        request = unit_calls.PutRows(
            partition=partition,
            client=b"",
            group=0,
            group_size=group_size,
            header=BatchHeader(rows=rows, columns=[]),
            tags=[dict(tag) for tag in tags or ()],
            outputs=dict(outputs or {}),
            wait_s=0.0,
            samples=samples,
            attempt=self.attempt,
        )
        return await self._putter.put(request, columns, timeout=timeout)

    async def claim(
        self,
        *,
        partition: str,
        task: str,
        max_rows: int,
        min_rows: int = 1,
        max_groups: int | None = None,
        version: int | None = None,
        accept: Sequence[int] = (),
        until_done: bool = False,
        ticket: str = "",
        timeout: float,
    ) -> Claimed:
        """Lease rows for a task, waiting until there are some; none after a timeout or if no more will come.

        max_rows: most rows, but at least one group if the task takes groups; min_rows: return that many rows or none;
        max_groups: most groups.

        version: step of the caller's weights; accept: further steps that it could load. The rows suit ``version`` if
        there are any such rows, otherwise ``accept``, but never both.

        until_done: a closed partition has not ``ended`` while other workers hold rows of the task, which may be
        returned; ticket: a name for ``withdraw``, unique among the caller's claims.

        Raises DeadlineExceeded if the controller has not answered ``GRACE_S`` after the timeout.
        """
        request = calls.ClaimRows(
            partition=partition,
            task=task,
            worker=self.worker,
            ticket=ticket or f"{self._name[:8]}-{next(self._numbers)}",
            max_rows=max_rows,
            max_groups=max_groups,
            version=version,
            accept=list(accept),
            min_rows=min_rows,
            until_done=until_done,
        )
        place, deadline = (partition, task), now() + timeout
        for _ in range(_CONTROLLERS):
            peer = self._deciding.get(place, CONTROLLER)
            try:
                return await self.peers.park(
                    "queue.claim",
                    lambda wait_s: replace(request, wait_s=wait_s),
                    Claimed,
                    answers=lambda claimed: bool(claimed.rows) or claimed.ended or claimed.withdrawn,
                    deadline=deadline,
                    what=f"claiming from {partition}/{task}",
                    peer=peer,
                )
            except Misdirected as misdirected:
                self._deciding[place] = Peer(CONTROLLER.role, misdirected.controller)
            except (asyncio.CancelledError, KeyboardInterrupt):
                abandon = calls.ClaimTicket(request.worker, request.ticket)
                self.peers.send(peer, "queue.abandon", abandon, calls.Done, timeout=_ABANDON_S)
                raise
        raise Refused(f"no controller decides about {partition}/{task}", where="queue client")

    async def withdraw(self, ticket: str, *, partition: str, task: str, timeout: float) -> None:
        """End a claim now, with the rows that it was already granted, or without rows.

        Unlike cancelling the claim, this does not return rows that were just granted.
        """
        peer = self._deciding.get((partition, task), CONTROLLER)
        await self.ask("queue.withdraw", calls.ClaimTicket(self.worker, ticket), calls.Done, timeout=timeout, peer=peer)

    async def fetch(self, rows: Rows, columns: Sequence[str], *, timeout: float) -> dict[str, Jagged]:
        """Return ``columns`` of ``rows`` in the order given, with one call per unit; empty int64 columns for no rows.

        The arrays are writable and owned by the caller. Raises StaleHandle for a row that was cleared or lost, Refused
        for a row without one of the columns and for more than 1 GiB from one unit.
        """
        ids, units = locate(rows)
        if not ids:
            return {name: Jagged.from_rows([], "int64") for name in columns}
        unit_of_row = dict(zip(ids, units, strict=True))
        unique_ids = list(unit_of_row)

        async def call(unit: Peer, indices: Sequence[int], seconds: float) -> dict[str, Jagged]:
            request = unit_calls.FetchRows([unique_ids[i] for i in indices], list(columns))
            header, frames = await self.peers.call(unit, "unit.fetch", request, BatchHeader, timeout=seconds)
            return decode_batch(header, frames, max_bytes=_MOST_BYTES)

        last_units = list(unit_of_row.values())
        parts = await call_at_units(self.peers, unique_ids, last_units, call, what="fetching rows", timeout=timeout)
        if lost := [unique_ids[i] for indices, part in parts if part is None for i in indices]:
            hint = "It was cleared, or was lost with its unit: put it again, unless a job creates it again"
            raise StaleHandle(f"row {lost[0]} and {len(lost) - 1} others do not exist", where="fetch", hint=hint)
        fetched = [part for _, part in parts if part is not None]
        joined = {name: Jagged.concat([part[name] for part in fetched]) for name in columns}
        received = [unique_ids[i] for indices, _ in parts for i in indices]
        if received == ids:
            return joined
        places = {row: place for place, row in enumerate(received)}
        return {name: column.take([places[row] for row in ids]) for name, column in joined.items()}

    async def complete(
        self, rows: Sequence[LeasedRow], columns: Mapping[str, Jagged], *, tags: Tags | None = None, timeout: float
    ) -> list[bool]:
        """Write the outputs of leased rows, which acknowledges them; tags are merged into the rows' tags.

        False for rows whose lease has ended or that no longer exist; they are not changed. Waits for room.
        """
        return await self._write(rows, [row.lease for row in rows], columns, tags=tags, timeout=timeout)

    async def give_back(
        self, rows: Sequence[LeasedRow], *, reason: str, columns: Mapping[str, Jagged] | None = None, timeout: float
    ) -> list[bool]:
        """Return leased rows, ready with attempt + 1. columns: unfinished values, kept for the next holder."""
        reason = reason or "given back"
        if columns:
            leases = [row.lease for row in rows]
            return await self._write(rows, leases, columns, outcome="return", reason=reason, timeout=timeout)
        return await self._end(rows, reason=reason, drop=False, timeout=timeout)

    async def save(self, rows: Sequence[LeasedRow], columns: Mapping[str, Jagged], *, timeout: float) -> list[bool]:
        """Save unfinished columns of leased rows for their next holder; the leases continue.

        They replace what was saved before. False if there is no room now, or the lease has ended.
        """
        return await self._write(rows, [row.lease for row in rows], columns, outcome="keep", timeout=timeout)

    async def drop(self, rows: Sequence[LeasedRow], *, reason: str, timeout: float) -> list[bool]:
        """Drop leased rows permanently; as filtered if ``reason`` begins with "filtered", otherwise as dropped."""
        return await self._end(rows, reason=reason, drop=True, timeout=timeout)

    async def renew(self, leases: Sequence[str], *, timeout: float) -> list[str]:
        """Restart the time of leases, and return those that are in force."""
        unique = list(dict.fromkeys(leases))
        kept = await gather_all(
            self.ask(
                "queue.renew",
                calls.Leases([unique[i] for i in indices]),
                list[str],
                timeout=timeout,
                peer=Peer(CONTROLLER.role, index),
            )
            for index, indices in group_indices(map(controller_of, unique)).items()
        )
        return [lease for part in kept for lease in part]

    async def write(
        self, rows: Sequence[int], columns: Mapping[str, Jagged], *, tags: Tags | None = None, timeout: float
    ) -> None:
        """Add or replace columns of rows; tags are merged into the rows' tags. Waits for room.

        Raises StaleHandle for a row that does not exist, Refused for columns that do not fit the partition; then no row
        of that storage unit was written.
        """
        check_once(rows, "row")
        lease = f"{WRITE}{self._name}-{next(self._numbers)}"
        written = await self._write(rows, [lease] * len(rows), columns, tags=tags, timeout=timeout)
        if lost := [row for row, ok in zip(rows, written, strict=True) if not ok]:
            raise StaleHandle(f"rows {lost} were lost with their unit", where="write", hint="Put them again")

    async def list_all(self, *, timeout: float) -> dict[str, Listing]:
        """Return the rows of every partition, by its name; each partition is read at a different time."""
        names, deadline = await self.partitions(timeout=timeout), now() + timeout
        listings = await gather_all(
            self.ask("open.list", calls.InPartition(name), Listing, timeout=left(deadline)) for name in names
        )
        return dict(zip(names, listings, strict=True))

    async def partitions(self, *, timeout: float) -> dict[str, int]:
        """Return the partitions and the number of rows of each."""
        return await self.ask("open.partitions", calls.Nothing(), dict[str, int], timeout=timeout)

    async def show(self, partition: str, *, timeout: float) -> PartitionView:
        """Return the progress of the tasks of a partition, and the rows that they wait for."""
        return await self.ask("queue.show", calls.InPartition(partition), PartitionView, timeout=timeout)

    async def close_partition(self, *, partition: str, step: int, timeout: float) -> None:
        """Mark the run complete: every sample of steps up to ``step`` should be final, which the audit checks."""
        await self.ask("queue.close", calls.Close(partition, step), calls.Done, timeout=timeout)

    async def clear_partition(self, *, partition: str, timeout: float) -> None:
        """Forget all rows of a partition; tasks stay declared, and its samples can be put again.

        Raises Fenced if a newer attempt of this creator has taken over.
        """
        await self.ask("queue.clear", calls.CreatorAttempt(partition, self.attempt), calls.Done, timeout=timeout)

    async def take_over(self, *, partition: str, timeout: float) -> None:
        """Start this attempt of the partition's creator.

        From now on, across restarts of the controller, no put of an older attempt is admitted, even if it was sent
        earlier. Raises Fenced if a newer attempt has taken over.
        """
        request = calls.CreatorAttempt(partition, self.attempt)
        await self.ask("queue.take_over", request, calls.Done, timeout=timeout)

    async def open_step(self, *, partition: str, step: int, groups: int, group_size: int, timeout: float) -> None:
        """Set the number of groups of D_step; it may be changed until all of them were leased."""
        request = calls.OpenStep(partition, step, groups, group_size)
        await self.ask("queue.open_step", request, calls.Done, timeout=timeout)

    async def exchange(self, *, partition: str, serial: int, step: int, late: int, timeout: float) -> None:
        """Move a group into D_step in exchange for ``late``, which takes its step; repeating this has no effect.

        Raises Refused if one of them is in a slot or has ended, or if their versions differ.
        """
        await self.ask("queue.exchange", calls.Exchange(partition, serial, step, late), calls.Done, timeout=timeout)

    async def begin(self, *, partition: str, attempt: int, step: int, world: int, timeout: float) -> None:
        """Start a trainer attempt whose weights are θ_step; every rank may call this.

        Rows of steps up to ``step`` are committed, and rows of later steps become available again; older attempts are
        fenced. Raises Fenced if a newer attempt has started, Refused if θ_step contains samples that were never leased.
        """
        await self.ask("queue.begin", calls.Begin(partition, attempt, step, world), calls.Done, timeout=timeout)

    async def slot(
        self, *, partition: str, attempt: int, step: int, slot: int, rank: int, tokens: int, timeout: float
    ) -> Slot | None:
        """Return what ``rank`` trains in a slot, always the same; None if nothing was ready in time, or immediately if
        the partition was closed before ``step``.

        tokens: most tokens of one rank in the slot (a longer sample goes alone). Slots are requested in order.
        """
        answer = await self.peers.park(
            "queue.slot",
            lambda wait_s: calls.AskSlot(partition, attempt, step, slot, rank, tokens, wait_s),
            calls.Slotted,
            answers=lambda answer: answer.slot is not None or answer.ended,
            deadline=now() + timeout,
            what=f"slot {slot} of step {step}",
        )
        return answer.slot

    async def step_done(self, *, partition: str, attempt: int, step: int, rank: int, timeout: float) -> None:
        """Report that ``rank`` has finished the optimizer step; the step is staged when all ranks have."""
        await self.ask("queue.step_done", calls.StepDone(partition, attempt, step, rank), calls.Done, timeout=timeout)

    async def commit(self, *, partition: str, attempt: int, step: int, timeout: float) -> None:
        """Report that a checkpoint contains all steps up to ``step``: their rows are trained and their bytes freed."""
        await self.ask("queue.commit", calls.TrainerStep(partition, attempt, step), calls.Done, timeout=timeout)

    async def sync(self, *, timeout: float) -> None:
        """Sync the ledger, with everything answered so far, to disk, whatever its durability class."""
        await self.ask("queue.sync", calls.Nothing(), calls.Done, timeout=timeout)

    async def wanted(self, *, partition: str, known: int, timeout: float) -> messages.Wanted:
        """Return the samples to create again, when their revision differs from ``known``, or after ``timeout``."""
        return await self.peers.park(
            "queue.wanted",
            lambda wait_s: calls.AskWanted(partition, known, wait_s),
            messages.Wanted,
            answers=lambda wanted: wanted.revision != known,
            deadline=now() + timeout,
            what=f"the wanted samples of {partition}",
        )

    async def expire(self, *, worker: str, timeout: float) -> None:
        """Report that a worker is dead: its leases end now."""
        await self.ask("queue.expire", calls.Expire(worker), calls.Done, timeout=timeout)

    async def stats(self, *, timeout: float) -> messages.QueueStats:
        """Return the current counts."""
        return await self.ask("queue.stats", calls.Nothing(), messages.QueueStats, timeout=timeout)

    async def list_units(self, *, timeout: float) -> list[UnitView]:
        """Return the storage units as the controller knows them, by index."""
        return await self.ask("queue.units", calls.Nothing(), list[UnitView], timeout=timeout)

    async def drain_unit(self, unit: int, *, timeout: float) -> None:
        """Drain a storage unit: it accepts nothing new, and its rows move to other units, which takes time.

        Raises Refused if there is no such unit.
        """
        await self.ask("queue.drain", Drain(unit), calls.Done, timeout=timeout)

    async def snapshot(self, *, partition: str, step: int | None = None, timeout: float) -> messages.PartitionSnapshot:
        """Return the progress of a partition; with ``step``, only of this step, and with an empty ``missing``."""
        request = calls.AskSnapshot(partition, step)
        return await self.ask("queue.snapshot", request, messages.PartitionSnapshot, timeout=timeout)

    async def audit(self, *, timeout: float) -> messages.AuditReport:
        """Audit the controller's ledger."""
        return await self.ask("queue.audit", calls.Nothing(), messages.AuditReport, timeout=timeout)

    async def _write(
        self,
        rows: Rows,
        leases: Sequence[str],
        columns: Mapping[str, Jagged],
        *,
        tags: Tags | None = None,
        outcome: unit_calls.Outcome = "complete",
        reason: str = "",
        timeout: float,
    ) -> list[bool]:
        """Write to ``rows``, each under its lease, and return whether each was written. See ``WriteRows``."""
        ids, units = locate(rows)
        check_rows(columns, tags, rows=len(ids))

        async def call(unit: Peer, indices: Sequence[int], seconds: float) -> list[bool]:
            header, frames = pack_rows(columns, indices, rows=len(ids))
            request = unit_calls.WriteRows(
                lease=leases[indices[0]],
                rows=[ids[i] for i in indices],
                header=header,
                tags=[dict(tags[i]) for i in indices] if tags is not None else [],
                outcome=outcome,
                wait_s=0.9 * seconds,
                reason=reason,
            )
            return (await self.peers.call(unit, "unit.write", request, list[bool], timeout=seconds, frames=frames))[0]

        parts = await call_at_units(self.peers, ids, units, call, apart=leases, what="writing rows", timeout=timeout)
        return in_order((indices, [False] * len(indices) if ok is None else ok) for indices, ok in parts)

    async def _end(self, rows: Sequence[LeasedRow], *, reason: str, drop: bool, timeout: float) -> list[bool]:
        async def send(indices: Sequence[int]) -> list[bool]:
            lease = rows[indices[0]].lease
            request = calls.EndRows(lease, [rows[i].row for i in indices], reason, drop)
            peer = Peer(CONTROLLER.role, controller_of(lease))
            return await self.ask("queue.end", request, list[bool], timeout=timeout, peer=peer)

        return await scatter((row.lease for row in rows), send)


@asynccontextmanager
async def aconnect(
    address: str, *, credentials: Credentials | None = None, timeout: float = JOIN_S, worker: str = ""
) -> AsyncIterator[QueueClient]:
    """Connect to the queue at ``address`` (``status.address``, e.g. ``tcp://scores-controller.rl.svc:5571``).

    The client joins the queue's directory, which contains the addresses of controllers and units. Heartbeats are sent
    in the running event loop, so the loop must not be blocked. Leases end when their client leaves or falls silent.

    credentials: of this process, by default those that ``ASYNCFLOW_TLS`` names; timeout: seconds to wait for the queue;
    worker: holder of the leases, if they are to outlive this client. Raises DeadlineExceeded without an answer.
    """
    credentials = credentials or Credentials.of_environment()
    identity = uuid.uuid4()
    index = identity.int % _INDICES
    member = Member(role=CLIENT, index=index, incarnation=worker_name(CLIENT, index, identity.hex))
    membership = Membership(driver=address, member=member, credentials=credentials)
    try:
        await membership.join(timeout)
        async with QueueClient.of(membership, credentials=credentials, worker=worker) as queue:
            yield queue
    finally:
        await membership.close()


def check_once(names: Sequence[int] | Sequence[str], what: str) -> None:
    """Refuse rows, or keys, that are named twice."""
    if len(set(names)) != len(names):
        twice = sorted({str(name) for name in names if list(names).count(name) > 1})[:8]
        raise Refused(f"{what} {', '.join(twice)} is named twice", where="queue client", hint=f"Name each {what} once")
