"""The questions and orders that go to the controller alone and move no columns.

The trainer's gang, the driver and whoever looks after leases use these; ``verbs_rows`` adds the verbs that move rows.

Invariant: every call is made again until it is answered or its deadline is over, and may be (see ``calls``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec import Struct

from asyncflow.queue.client.scatter import parts_by
from asyncflow.queue.client.verbs import Ask, Clock, Peer, Verb, left_of, name_of, once, persist, shard, together
from asyncflow.queue.protocol import calls
from asyncflow.queue.protocol.lot import Slot
from asyncflow.queue.protocol.messages import AuditReport, PartitionSnapshot, QueueStats, TaskSpec, Wanted
from asyncflow.queue.protocol.moving_calls import Drain, Units, UnitView
from asyncflow.queue.protocol.shard_calls import controller_of

R = TypeVar("R", bound=Struct)

PARK_S = 10.0
"""Longest time that one call parks at the controller before it is made again."""

GRACE_S = 5.0
"""Time that the controller has to answer beyond the time for which a verb waits; then the verb ends."""


class ControlVerbs:
    """The verbs of one client, as far as the controller goes. Timeouts are seconds for the whole of a verb.

    units: the indices of the units that are there; worker: who holds the leases; attempt: of the role, see
    ``take_over``; clock: seconds that only grow.
    """

    def __init__(
        self, *, units: Callable[[], Sequence[int]], worker: str, attempt: int = 0, clock: Clock = time.monotonic
    ) -> None:
        self.worker = worker
        self.attempt = attempt
        self.units = units
        self.clock = clock

    def declare(self, tasks: Sequence[TaskSpec], *, timeout: float) -> Verb[None]:
        """Make tasks known; again with the same changes nothing."""
        yield from self.ask("queue.declare", calls.Declare(list(tasks)), calls.Done, timeout=timeout)

    def renew(self, leases: Sequence[str], *, timeout: float) -> Verb[list[str]]:
        """Begin the time of leases anew; give those that are in force."""

        def send(peer: Peer, mine: list[str]) -> Verb[list[str]]:
            answer = yield from self.ask("queue.renew", calls.Renew(mine), calls.Renewed, timeout=timeout, peer=peer)
            return answer.leases

        unique = list(dict.fromkeys(leases))
        if not any(map(controller_of, unique)):
            return (yield from send(None, unique))
        parts = parts_by(map(controller_of, unique))
        kept = yield from together(send(shard(index), [unique[i] for i in at]) for index, at in parts.items())
        return [lease for part in kept for lease in part]

    def open_step(self, *, partition: str, step: int, groups: int, group_size: int, timeout: float) -> Verb[None]:
        """Say how many groups reach the trainer in D_step; may be changed until all of them were handed out."""
        request = calls.OpenStep(partition, step, groups, group_size)
        yield from self.ask("queue.open_step", request, calls.Done, timeout=timeout)

    def begin(self, *, partition: str, attempt: int, step: int, world: int, timeout: float) -> Verb[None]:
        """Say that a trainer begins whose weights are θ_step; every rank may say it.

        Rows of steps up to ``step`` are committed, those of later steps can be had again; older attempts are fenced.
        Raises Fenced if a newer attempt has begun, Refused if θ_step holds samples that were never handed out.
        """
        request = calls.Begin(partition, attempt, step, world)
        yield from self.ask("queue.begin", request, calls.Done, timeout=timeout)

    def slot(
        self, *, partition: str, attempt: int, step: int, slot: int, rank: int, tokens: int, timeout: float
    ) -> Verb[Slot | None]:
        """Return what ``rank`` trains in a slot, the same whenever it is asked; None if nothing was ready in time,
        or at once where the partition was closed below ``step``.

        tokens: most tokens of one rank in the slot (a longer sample goes alone). Slots are asked for in order.
        """
        deadline = self.clock() + timeout
        while True:
            answer = yield from self.park(
                "queue.slot",
                lambda wait_s: calls.AskSlot(partition, attempt, step, slot, rank, tokens, wait_s),
                calls.Slotted,
                deadline=deadline,
                what=f"slot {slot} of step {step}",
            )
            if answer.slot is not None or answer.ended or self.clock() >= deadline:
                return answer.slot.expanded() if answer.slot is not None else None

    def step_done(self, *, partition: str, attempt: int, step: int, rank: int, timeout: float) -> Verb[None]:
        """Say that ``rank`` has finished the optimizer step; the step is staged when all have."""
        request = calls.StepDone(partition, attempt, step, rank)
        yield from self.ask("queue.step_done", request, calls.Done, timeout=timeout)

    def commit(self, *, partition: str, attempt: int, step: int, timeout: float) -> Verb[None]:
        """Say that a checkpoint holds all steps up to ``step``: their rows are trained and their bytes freed."""
        request = calls.Commit(partition, attempt, step)
        yield from self.ask("queue.commit", request, calls.Done, timeout=timeout)

    def sync(self, *, timeout: float) -> Verb[None]:
        """Have the ledger on disk, with everything that was answered up to now, whatever its class."""
        yield from self.ask("queue.sync", calls.Nothing(), calls.Done, timeout=timeout)

    def wanted(self, *, partition: str, known: int, timeout: float) -> Verb[Wanted]:
        """Return the samples to be created again, as soon as their revision is not ``known``, or after ``timeout``."""
        deadline = self.clock() + timeout
        while True:
            wanted = yield from self.park(
                "queue.wanted",
                lambda wait_s: calls.AskWanted(partition, known, wait_s),
                Wanted,
                deadline=deadline,
                what=f"what {partition} wants",
            )
            if wanted.revision != known or self.clock() >= deadline:
                return wanted

    def expire(self, *, worker: str, timeout: float) -> Verb[None]:
        """Say that a worker is dead: its leases end now."""
        yield from self.ask("queue.expire", calls.Expire(worker), calls.Done, timeout=timeout)

    def stats(self, *, timeout: float) -> Verb[QueueStats]:
        """Return the counts of now."""
        return (yield from self.ask("queue.stats", calls.Nothing(), QueueStats, timeout=timeout))

    def units_there(self, *, timeout: float) -> Verb[list[UnitView]]:
        """Return the storage units as the controller knows them, by index."""
        return (yield from self.ask("queue.units", calls.Nothing(), Units, timeout=timeout)).units

    def drain_unit(self, unit: int, *, timeout: float) -> Verb[None]:
        """Have a storage unit leave: it takes nothing new, and its rows move to others, which takes its time.

        Raises Refused where there is no such unit.
        """
        yield from self.ask("queue.drain", Drain(unit), calls.Done, timeout=timeout)

    def take_over(self, *, partition: str, timeout: float) -> Verb[None]:
        """Say that this attempt of the partition's creator begins.

        From now on, across restarts of the controller, nothing that an older one created is admitted, although it may
        have been under way all the time. Raises Fenced if a newer attempt has taken over.
        """
        request = calls.TakeOver(partition, self.attempt)
        yield from self.ask("queue.take_over", request, calls.Done, timeout=timeout)

    def snapshot(self, *, partition: str, step: int | None = None, timeout: float) -> Verb[PartitionSnapshot]:
        """Return how far a partition has come; with ``step``, of its steps that one alone, and nothing is missing."""
        request = calls.AskSnapshot(partition, step)
        return (yield from self.ask("queue.snapshot", request, calls.Snapshot, timeout=timeout)).snapshot

    def audit(self, *, timeout: float) -> Verb[AuditReport]:
        """Have the controller audit its ledger."""
        return (yield from self.ask("queue.audit", calls.Nothing(), AuditReport, timeout=timeout))

    def clear_partition(self, *, partition: str, timeout: float) -> Verb[None]:
        """Forget all rows of a partition; tasks stay declared, and its samples can be created anew.

        Raises Fenced where a newer attempt of this creator has taken over.
        """
        request = calls.Clear(partition, self.attempt)
        yield from self.ask("queue.clear", request, calls.Done, timeout=timeout)

    def close_partition(self, *, partition: str, step: int, timeout: float) -> Verb[None]:
        """Mark the run complete: every sample of steps up to ``step`` should be finished; the audit checks it."""
        yield from self.ask("queue.close", calls.Close(partition, step), calls.Done, timeout=timeout)

    def ask(self, method: str, request: Struct, reply: type[R], *, timeout: float, peer: Peer = None) -> Verb[R]:
        """Call a controller until it answers."""
        deadline = self.clock() + timeout

        def attempt() -> Verb[R]:
            left = left_of(deadline, self.clock)
            answer, _ = yield from once(peer, method, request, reply, timeout=left)
            return answer

        return persist(attempt, what=f"{method} at {name_of(peer)}", timeout=timeout, clock=self.clock)

    def park(
        self,
        method: str,
        request: Callable[[float], Struct],
        reply: type[R],
        *,
        deadline: float,
        what: str,
        peer: Peer = None,
    ) -> Verb[R]:
        """Make once the call that ``request`` gives for the seconds it may park; again only if it was not answered."""

        def attempt() -> Verb[R]:
            wait_s = min(PARK_S, max(0.0, deadline - self.clock()))
            seconds = min(wait_s + GRACE_S, left_of(end, self.clock))
            answer: R
            answer, _ = yield Ask(peer, method, request(wait_s), reply, seconds)
            return answer

        end = deadline + GRACE_S
        return persist(attempt, what=what, timeout=left_of(end, self.clock), clock=self.clock)
