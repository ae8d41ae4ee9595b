"""The commands of the trainer's gang: open a step, begin an attempt, ask for slots, finish steps, commit them.

Invariants: only the attempt that began last changes anything; a commit or a beginning at θ_k is taken as the proof that
all ranks finished step k, because a checkpoint that holds it exists.
"""

from __future__ import annotations

from asyncflow.errors import Fenced, Refused
from asyncflow.flow.schedule import Window
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.protocol.lot import Slot
from asyncflow.queue.table.books import Books
from asyncflow.queue.table.gang import Step, decide
from asyncflow.queue.table.granted import lot_of_slot
from asyncflow.queue.table.partition import Partition
from asyncflow.queue.table.state import Group


class Training:
    """The gangs of all partitions."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def open_step(self, partition: str, step: int, groups: int, size: int) -> None:
        """Say how many groups of ``size`` samples reach the trainer in D_step; may change until the last slot."""
        where = f"{partition} step {step}"
        if step < 1 or groups < 0 or size < 1:
            raise Refused(f"a step of {groups} groups of {size} samples is none; steps count from 1", where=where)
        gang = self._books.partition(partition).gang
        known = gang.steps.get(step)
        if known is not None and (known.groups, known.size) == (groups, size):
            return
        if known is not None and (known.exhausted or groups < len(known.bound)):
            hint = "A step's size can change only until all of its samples have been handed out"
            raise Refused(f"{len(known.bound)} groups have been handed out already", where=where, hint=hint)
        if step <= gang.committed:
            raise Refused("the step is committed", where=where)
        self._books.record(ev.Opened(partition, step, groups, size))

    def begin(self, partition: str, attempt: int, step: int, world: int) -> None:
        """Let a trainer begin whose weights are θ_step; see ``QueueClient.begin``."""
        held, where = self._gang(partition), f"{partition} begin"
        gang = held.gang
        if attempt < 0 or step < 0 or world < 1:
            raise Refused(f"attempt {attempt}, step {step}, world {world} cannot be", where=where)
        if attempt < gang.attempt:
            hint = "A newer attempt of the trainer runs; this one must end"
            raise Fenced(f"trainer attempt {attempt} is over, {gang.attempt} has begun", where=where, hint=hint)
        if attempt == gang.attempt:
            if (step, world) != (gang.theta, gang.world):
                began = f"θ{gang.theta} and {gang.world} ranks"
                raise Refused(f"attempt {attempt} began with {began}, not θ{step} and {world}", where=where)
            return
        gang.check_contained(step, where=where)
        self._books.record(ev.Began(partition, attempt, step, world))

    def slot(self, partition: str, *, attempt: int, step: int, slot: int, rank: int, tokens: int) -> Slot | None:
        """Return what ``rank`` trains in that slot; decide it if that can be done now; None while it cannot."""
        held, where = self._gang(partition), f"{partition} step {step} slot {slot}"
        held.gang.check_attempt(attempt, where=where)
        decision = held.gang.check_slot(step, slot, rank, where=where)
        if decision is None:
            queue, window = held.gang_queue, Window(step, step)
            assert queue is not None
            if [row for row in held.gang.step(step).carry.values() if not (row.here or row.lost)]:
                return None
            event = decide(
                held.gang.step(step),
                (item for item in queue.index.in_order(window) if isinstance(item, Group)),
                count=queue.index.count(window),
                world=held.gang.world,
                tokens=tokens,
                spec=queue.spec,
                partition=partition,
            )
            if event is None:
                return None
            self._books.record(event)
            decision = held.gang.step(step).slots[slot]
        rows = decision.ranks[rank]
        if [row for row in rows if not (row.here or row.lost)]:
            return None
        lot = lot_of_slot(rows) if rows else None
        totals = decision.totals if decision.last else None
        return Slot(step=step, slot=slot, lot=lot, last=decision.last, totals=totals)

    def over(self, partition: str, step: int) -> bool:
        """Tell whether the partition was closed before ``step``, which then never comes."""
        held = self._gang(partition)
        known = held.gang.steps.get(step)
        return held.closed is not None and step > held.closed and (known is None or known.groups is None)

    def step_done(self, partition: str, attempt: int, step: int, rank: int) -> None:
        """Note that ``rank`` has finished the optimizer step."""
        held, where = self._gang(partition), f"{partition} step {step}"
        gang = held.gang
        gang.check_attempt(attempt, where=where)
        gang.check_rank(rank, where=where)
        if step <= gang.committed:
            return
        known = self._exhausted(held, step, where)
        if rank not in known.ranks_done:
            self._books.record(ev.RankDone(partition, step, rank))

    def commit(self, partition: str, attempt: int, step: int) -> None:
        """Note that a checkpoint contains ``step``: the rows of steps up to it are trained, their bytes freed."""
        held, where = self._gang(partition), f"{partition} commit {step}"
        held.gang.check_attempt(attempt, where=where)
        if step > held.gang.committed:
            held.gang.check_contained(step, where=where)
            self._books.record(ev.Committed(partition, step))

    def _gang(self, partition: str) -> Partition:
        held = self._books.partition(partition)
        if held.gang_queue is None:
            raise Refused("no gang task is declared", where=partition, hint="Declare a TaskSpec of kind gang first")
        return held

    def _exhausted(self, partition: Partition, step: int, where: str) -> Step:
        known = partition.gang.steps.get(step)
        if known is None or not known.exhausted:
            raise Refused("not all of its samples have been handed out", where=where)
        return known
