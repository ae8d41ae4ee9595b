"""The calls about open rows: rows that are named by their ids or keys, and written, read and cleared without a lease.

Invariant: as in ``calls``, every call can be sent again after its answer was lost: each sets or tells what it says.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from asyncflow.queue.protocol.messages import Tag

WRITE = "write:"
"""What stands in place of a lease where there is none begins so; the rest is the writer's own name for the write."""

_Count = Annotated[int, Meta(ge=0)]


class Listing(Struct, frozen=True, array_like=True):
    """Rows of a partition, in the order in which they were put; keys: empty where a row has none; tags: the others."""

    rows: list[int]
    keys: list[str]
    tags: list[dict[str, Tag]]


class Sight(Struct, frozen=True, array_like=True):
    """What a look at rows shows, a place for each.

    ready: for the task that was named, now; leased, done: by it; attempts: how often it had the row before; lacks: the
    columns that the task needs and the row has not got; sizes: bytes by column, -1 where a row has not got it.
    """

    rows: list[int]
    keys: list[str]
    tags: list[dict[str, Tag]]
    ready: list[bool]
    leased: list[bool]
    done: list[bool]
    attempts: list[int]
    lacks: list[list[str]]
    sizes: dict[str, list[int]]


class Progress(Struct, frozen=True, kw_only=True):
    """How far the rows of a partition are with some columns, or with a task.

    rows: that there are; done: that have all of the columns, or that the task has completed; leased: that it holds;
    cleared: that were there and were cleared one by one; expected: that there will be, None if nobody said so.
    """

    rows: int
    done: int
    leased: int = 0
    cleared: int = 0
    expected: int | None = None

    @property
    def all(self) -> bool:
        """Every row that there is or will be is done; False where there is none. Cleared rows were done."""
        known = self.rows + self.cleared
        return 0 < known >= (self.expected or 0) and self.done == self.rows


class ListRows(Struct, frozen=True):
    """A question: the rows of a partition."""

    partition: str


class FindRows(Struct, frozen=True):
    """A question: the rows with these keys."""

    partition: str
    keys: list[str]


class Found(Struct, frozen=True):
    """The rows, 0 for a key that none has.

    lost: those of these keys whose rows were lost with their unit; unnamed: how many rows of the partition were lost
    that had no key, or whose keys are not known any more since the controller was restarted.
    """

    rows: list[int]
    lost: list[str] = []
    unnamed: int = 0


class Peek(Struct, frozen=True):
    """Look at rows as ``task`` (or nobody) sees them: at these, or at the first ``most`` of the partition."""

    partition: str
    task: str
    rows: list[int]
    most: _Count


class Reset(Struct, frozen=True):
    """Let a task, or all, have every row again."""

    partition: str
    task: str | None


class Expect(Struct, frozen=True):
    """So many rows will be put in all."""

    partition: str
    total: _Count


class ClearRows(Struct, frozen=True):
    """Forget rows for ever; those that are not there are passed over."""

    partition: str
    rows: list[int]


class AskProgress(Struct, frozen=True):
    """How many rows have these columns, or were completed by this task? One of the two is given."""

    partition: str
    columns: list[str]
    task: str


class Counted(Struct, frozen=True):
    """So many rows were changed."""

    rows: int


class ListPartitions(Struct, frozen=True):
    """A question: all partitions."""


class Partitions(Struct, frozen=True):
    """How many rows each partition has, by name, sorted."""

    rows: dict[str, int]
