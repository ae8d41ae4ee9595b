"""The trainer's ranks as one consumer: the rows of each slot of each step, and the steps that checkpoints committed.

``flow.slots`` selects the rows of a slot.

Invariants: only the attempt started last changes anything. A commit of step k, or a start from θ_k, counts as proof
that all ranks finished step k, because a checkpoint that contains it exists. Exactly the slot after which nothing of
D_step remains is ``last``. The steps above ``committed`` can always be repeated with the same samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from asyncflow.errors import Fenced, Refused
from asyncflow.flow.schedule import VersionWindow
from asyncflow.flow.slots import SlotRequest, next_slot
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.ledger.events import SlotDecided
from asyncflow.queue.protocol.calls import AskSlot
from asyncflow.queue.protocol.messages import Slot, TaskSpec
from asyncflow.queue.table.apply import QueueState
from asyncflow.queue.table.leases import leased_rows
from asyncflow.queue.table.partition import PartitionState, Step
from asyncflow.queue.table.state import FINAL, RowGroup


class Training:
    """The gangs of all partitions."""

    def __init__(self, state: QueueState) -> None:
        self._state = state

    def open_step(self, partition: str, step: int, groups: int, size: int) -> None:
        """Set the number of groups of ``size`` samples of D_step; it may change until the last slot is decided."""
        where = f"{partition} step {step}"
        if step < 1 or groups < 0 or size < 1:
            raise Refused(f"a step of {groups} groups of {size} samples is not valid; steps count from 1", where=where)
        gang = self._state.partition(partition).gang
        known = gang.steps.get(step)
        if known is not None and (known.groups, known.size) == (groups, size):
            return
        if known is not None and (known.exhausted or groups < len(known.bound)):
            hint = "A step's size can change only until all of its samples are in slots"
            raise Refused(f"{len(known.bound)} groups are in slots already", where=where, hint=hint)
        if step <= gang.committed:
            raise Refused("the step is committed", where=where)
        self._state.record(ev.Opened(partition, step, groups, size))

    def exchange(self, partition: str, serial: int, step: int, late: int) -> None:
        """Move a group into D_step in exchange for ``late``; repeating the exchange has no effect."""
        known, where = self._state.partition(partition), f"{partition} step {step}"
        groups, held = known.groups, {one: step for step in known.gang.steps.values() for one in step.bound}
        pair = [groups[one] for one in (serial, late) if one in groups]
        if len(pair) < 2 or pair[0].window != pair[1].window:
            raise Refused(f"groups {serial} and {late} have ended, or are of different versions", where=where)
        if pair[0].step == step and pair[0].instead_of == late:
            return
        if pair[0].step == step:
            raise Refused(f"group {serial} is in that step already, but not in place of group {late}", where=where)
        if pair[1].step != step or {late, serial} & held.keys():
            raise Refused(f"group {late} is in step {pair[1].step}, or one of the two is in a slot", where=where)
        self._state.record(ev.Exchanged(partition, (serial, late)))

    def begin(self, partition: str, attempt: int, step: int, world: int) -> None:
        """Start an attempt of a trainer whose weights are θ_step; see ``QueueClient.begin``."""
        held, where = self._gang(partition), f"{partition} begin"
        gang = held.gang
        if attempt < 0 or step < 0 or world < 1:
            raise Refused(f"attempt {attempt}, step {step}, world {world} cannot be used", where=where)
        if attempt < gang.attempt:
            hint = "A newer attempt of the trainer runs; this one must end"
            raise Fenced(f"trainer attempt {attempt} is over, {gang.attempt} has started", where=where, hint=hint)
        if attempt == gang.attempt:
            if (step, world) != (gang.theta, gang.world):
                started = f"θ{gang.theta} and {gang.world} ranks"
                raise Refused(f"attempt {attempt} started with {started}, not θ{step} and {world}", where=where)
            return
        gang.check_contained(step, where=where)
        self._state.record(ev.Began(partition, attempt, step, world))

    def slot(self, ask: AskSlot) -> Slot | None:
        """Return what the rank trains in that slot, deciding the slot if possible; None if it cannot be decided yet."""
        step, slot = ask.step, ask.slot
        held, where = self._gang(ask.partition), f"{ask.partition} step {step} slot {slot}"
        held.gang.check_attempt(ask.attempt, where=where)
        decision = held.gang.check_slot(step, slot, ask.rank, where=where)
        if decision is None:
            queue, window = held.gang_queue, VersionWindow(step, step)
            assert queue is not None
            if [row for row in held.gang.step(step).carry.values() if not (row.reported or row.lost)]:
                return None
            event = decide(
                held.gang.step(step),
                (item for item in queue.index.in_order(window) if isinstance(item, RowGroup)),
                count=queue.index.count(window),
                world=held.gang.world,
                tokens=ask.tokens,
                spec=queue.spec,
                partition=ask.partition,
            )
            if event is None:
                return None
            self._state.record(event)
            decision = held.gang.step(step).slots[slot]
        rows = decision.ranks[ask.rank]
        if [row for row in rows if not (row.reported or row.lost)]:
            return None
        totals = decision.totals if decision.last else None
        return Slot(step=step, slot=slot, rows=leased_rows(rows), last=decision.last, totals=totals)

    def over(self, partition: str, step: int) -> bool:
        """Return whether the partition was closed before ``step``, so that the step never comes."""
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
        known = gang.steps.get(step)
        if known is None or not known.exhausted:
            raise Refused("not all of its samples are in slots", where=where)
        if rank not in known.ranks_done:
            self._state.record(ev.RankDone(partition, step, rank))

    def commit(self, partition: str, attempt: int, step: int) -> None:
        """Note that a checkpoint contains ``step``: rows of steps up to it are trained, and their bytes are freed."""
        held, where = self._gang(partition), f"{partition} commit {step}"
        held.gang.check_attempt(attempt, where=where)
        if step > held.gang.committed:
            held.gang.check_contained(step, where=where)
            self._state.record(ev.Committed(partition, step))

    def _gang(self, partition: str) -> PartitionState:
        held = self._state.partition(partition)
        if held.gang_queue is None:
            raise Refused("no gang task is declared", where=partition, hint="Declare a TaskSpec of kind gang first")
        return held


def decide(
    step: Step, ready: Iterable[RowGroup], *, count: int, world: int, tokens: int, spec: TaskSpec, partition: str
) -> SlotDecided | None:
    """Decide the next slot of ``step``, or return None if that is not possible yet.

    ready: groups in the order in which they may be taken, read only as far as needed; count: their number; tokens:
    weight limit of one rank; spec: the gang's task, which may wait for all of D_step, or keep each group together.
    """
    if step.groups is None:
        return None
    room = step.groups - len(step.bound)
    if spec.order == "key" and count < room:
        return None
    if room > 0 and count == 0 and not step.carry:
        return None
    fresh = ([row for row in group.rows if row.state < FINAL] for group in islice(ready, max(0, room)))
    request = SlotRequest(world, tokens, groups=spec.groups, shared=spec.shared_tokens)
    loads = step.loads(world, spec)
    selected = next_slot(list(step.carry.values()), fresh, request, before=loads, complete=count >= room)
    ranks = selected or [[] for _ in range(world)]
    taken = [row for rank in ranks for row in rank]
    new_groups = [group for group in dict.fromkeys([row.group for row in taken]) if group.serial not in step.bound]
    bound = sorted([group.serial for group in new_groups])
    opened = len([row for group in new_groups for row in group.rows if row.state < FINAL])
    before = step.totals
    return SlotDecided(
        partition=partition,
        step=step.number,
        slot=len(step.slots),
        bound=bound,
        ranks=[[row.row for row in rank] for rank in ranks],
        last=len(taken) == len(step.carry) + opened and len(bound) >= room,
        groups=before.groups + len(bound),
        samples=before.samples + len(taken),
        response_tokens=before.response_tokens + sum([row.response_tokens for row in taken]),
    )
