"""The trainer's ranks as one consumer: which rows make which slot of which step, and what a checkpoint has committed.

A step's groups are *bound* to it whole when the first of their rows goes into a slot; rows that did not fit wait in
``Step.carry`` for the next slot. A slot is decided once and then remembered, so that every rank sees the same one.

Invariants: a group is bound to its own step only; no row is in two slots; the slot after which nothing of D_step
remains is ``last``, and only that one. The steps above ``committed`` can always be begun anew with the same samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from asyncflow.errors import Fenced, Refused
from asyncflow.flow.selection import balance
from asyncflow.queue.events import Slotted
from asyncflow.queue.messages import StepTotals
from asyncflow.queue.state import Group, Row


@dataclass(slots=True)
class Decision:
    """A slot: the rows of each rank, by key; totals: of the step so far."""

    ranks: list[list[Row]]
    last: bool
    totals: StepTotals


@dataclass(slots=True)
class Step:
    """D_step on its way through the trainer. groups, size: as it was opened; bound: by serial, in order of binding."""

    number: int
    groups: int | None = None
    size: int | None = None
    slots: list[Decision] = field(default_factory=list)
    bound: dict[int, Group] = field(default_factory=dict)
    carry: list[Row] = field(default_factory=list)
    ranks_done: set[int] = field(default_factory=set)

    @property
    def exhausted(self) -> bool:
        """Its last slot was decided."""
        return bool(self.slots) and self.slots[-1].last

    @property
    def totals(self) -> StepTotals:
        """What its slots hold so far."""
        return self.slots[-1].totals if self.slots else StepTotals()

    def reset(self) -> list[Group]:
        """Forget slots, bindings and reports; give the groups that were bound."""
        groups = list(self.bound.values())
        self.slots, self.bound, self.carry, self.ranks_done = [], {}, [], set()
        return groups


class Gang:
    """The trainer of one partition.

    attempt: -1 before the first ``begin``; theta: the step of the weights it began with; world: its number of ranks;
    committed: the newest step that a checkpoint holds.
    """

    def __init__(self) -> None:
        self.attempt = -1
        self.theta = 0
        self.world = 0
        self.committed = 0
        self.steps: dict[int, Step] = {}

    def step(self, number: int) -> Step:
        """Give D_number, which is known from now on."""
        if number not in self.steps:
            self.steps[number] = Step(number)
        return self.steps[number]

    def staged(self, step: Step) -> bool:
        """Tell whether all ranks have finished the step."""
        return step.exhausted and len(step.ranks_done) == self.world

    @property
    def last_staged(self) -> int:
        """The newest step that all ranks have finished."""
        return max((s.number for s in self.steps.values() if self.staged(s)), default=self.committed)

    def check_attempt(self, attempt: int, *, where: str) -> None:
        """Refuse a trainer that is not the one which began last."""
        if attempt < self.attempt:
            hint = "A newer attempt of the trainer runs; this one must end"
            raise Fenced(f"trainer attempt {attempt} is over, {self.attempt} has begun", where=where, hint=hint)
        if attempt > self.attempt:
            raise Refused(f"trainer attempt {attempt} has not begun", where=where, hint="Call begin first")

    def check_contained(self, step: int, *, where: str) -> None:
        """Refuse weights that hold steps of which the ledger does not know that all their rows were handed out."""
        for number in range(self.committed + 1, step + 1):
            known = self.steps.get(number)
            if known is None or not known.exhausted:
                raise Refused(
                    f"weights θ{step} contain step {number}, whose samples were never all handed out",
                    where=where,
                    hint="The ledger is older than the checkpoint: resume from an older checkpoint",
                )

    def check_slot(self, step: int, slot: int, rank: int, *, where: str) -> Decision | None:
        """Give the slot if it was decided; refuse one that cannot be the next to decide."""
        self.check_rank(rank, where=where)
        known = self.steps.get(step)
        slots = known.slots if known else []
        if 0 <= slot < len(slots):
            return slots[slot]
        before = self.steps.get(step - 1)
        if step <= self.committed or not (step == self.committed + 1 or (before and before.exhausted)):
            hint = f"Steps go one after another, and {self.committed} are committed"
            raise Refused(f"step {step} cannot be trained now", where=where, hint=hint)
        if slot != len(slots) or (known and known.exhausted):
            hint = (
                f"{len(slots)} slots were decided{' and the last was among them' if known and known.exhausted else ''}"
            )
            raise Refused(f"there is no slot {slot} in step {step}", where=where, hint=hint)
        return None

    def check_rank(self, rank: int, *, where: str) -> None:
        """Refuse a rank that the gang does not have."""
        if not 0 <= rank < self.world:
            raise Refused(f"there is no rank {rank} in a gang of {self.world}", where=where)


def decide(
    step: Step, ready: Iterator[Group], *, count: int, world: int, tokens: int, whole: bool, partition: str
) -> Slotted | None:
    """Decide the next slot of ``step``, or give None while there is nothing to decide.

    ready: groups in the order in which they may be taken, read only as far as needed; count: how many there are;
    tokens: most weight of one rank; whole: wait for all of D_step.
    """
    if step.groups is None:
        return None
    room = step.groups - len(step.bound)
    if whole and count < room:
        return None
    if room > 0 and count == 0 and not step.carry:
        return None
    rows = list(step.carry)
    load = sum(row.weight for row in rows)
    bound: list[int] = []
    while len(bound) < room and load < world * tokens and (group := next(ready, None)) is not None:
        fresh = [group.rows[sample] for sample in sorted(group.rows) if not group.rows[sample].state.final]
        bound.append(group.serial)
        rows += fresh
        load += sum(row.weight for row in fresh)
    dealt, left = balance([row.weight for row in rows], ranks=world, budget=tokens)
    ranks = [sorted((rows[index] for index in indices), key=lambda row: row.key) for indices in dealt]
    given = [row for rank in ranks for row in rank]
    before = step.totals
    return Slotted(
        partition=partition,
        step=step.number,
        slot=len(step.slots),
        bound=bound,
        ranks=[[row.row for row in rank] for rank in ranks],
        last=not left and len(bound) >= room,
        groups=before.groups + len(bound),
        samples=before.samples + len(given),
        response_tokens=before.response_tokens + sum(row.response_tokens for row in given),
    )
