"""The questions and orders of a client that go to the controller alone and move no columns.

The trainer's gang, the driver and whoever looks after leases use these; ``QueueClient`` adds the verbs that move rows.

Invariant: every call is made again until it is answered or its deadline is over, and may be (see ``calls``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from asyncflow.net.keys import Keys
from asyncflow.net.rpc import persist
from asyncflow.queue import calls
from asyncflow.queue.connections import Connections
from asyncflow.queue.messages import AuditReport, PartitionSnapshot, QueueStats, Slot, TaskSpec, Wanted

PARK_S = 10.0
"""Longest time that one call parks at the controller before it is made again."""

GRACE_S = 5.0
"""Time that the controller has to answer beyond the time for which a call parks."""


class ControlClient:
    """One process's client, as far as the controller goes; see ``QueueClient`` for the arguments."""

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
        self.worker = worker
        self.attempt = attempt
        self._peers = Connections(controller=controller, unit=unit, units=units, keys=keys)

    async def close(self) -> None:
        """Close all connections."""
        await self._peers.close()

    async def declare(self, tasks: Sequence[TaskSpec], *, timeout: float) -> None:
        """Make tasks known; again with the same changes nothing."""
        await self._peers.ask("queue.declare", calls.Declare(list(tasks)), calls.Done, timeout=timeout)

    async def renew(self, leases: Sequence[str], *, timeout: float) -> list[str]:
        """Begin the time of leases anew; give those that are in force."""
        request = calls.Renew(list(dict.fromkeys(leases)))
        return (await self._peers.ask("queue.renew", request, calls.Renewed, timeout=timeout)).leases

    async def open_step(self, *, partition: str, step: int, groups: int, group_size: int, timeout: float) -> None:
        """Say how many groups reach the trainer in D_step; may be changed until all of them were handed out."""
        request = calls.OpenStep(partition, step, groups, group_size)
        await self._peers.ask("queue.open_step", request, calls.Done, timeout=timeout)

    async def begin(self, *, partition: str, attempt: int, step: int, world: int, timeout: float) -> None:
        """Say that a trainer begins whose weights are θ_step; every rank may say it.

        Rows of steps up to ``step`` are committed, those of later steps can be had again; older attempts are fenced.
        Raises Fenced if a newer attempt has begun, Refused if θ_step holds samples that were never handed out.
        """
        request = calls.Begin(partition, attempt, step, world)
        await self._peers.ask("queue.begin", request, calls.Done, timeout=timeout)

    async def slot(
        self, *, partition: str, attempt: int, step: int, slot: int, rank: int, tokens: int, timeout: float
    ) -> Slot | None:
        """Give what ``rank`` trains in a slot, the same whenever it is asked; None if nothing was ready in time.

        tokens: most tokens of one rank in the slot (a longer sample goes alone). Slots are asked for in order.
        """
        deadline = now() + timeout

        async def attempt_once() -> calls.Slotted:
            wait_s = min(PARK_S, max(0.0, deadline - now()))
            request = calls.AskSlot(partition, attempt, step, slot, rank, tokens, wait_s)
            return await self._peers.ask_once("queue.slot", request, calls.Slotted, timeout=wait_s + GRACE_S)

        while True:
            what, left = f"slot {slot} of step {step}", max(0.0, deadline - now())
            answer = await persist(attempt_once, what=what, timeout=left + GRACE_S)
            if answer.slot is not None or now() >= deadline:
                return answer.slot

    async def step_done(self, *, partition: str, attempt: int, step: int, rank: int, timeout: float) -> None:
        """Say that ``rank`` has finished the optimizer step; the step is staged when all have."""
        request = calls.StepDone(partition, attempt, step, rank)
        await self._peers.ask("queue.step_done", request, calls.Done, timeout=timeout)

    async def commit(self, *, partition: str, attempt: int, step: int, timeout: float) -> None:
        """Say that a checkpoint holds all steps up to ``step``: their rows are trained and their bytes freed."""
        request = calls.Commit(partition, attempt, step)
        await self._peers.ask("queue.commit", request, calls.Done, timeout=timeout)

    async def wanted(self, *, partition: str, known: int, timeout: float) -> Wanted:
        """Give the samples to be created again, as soon as their revision is not ``known``, or after ``timeout``."""
        deadline = now() + timeout

        async def attempt() -> Wanted:
            wait_s = min(PARK_S, max(0.0, deadline - now()))
            request = calls.AskWanted(partition, known, wait_s)
            return await self._peers.ask_once("queue.wanted", request, Wanted, timeout=wait_s + GRACE_S)

        while True:
            left = max(0.0, deadline - now())
            wanted = await persist(attempt, what=f"what {partition} wants", timeout=left + GRACE_S)
            if wanted.revision != known or now() >= deadline:
                return wanted

    async def expire(self, *, worker: str, timeout: float) -> None:
        """Say that a worker is dead: its leases end now."""
        await self._peers.ask("queue.expire", calls.Expire(worker), calls.Done, timeout=timeout)

    async def stats(self, *, timeout: float) -> QueueStats:
        """Give the counts of now."""
        return await self._peers.ask("queue.stats", calls.Nothing(), QueueStats, timeout=timeout)

    async def take_over(self, *, partition: str, timeout: float) -> None:
        """Say that this attempt of the partition's creator begins.

        From now on, across restarts of the controller, nothing that an older one created is admitted, although it may
        have been under way all the time. Raises Fenced if a newer attempt has taken over.
        """
        request = calls.TakeOver(partition, self.attempt)
        await self._peers.ask("queue.take_over", request, calls.Done, timeout=timeout)

    async def snapshot(self, *, partition: str, timeout: float) -> PartitionSnapshot:
        """Give how far a partition has come."""
        request = calls.InPartition(partition)
        return (await self._peers.ask("queue.snapshot", request, calls.Snapshot, timeout=timeout)).snapshot

    async def audit(self, *, timeout: float) -> AuditReport:
        """Have the controller audit its ledger."""
        return await self._peers.ask("queue.audit", calls.Nothing(), AuditReport, timeout=timeout)

    async def clear_partition(self, *, partition: str, timeout: float) -> None:
        """Forget all rows of a partition; tasks stay declared, and its samples can be created anew.

        Raises Fenced where a newer attempt of this creator has taken over.
        """
        request = calls.Clear(partition, self.attempt)
        await self._peers.ask("queue.clear", request, calls.Done, timeout=timeout)

    async def close_partition(self, *, partition: str, step: int, timeout: float) -> None:
        """Mark the run complete: every sample of steps up to ``step`` should be finished; the audit checks it."""
        await self._peers.ask("queue.close", calls.Close(partition, step), calls.Done, timeout=timeout)


def now() -> float:
    """The running loop's clock, in seconds."""
    return asyncio.get_running_loop().time()
