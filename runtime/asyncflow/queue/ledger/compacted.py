"""The records of which a compacted ledger is made: pieces of the state that do not say how it came about.

Invariant: as for ``events``, records are only ever added, and fields only at the end of one with a default.
"""

from __future__ import annotations

from msgspec import Struct

from asyncflow.queue.protocol.messages import Purpose

OUTCOMES = {"t": "trained", "f": "filtered", "d": "dropped"}
"""What the letters of an outcome mean; there is one for each sample."""


class Kept(Struct, frozen=True, array_like=True, tag="kept"):
    """Compacted: an unfinished group. rows: (sample, row, state, lost, [(task, attempt, lease that completed it)])."""

    partition: str
    purpose: Purpose
    serial: int
    size: int
    step: int
    oldest: int
    newest: int
    rows: list[tuple[int, int, int, bool, list[tuple[str, int, int]]]]


class Alike(Struct, frozen=True, array_like=True, tag="alike"):
    """Groups of living open rows with which the same has happened; serials and row ids are consecutive, as in ``Put``.

    works: (task, attempt, lease that completed them).
    """

    partition: str
    serial: int
    groups: int
    size: int
    row: int
    works: list[tuple[str, int, int]]


class Finals(Struct, frozen=True, array_like=True, tag="final"):
    """Compacted: finished groups as (serial, step, oldest, newest, outcome); ``OUTCOMES`` has a letter a sample."""

    partition: str
    purpose: Purpose
    groups: list[tuple[int, int, int, int, str]]


class Ended(Struct, frozen=True, array_like=True, tag="ended"):
    """Compacted: finished groups of a step, as runs of (first serial, number of groups, outcome); see ``OUTCOMES``."""

    partition: str
    purpose: Purpose
    step: int
    oldest: int
    newest: int
    runs: list[tuple[int, int, str]]


class Clients(Struct, frozen=True, array_like=True, tag="clients"):
    """Compacted: clients of an open partition as (name, number, serials used as (first, end))."""

    partition: str
    clients: list[tuple[bytes, int, list[tuple[int, int]]]]


class Used(Struct, frozen=True, array_like=True, tag="used"):
    """Compacted: serials that clients without a name used, as (first, end), and what became of open rows now gone.

    Such clients are those of ledgers that have no ``Numbered``.
    """

    partition: str
    spans: list[tuple[int, int]]
    cleared: int = 0
    filtered: int = 0
    dropped: int = 0


class Acknowledged(Struct, frozen=True, array_like=True, tag="acks"):
    """Compacted: the leases that were completed last."""

    leases: list[int]


class Counted(Struct, frozen=True, array_like=True, tag="count"):
    """Compacted: rows that were reset and looked at, and rows cleared before all of the partition was last cleared."""

    partition: str
    resets: int
    peeked: int
    forgotten: int


class Again(Struct, frozen=True, array_like=True, tag="again"):
    """Compacted: how many rows were taken out of leases undone, and which attempts of the gang began."""

    partition: str
    returned: int
    attempts: list[int]
