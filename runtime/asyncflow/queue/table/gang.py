"""The trainer's ranks as one consumer: which rows make which slot of which step, and what a checkpoint has committed.

A step's groups are *bound* to it whole when the first of their rows goes into a slot; rows that did not fit wait in
``Step.carry`` for the next slot. A slot is decided once and then remembered, so that every rank sees the same one.
Ranks get about the same weight over the whole step (``flow.selection.balance``); where the task says ``groups``, all
rows of a group go to one rank in one slot, and where it says ``shared_tokens``, as many as the budget allows.

Invariants: a group is bound to its own step only; no row is in two slots; a rank's part of a slot is within the budget
unless it is a single row, or a single group where the task says ``groups``; the slot after which nothing of D_step
remains is ``last``, and only that one. The steps above ``committed`` can always be begun anew with the same samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Final, NamedTuple

from asyncflow.errors import Fenced, Refused
from asyncflow.flow.selection import balance
from asyncflow.queue.ledger.events import Slotted
from asyncflow.queue.protocol.messages import StepTotals, TaskSpec
from asyncflow.queue.table.state import FINAL, Group, Row, State

_AHEAD = 8
"""Slots that are dealt together, so that the ranks come out even."""
_BY_KEY: Final = attrgetter("group.serial", "sample")


_EVEN = 1.03
"""Ranks are even when the heaviest has at most this much of the mean; beyond, groups that may be cut are cut."""
_MOST_CUTS = 2
"""Most such cuts for each rank."""


class _Asked(NamedTuple):
    """What slots were dealt for. tokens: most weight of one rank's part of a slot; groups: of the step."""

    world: int
    tokens: int
    groups: int
    spec: TaskSpec


@dataclass(slots=True)
class Decision:
    """A slot: the rows of each rank, by key; totals: of the step so far."""

    ranks: list[list[Row]]
    last: bool
    totals: StepTotals


@dataclass(slots=True)
class Step:
    """D_step on its way through the trainer.

    groups, size: as it was opened; bound: by serial, in order of binding; carry: by id, what no slot has had.

    Volatile: plan, slots that were dealt but not decided, for what was asked as in ``planned``.
    """

    number: int
    groups: int | None = None
    size: int | None = None
    slots: list[Decision] = field(default_factory=list)
    bound: dict[int, Group] = field(default_factory=dict)
    carry: dict[int, Row] = field(default_factory=dict)
    ranks_done: set[int] = field(default_factory=set)
    plan: list[list[list[Row]]] = field(default_factory=list)
    planned: _Asked | None = None
    _loads: list[int] = field(default_factory=list)
    _counted: int = 0

    @property
    def exhausted(self) -> bool:
        """Its last slot was decided."""
        return bool(self.slots) and self.slots[-1].last

    @property
    def totals(self) -> StepTotals:
        """What its slots hold so far."""
        return self.slots[-1].totals if self.slots else StepTotals()

    def loads(self, world: int, spec: TaskSpec) -> list[int]:
        """Return the weight of what each rank has had so far."""
        if self._counted == 0 or len(self._loads) != world:
            self._loads, self._counted = [0] * world, 0
        for slot in self.slots[self._counted :]:
            for rank in range(world):
                self._loads[rank] += _weight(slot.ranks[rank], spec)
        self._counted = len(self.slots)
        return list(self._loads)

    def reset(self) -> list[Group]:
        """Forget slots, bindings and reports; give the groups that were bound."""
        groups = list(self.bound.values())
        self.slots, self.bound, self.carry, self.ranks_done = [], {}, {}, set()
        self._counted, self.plan = 0, []
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
        """Return D_number, which is known from now on."""
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
        """Return the slot if it was decided; refuse one that cannot be the next to decide."""
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
    step: Step, ready: Iterable[Group], *, count: int, world: int, tokens: int, spec: TaskSpec, partition: str
) -> Slotted | None:
    """Decide the next slot of ``step``, or give None while there is nothing to decide.

    ready: groups in the order in which they may be taken, read only as far as needed; count: how many there are;
    tokens: most weight of one rank; spec: of the gang, which may wait for all of D_step, or keep each group together.
    """
    if step.groups is None:
        return None
    room = step.groups - len(step.bound)
    if spec.order == "key" and count < room:
        return None
    if room > 0 and count == 0 and not step.carry:
        return None
    asked = _Asked(world, tokens, step.groups, spec)
    if step.planned != asked or not step.plan or not _takeable([row for rank in step.plan[0] for row in rank]):
        step.plan, step.planned = _plan(step, ready, asked, room, complete=count >= room), asked
    ranks = step.plan.pop(0) if step.plan else [[] for _ in range(world)]
    given = [row for rank in ranks for row in rank]
    begun = [group for group in dict.fromkeys([row.group for row in given]) if group.serial not in step.bound]
    bound = sorted([group.serial for group in begun])
    opened = len([row for group in begun for row in group.rows if row.state < FINAL])
    before = step.totals
    return Slotted(
        partition=partition,
        step=step.number,
        slot=len(step.slots),
        bound=bound,
        ranks=[[row.row for row in rank] for rank in ranks],
        last=len(given) == len(step.carry) + opened and len(bound) >= room,
        groups=before.groups + len(bound),
        samples=before.samples + len(given),
        response_tokens=before.response_tokens + sum([row.response_tokens for row in given]),
    )


def _plan(step: Step, ready: Iterable[Group], asked: _Asked, room: int, *, complete: bool) -> list[list[list[Row]]]:
    """Deal what is left over and what is ready to the next slots; return the rows of each rank for those that stand.

    complete: all groups of the step are ready or bound. As long as more may come, later slots are dealt anew with it.
    """
    left: dict[Group, list[Row]] = {}
    for row in step.carry.values():
        left.setdefault(row.group, []).append(row)
    pieces = [piece for rows in left.values() for piece in _pieces(rows, asked)]
    load = _weight(list(step.carry.values()), asked.spec)
    for group in islice(ready, max(0, room)):
        if load >= _AHEAD * asked.world * asked.tokens:
            complete = False
            break
        fresh = [row for row in group.rows if row.state < FINAL]
        pieces += _pieces(fresh, asked)
        load += _weight(fresh, asked.spec)
    if not pieces:
        return []
    slots = _deal(pieces, asked, before=step.loads(asked.world, asked.spec), cut=complete)
    return [
        [sorted([row for piece in given for row in piece], key=_BY_KEY) for given in slot]
        for slot in (slots if complete else slots[: max(1, len(slots) // 2)])
    ]


def _pieces(rows: list[Row], asked: _Asked) -> list[list[Row]]:
    """Return rows of one group as they are to be dealt: all together, each alone, or as many as fit into a slot."""
    if asked.spec.groups:
        return [rows]
    if not asked.spec.shared_tokens:
        return [[row] for row in rows]
    pieces: list[list[Row]] = []
    load = 0
    for row in rows:
        if not pieces or load + row.response_tokens > asked.tokens:
            pieces.append([])
            load = row.tokens
        pieces[-1].append(row)
        load += row.response_tokens
    return pieces


def _weight(rows: Sequence[Row], spec: TaskSpec) -> int:
    """Return the tokens of rows that one rank has in one slot, at least 1 for each row."""
    if not spec.shared_tokens:
        return sum([row.weight for row in rows])
    shared: dict[Group, int] = {}
    for row in rows:
        shared[row.group] = max(row.tokens, shared.get(row.group, 0))
    return max(len(rows), sum(shared.values()) + sum([row.response_tokens for row in rows]))


def _deal(pieces: list[list[Row]], asked: _Asked, *, before: Sequence[int], cut: bool) -> list[list[list[list[Row]]]]:
    """Deal pieces to slots and ranks.

    cut: groups that may be cut are, as long as ranks are uneven and it makes the heaviest lighter.
    """
    cuts = _MOST_CUTS * asked.world if cut and asked.spec.shared_tokens and not asked.spec.groups else 0
    best: list[list[list[list[Row]]]] = []
    lightest = 0
    for left in range(cuts, -1, -1):
        weights = [_weight(piece, asked.spec) for piece in pieces]
        dealt = balance(weights, ranks=asked.world, budget=asked.tokens, before=before)
        loads = [had + sum(weights[i] for slot in dealt for i in slot[rank]) for rank, had in enumerate(before)]
        most, mean = max(loads), sum(loads) / asked.world
        if best and most >= lightest:
            break
        best = [[[pieces[i] for i in indices] for indices in slot] for slot in dealt]
        lightest = most
        heaviest = loads.index(most)
        mine = [i for slot in dealt for i in slot[heaviest] if len(pieces[i]) > 1]
        if not left or most <= _EVEN * mean or not mine:
            break
        pieces = _cut(pieces, max(mine, key=weights.__getitem__), surplus=most - mean)
    return best


def _cut(pieces: Sequence[list[Row]], index: int, *, surplus: float) -> list[list[Row]]:
    """Return the pieces with one of them cut in two, the second of about ``surplus`` tokens beside the shared ones."""
    rows, load = list(pieces[index]), 0
    split = len(rows)
    while split > 1 and (split == len(rows) or load + rows[split - 1].response_tokens / 2 <= surplus):
        split -= 1
        load += rows[split].response_tokens
    return [*pieces[:index], rows[:split], rows[split:], *pieces[index + 1 :]]


def _takeable(rows: Sequence[Row]) -> bool:
    """Tell whether rows that were dealt can still be given: none was made again since, and their groups are whole."""
    if [row for row in rows if row.group.rows[row.sample] is not row or row.state >= FINAL]:
        return False
    live, bound = State.LIVE, State.BOUND
    groups = {row.group for row in rows if row.state is not bound}
    return not [row for group in groups for row in group.rows if row.state is not live and row.state < FINAL]
