"""One sample, one group, and how far a task has come with them.

A row's ``state`` is where it stands for good: ``LIVE`` (lease tasks work on it, or it waits for the trainer), ``BOUND``
(it belongs to a slot of the running trainer attempt), ``WANTED`` (its bytes were lost; to be created again), or final.
What is ready, leased or done is told for each task by ``Work``.

There may be a million rows, so what many have in common they share: a ``Shape`` names the columns of all rows that got
the same ones in the same order, a ``Work`` serves all rows of a lease, and neither changes.

Invariants: a sample has one ``Row`` and that has one state; a row id belongs to one ``Row`` for ever, wherever it lies;
the rows of a group are put on one unit, and go to another together. Fields marked volatile are told by the units and
not by the ledger.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, NamedTuple

from msgspec import Struct

from asyncflow.flow.schedule import Window
from asyncflow.identity import NEWEST, SampleKey, home_of, unit_at
from asyncflow.queue.protocol.messages import TOKENS_TAG, Purpose, RowMeta, Tag
from asyncflow.queue.table.cells import Told


class State(enum.IntEnum):
    """Where a sample stands. CLEARED: a row of an open partition that its users have cleared."""

    LIVE = 0
    BOUND = 1
    WANTED = 2
    TRAINED = 3
    FILTERED = 4
    DROPPED = 5
    CLEARED = 6

    __hash__ = int.__hash__

    @property
    def final(self) -> bool:
        """Nothing more happens to it, unless a trainer resumes from an older checkpoint."""
        return self >= FINAL


FINAL: Final = State.TRAINED
"""The first of the final states."""
LETTERS = {State.TRAINED: "t", State.FILTERED: "f", State.DROPPED: "d"}
STATES = {letter: state for state, letter in LETTERS.items()}


class Work(Struct, frozen=True, gc=False):
    """How far a task has come with a row. lease, done: id of the lease in force or that completed it; 0 is none."""

    attempt: int = 0
    lease: int = 0
    done: int = 0


IDLE = Work()
ANY_VERSION = Window(0, NEWEST)
NO_WORK: dict[str, Work] = {}
NO_TAGS: dict[str, Tag] = {}
NO_SIZES: dict[str, int] = {}


class Shape:
    """The columns that a row has, in the order in which it got them."""

    __slots__ = ("_next", "has", "names")

    def __init__(self, names: tuple[str, ...] = ()) -> None:
        self.names = names
        self.has = frozenset(names)
        self._next: dict[tuple[str, ...], Shape] = {}

    def plus(self, names: tuple[str, ...]) -> Shape:
        """Return the shape of a row of this one that gets further columns."""
        shape = self._next.get(names)
        if shape is None:
            fresh = tuple(name for name in names if name not in self.has)
            shape = self._next[names] = self._next.setdefault(fresh, Shape(self.names + fresh)) if fresh else self
        return shape


class Row(Struct, eq=False):
    """One sample. lost: its bytes are gone although it is bound; moved: its home, 0 while it lies where it was put.

    work (by task), tags and partial are replaced and never changed, so that rows may share them.

    Volatile: shape and cells, the admitted columns and their bytes, as they were told or of this row alone; partial,
    bytes of what was given back unfinished; tokens, tags; here, whether its unit has told of it; since, when this
    controller learnt of it, on its clock.
    """

    group: Group
    sample: int
    row: int
    state: State
    shape: Shape
    since: float
    work: Mapping[str, Work]
    partial: Mapping[str, int]
    tags: dict[str, Tag]
    cells: Told | tuple[int, ...] = ()
    tokens: int = 0
    moved: int = 0
    lost: bool = False
    here: bool = False

    def present(self, names: tuple[str, ...], sizes: tuple[int, ...]) -> None:
        """Take note of columns that were admitted, in place of those of that name."""
        shape = self.shape.plus(names)
        if len(shape.names) == len(self.shape.names) + len(names):
            self.cells = self.own_cells + sizes
        elif names:
            known = self.columns | dict(zip(names, sizes, strict=True))
            self.cells = tuple([known[name] for name in shape.names])
        self.shape = shape
        self.here = True
        if self.partial:
            self.partial = {name: size for name, size in self.partial.items() if name not in names}

    def absent(self, shape: Shape) -> None:
        """Take note that its bytes are gone. shape: that of a row without columns."""
        self.shape, self.cells, self.partial, self.here = shape, (), NO_SIZES, False

    @property
    def own_cells(self) -> tuple[int, ...]:
        """Bytes of the columns of its shape."""
        return self.cells.of(self.row) if isinstance(self.cells, Told) else self.cells

    @property
    def columns(self) -> dict[str, int]:
        """Bytes of each admitted column."""
        return dict(zip(self.shape.names, self.own_cells, strict=True))

    @property
    def key(self) -> SampleKey:
        """The sample's name."""
        return SampleKey(self.group.serial, self.sample)

    @property
    def unit(self) -> int:
        """Index of the unit that holds it."""
        return unit_at(self.home)

    @property
    def home(self) -> int:
        """Where it lies: an incarnation of a unit, see ``identity.home``."""
        return self.moved or home_of(self.row)

    @property
    def meta(self) -> RowMeta:
        """The sample's description, with everything its writers have added so far."""
        group = self.group
        return RowMeta(
            partition=group.partition,
            serial=group.serial,
            sample=self.sample,
            step=group.step,
            purpose=group.purpose,
            min_version=group.window.oldest,
            max_version=group.window.newest,
            tokens=self.tokens,
            tags=self.tags,
        )

    @property
    def response_tokens(self) -> int:
        """Tokens of its response, as its writer tagged it."""
        return int(self.tags.get(TOKENS_TAG, 0))

    @property
    def weight(self) -> int:
        """Tokens of prompt and response, at least 1."""
        return max(1, self.tokens + self.response_tokens)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of every column that can be fetched."""
        return {**self.partial, **self.columns}


class Group(Struct, eq=False):
    """The samples of one prompt. rows: by sample number; all ``size`` of them, in whatever state."""

    partition: str
    purpose: Purpose
    serial: int
    size: int
    step: int
    window: Window
    rows: list[Row] = []

    @property
    def outcome(self) -> str:
        """A letter for each sample, once all are final; empty before, and for those of an open partition."""
        if not all(row.state.final for row in self.rows):
            return ""
        return "".join([LETTERS[row.state] for row in self.rows])


def new_row(group: Group, sample: int, row: int, state: State, shape: Shape, since: float) -> Row:
    """Return a row with which nothing has happened, and of which its unit has not told yet."""
    return Row(group, sample, row, state, shape, since, NO_WORK, NO_SIZES, NO_TAGS)


class Finished(NamedTuple):
    """All that is kept of a group whose samples are final."""

    step: int
    window: Window
    outcome: str
