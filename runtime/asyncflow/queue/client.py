"""The client of a queue for an event loop, of all roles and of everyone who joins by its address (``aconnect``).

Every method has a deadline and survives the restart of controllers and units. Row ids are handles: they are never used
again, and one whose row is gone is refused, for reading (StaleHandle) as for writing.

Invariants: a claim has one ticket, however often it is made again, and says so when it is cancelled, so that no row
stays leased to nobody; a method that names rows does what it says to all of them, or raises; columns come back in the
order of the rows asked for.
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
    call_where_they_lie,
    check_rows,
    encoded,
    in_order,
    left,
    located,
    now,
    parts_by,
    scatter,
    together,
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
"""Most controllers that are asked about a task before one is found that decides about it."""
_ABANDON_S = 2.0
_MOST_BYTES = 1 << 40
_INDICES = 1 << 62


class QueueClient:
    """One process's client.

    find: returns the address of controller or storage unit i, by its role, None while there is none; units: the indices
    of the units that take new rows; worker: who holds the leases (its incarnation); attempt: of the role, which its
    samples carry (see ``take_over``); credentials: of this process. Timeouts are in seconds and for the whole of a
    method, which raises DeadlineExceeded where they were not enough.
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
        """Make the client of a member, which finds controllers and units by its directory.

        worker: who holds the leases, if not this member.
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
        """Make tasks known; again with the same changes nothing."""
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
        """Put rows, ``group_size`` of them a group, and return their ids in their order. Waits for room.

        keys: names of the rows, unique in the partition: a row whose key is there already is left as it is, and
        ``RowIds.new`` says so; outputs: most bytes of each column that a row gets later, kept free for it. All rows are
        put, on one unit, or none.

        samples: which groups a job puts into a partition of its own, for its steps or evaluations. They may lie on
        several units, each group whole, and are there whole or not at all. One that exists, or existed already, is
        left as it is and is not ``new``; one that is wanted is put again.

        Raises Refused for columns that do not fit the partition's, for what no unit holds, and without ``samples`` for
        more than 960 MiB or 1,048,576 rows; Fenced where a newer attempt of the samples' creator has taken over.
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
        """Lease rows for a task, waiting until there are some; none when the time is over or nothing will come.

        max_rows: most rows, but at least one group where the task takes groups; min_rows: that many or none;
        max_groups: most groups.

        version: step of the weights that the caller has; accept: further steps that it could load. The rows are of the
        first kind if there are any, else of the second, never both.

        until_done: a closed partition has not ``ended`` as long as others hold rows of the task, which may come back;
        ticket: a name for ``withdraw`` that the caller gives to no other claim.

        Raises DeadlineExceeded where the controller has not answered ``GRACE_S`` after that time.
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
            except Misdirected as there:
                self._deciding[place] = Peer(CONTROLLER.role, there.controller)
            except (asyncio.CancelledError, KeyboardInterrupt):
                abandon = calls.ClaimTicket(request.worker, request.ticket)
                self.peers.send(peer, "queue.abandon", abandon, calls.Done, timeout=_ABANDON_S)
                raise
        raise Refused(f"no controller decides about {partition}/{task}", where="queue client")

    async def withdraw(self, ticket: str, *, partition: str, task: str, timeout: float) -> None:
        """End the claim ``ticket`` now: with the rows that it was granted already, or without any.

        Unlike a claim that is cancelled, it gives no rows back that somebody just got.
        """
        peer = self._deciding.get((partition, task), CONTROLLER)
        claim = calls.ClaimTicket(self.worker, ticket)
        await self.ask("queue.withdraw", claim, calls.Done, timeout=timeout, peer=peer)

    async def fetch(self, rows: Rows, columns: Sequence[str], *, timeout: float) -> dict[str, Jagged]:
        """Return ``columns`` of ``rows`` in the order given, with one call a unit; for no rows, empty ones (int64).

        The arrays are writable and the caller's own. Raises StaleHandle for a row that was cleared or lost, Refused for
        more than 1 GiB of one unit.
        """
        asked, units = located(rows)
        if not asked:
            return {name: Jagged.from_rows([], "int64") for name in columns}
        unit_of_row = dict(zip(asked, units, strict=True))
        once = list(unit_of_row)

        async def call(unit: Peer, indices: Sequence[int], seconds: float) -> dict[str, Jagged]:
            request = unit_calls.FetchRows([once[i] for i in indices], list(columns))
            header, frames = await self.peers.call(unit, "unit.fetch", request, BatchHeader, timeout=seconds)
            return decode_batch(header, frames, max_bytes=_MOST_BYTES)

        where = list(unit_of_row.values())
        parts = await call_where_they_lie(self.peers, once, where, call, what="fetching rows", timeout=timeout)
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

    async def complete(
        self, rows: Sequence[LeasedRow], columns: Mapping[str, Jagged], *, tags: Tags | None = None, timeout: float
    ) -> list[bool]:
        """Write the outputs of leased rows, which acknowledges them; tags are merged into the rows' own.

        False where the lease has ended or the row is gone: nothing was changed. Waits for room.
        """
        return await self._write(rows, [row.lease for row in rows], columns, tags=tags, timeout=timeout)

    async def give_back(
        self, rows: Sequence[LeasedRow], *, reason: str, columns: Mapping[str, Jagged] | None = None, timeout: float
    ) -> list[bool]:
        """Return leased rows, ready with attempt + 1. columns: what there is so far, kept for the next holder."""
        reason = reason or "given back"
        if columns:
            leases = [row.lease for row in rows]
            return await self._write(rows, leases, columns, outcome="return", reason=reason, timeout=timeout)
        return await self._end(rows, reason=reason, drop=False, timeout=timeout)

    async def save(self, rows: Sequence[LeasedRow], columns: Mapping[str, Jagged], *, timeout: float) -> list[bool]:
        """Keep what there is so far of leased rows for whoever holds them next; their leases go on.

        It takes the place of what was saved before. False where there is no room now, or the lease has ended.
        """
        return await self._write(rows, [row.lease for row in rows], columns, outcome="keep", timeout=timeout)

    async def drop(self, rows: Sequence[LeasedRow], *, reason: str, timeout: float) -> list[bool]:
        """Drop leased rows for ever; they count as filtered if ``reason`` begins so, else as dropped."""
        return await self._end(rows, reason=reason, drop=True, timeout=timeout)

    async def renew(self, leases: Sequence[str], *, timeout: float) -> list[str]:
        """Begin the time of leases anew, and return those that are in force."""
        unique = list(dict.fromkeys(leases))
        kept = await together(
            self.ask(
                "queue.renew",
                calls.Leases([unique[i] for i in indices]),
                list[str],
                timeout=timeout,
                peer=Peer(CONTROLLER.role, index),
            )
            for index, indices in parts_by(map(controller_of, unique)).items()
        )
        return [lease for part in kept for lease in part]

    async def write(
        self, rows: Sequence[int], columns: Mapping[str, Jagged], *, tags: Tags | None = None, timeout: float
    ) -> None:
        """Add columns to rows, or replace them there; tags are merged into the rows' own. Waits for room.

        Raises StaleHandle for a row that is not there, Refused for columns that do not fit the partition's; of the rows
        of one storage unit then none was written.
        """
        check_once(rows, "row")
        lease = f"{WRITE}{self._name}-{next(self._numbers)}"
        written = await self._write(rows, [lease] * len(rows), columns, tags=tags, timeout=timeout)
        if gone := [row for row, ok in zip(rows, written, strict=True) if not ok]:
            raise StaleHandle(f"rows {gone} were lost with their unit", where="write", hint="Put them again")

    async def list_all(self, *, timeout: float) -> dict[str, Listing]:
        """Return the rows of every partition, by its name, each as it is when its turn comes."""
        names, deadline = await self.partitions(timeout=timeout), now() + timeout
        listings = await together(
            self.ask("open.list", calls.InPartition(name), Listing, timeout=left(deadline)) for name in names
        )
        return dict(zip(names, listings, strict=True))

    async def partitions(self, *, timeout: float) -> dict[str, int]:
        """Return the partitions and how many rows each has."""
        return await self.ask("open.partitions", calls.Nothing(), dict[str, int], timeout=timeout)

    async def show(self, partition: str, *, timeout: float) -> PartitionView:
        """Return how far the tasks of a partition are, and what they wait for."""
        return await self.ask("queue.show", calls.InPartition(partition), PartitionView, timeout=timeout)

    async def close_partition(self, *, partition: str, step: int, timeout: float) -> None:
        """Mark the run complete: every sample of steps up to ``step`` should be finished; the audit checks it."""
        await self.ask("queue.close", calls.Close(partition, step), calls.Done, timeout=timeout)

    async def clear_partition(self, *, partition: str, timeout: float) -> None:
        """Forget all rows of a partition; tasks stay declared, and its samples can be put anew.

        Raises Fenced where a newer attempt of this creator has taken over.
        """
        await self.ask("queue.clear", calls.CreatorAttempt(partition, self.attempt), calls.Done, timeout=timeout)

    async def take_over(self, *, partition: str, timeout: float) -> None:
        """Say that this attempt of the partition's creator begins.

        From now on, across restarts of the controller, nothing that an older one created is admitted, although it may
        have been under way all the time. Raises Fenced if a newer attempt has taken over.
        """
        request = calls.CreatorAttempt(partition, self.attempt)
        await self.ask("queue.take_over", request, calls.Done, timeout=timeout)

    async def open_step(self, *, partition: str, step: int, groups: int, group_size: int, timeout: float) -> None:
        """Say how many groups reach the trainer in D_step; may be changed until all of them were leased."""
        request = calls.OpenStep(partition, step, groups, group_size)
        await self.ask("queue.open_step", request, calls.Done, timeout=timeout)

    async def exchange(self, *, partition: str, serial: int, step: int, late: int, timeout: float) -> None:
        """Move a group into D_step in place of ``late``, which takes its step; the same pair again changes nothing.

        Raises Refused where one is in a slot or has ended, or where they are of different versions.
        """
        request = calls.Exchange(partition, serial, step, late)
        await self.ask("queue.exchange", request, calls.Done, timeout=timeout)

    async def begin(self, *, partition: str, attempt: int, step: int, world: int, timeout: float) -> None:
        """Say that a trainer begins whose weights are θ_step; every rank may say it.

        Rows of steps up to ``step`` are committed, those of later steps can be had again; older attempts are fenced.
        Raises Fenced if a newer attempt has begun, Refused if θ_step holds samples that were never leased.
        """
        await self.ask("queue.begin", calls.Begin(partition, attempt, step, world), calls.Done, timeout=timeout)

    async def slot(
        self, *, partition: str, attempt: int, step: int, slot: int, rank: int, tokens: int, timeout: float
    ) -> Slot | None:
        """Return what ``rank`` trains in a slot, the same whenever it is asked; None if nothing was ready in time,
        or at once where the partition was closed below ``step``.

        tokens: most tokens of one rank in the slot (a longer sample goes alone). Slots are asked for in order.
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
        """Say that ``rank`` has finished the optimizer step; the step is staged when all have."""
        await self.ask("queue.step_done", calls.StepDone(partition, attempt, step, rank), calls.Done, timeout=timeout)

    async def commit(self, *, partition: str, attempt: int, step: int, timeout: float) -> None:
        """Say that a checkpoint holds all steps up to ``step``: their rows are trained and their bytes freed."""
        await self.ask("queue.commit", calls.TrainerStep(partition, attempt, step), calls.Done, timeout=timeout)

    async def sync(self, *, timeout: float) -> None:
        """Sync the ledger to disk, with everything that was answered up to now, whatever its class."""
        await self.ask("queue.sync", calls.Nothing(), calls.Done, timeout=timeout)

    async def wanted(self, *, partition: str, known: int, timeout: float) -> messages.Wanted:
        """Return the samples to be created again, as soon as their revision is not ``known``, or after ``timeout``."""
        return await self.peers.park(
            "queue.wanted",
            lambda wait_s: calls.AskWanted(partition, known, wait_s),
            messages.Wanted,
            answers=lambda wanted: wanted.revision != known,
            deadline=now() + timeout,
            what=f"what {partition} wants",
        )

    async def expire(self, *, worker: str, timeout: float) -> None:
        """Say that a worker is dead: its leases end now."""
        await self.ask("queue.expire", calls.Expire(worker), calls.Done, timeout=timeout)

    async def stats(self, *, timeout: float) -> messages.QueueStats:
        """Return the counts of now."""
        return await self.ask("queue.stats", calls.Nothing(), messages.QueueStats, timeout=timeout)

    async def units_there(self, *, timeout: float) -> list[UnitView]:
        """Return the storage units as the controller knows them, by index."""
        return await self.ask("queue.units", calls.Nothing(), list[UnitView], timeout=timeout)

    async def drain_unit(self, unit: int, *, timeout: float) -> None:
        """Drain a storage unit: it takes nothing new, and its rows move to others, which takes its time.

        Raises Refused where there is no such unit.
        """
        await self.ask("queue.drain", Drain(unit), calls.Done, timeout=timeout)

    async def snapshot(self, *, partition: str, step: int | None = None, timeout: float) -> messages.PartitionSnapshot:
        """Return how far a partition has come; with ``step``, of its steps that one alone, and nothing is missing."""
        request = calls.AskSnapshot(partition, step)
        return await self.ask("queue.snapshot", request, messages.PartitionSnapshot, timeout=timeout)

    async def audit(self, *, timeout: float) -> messages.AuditReport:
        """Ask the controller to audit its ledger."""
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
        ids, units = located(rows)
        check_rows(columns, tags, rows=len(ids))

        async def call(unit: Peer, indices: Sequence[int], seconds: float) -> list[bool]:
            header, frames = encoded(columns, indices, rows=len(ids))
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

        parts = await call_where_they_lie(
            self.peers, ids, units, call, apart=leases, what="writing rows", timeout=timeout
        )
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
    """Be a client of the queue at ``address`` (``status.address``, e.g. ``tcp://scores-controller.rl.svc:5571``).

    The client joins the queue's directory, which tells it where controllers and units are. Heartbeats go on in the
    running event loop, so the loop must be kept free. Leases end when their client leaves or falls silent.

    credentials: of this process, by default those that ``ASYNCFLOW_TLS`` names; timeout: seconds to wait for the queue;
    worker: who holds the leases, where they are to outlive this client. Raises DeadlineExceeded without an answer.
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
    """Refuse rows, or keys, of which one is named twice."""
    if len(set(names)) != len(names):
        twice = sorted({str(name) for name in names if list(names).count(name) > 1})[:8]
        raise Refused(f"{what} {', '.join(twice)} is named twice", where="queue client", hint=f"Name each {what} once")
