"""One sample, one group, and how far a task has come with them.

A row's ``state`` is where it stands for good: ``LIVE`` (lease tasks work on it, or it waits for the trainer), ``BOUND``
(it belongs to a slot of the running trainer attempt), ``WANTED`` (its bytes were lost; to be created again), or final.
What is ready, leased or done is told for each task by ``Work``.

Invariants: a sample has one ``Row`` and that has one state; a row id belongs to one ``Row`` for ever; the rows of a
group whose bytes exist lie on one unit. Fields marked volatile are told by the units and not by the ledger.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncflow.flow.schedule import Window
from asyncflow.identity import RowPlace, SampleKey
from asyncflow.queue.messages import TOKENS_TAG, RowMeta, Tag


class State(enum.IntEnum):
    """Where a sample stands."""

    LIVE = 0
    BOUND = 1
    WANTED = 2
    TRAINED = 3
    FILTERED = 4
    DROPPED = 5

    @property
    def final(self) -> bool:
        """Nothing more happens to it, unless a trainer resumes from an older checkpoint."""
        return self >= State.TRAINED


LETTERS = {State.TRAINED: "t", State.FILTERED: "f", State.DROPPED: "d"}
STATES = {letter: state for state, letter in LETTERS.items()}


@dataclass(slots=True)
class Work:
    """How far a task has come with a row. lease, done: id of the lease in force or that completed it; 0 is none."""

    attempt: int = 0
    lease: int = 0
    done: int = 0


@dataclass(slots=True, eq=False)
class Row:
    """One sample. lost: its bytes are gone although it is bound.

    Volatile: columns, partial, bytes of each admitted column and of what was given back unfinished; tokens, tags; here,
    whether its unit has told of it.
    """

    group: Group
    sample: int
    row: int
    state: State = State.LIVE
    lost: bool = False
    work: dict[str, Work] = field(default_factory=dict)
    columns: dict[str, int] = field(default_factory=dict)
    partial: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    tags: dict[str, Tag] = field(default_factory=dict)
    here: bool = False

    @property
    def key(self) -> SampleKey:
        """The sample's name."""
        return SampleKey(self.group.serial, self.sample)

    @property
    def unit(self) -> int:
        """Index of the unit that holds it."""
        return RowPlace.of(self.row).unit

    @property
    def meta(self) -> RowMeta:
        """The sample's description, with everything its writers have added so far."""
        group = self.group
        return RowMeta(
            partition=group.partition,
            serial=group.serial,
            sample=self.sample,
            step=group.step,
            purpose="eval" if group.purpose == "eval" else "train",
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
        return self.partial | self.columns


@dataclass(slots=True, eq=False)
class Group:
    """The samples of one prompt. rows: by sample number; all ``size`` of them, in whatever state."""

    partition: str
    purpose: str
    serial: int
    size: int
    step: int
    window: Window
    rows: dict[int, Row] = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        """A letter for each sample, once all are final; empty before."""
        if not all(row.state.final for row in self.rows.values()):
            return ""
        return "".join(LETTERS[self.rows[sample].state] for sample in sorted(self.rows))


class Finished(NamedTuple):
    """All that is kept of a group whose samples are final."""

    step: int
    window: Window
    outcome: str
