"""The rows of a claim or of a slot as they cross the socket: column by column, nothing where all have the default.

The bytes of a column's cells are one uint32, little-endian, for one row after another, or once where all rows have the
same: a cell came in one message, and none has 4 GiB.

Invariant: ``part(pack(sizes), first, rows)`` gives what each of these rows has; a list of a batch that is empty stands
for the default of every row.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from msgspec import Struct, field

from asyncflow.identity import NEWEST, SampleKey, units_of
from asyncflow.queue.protocol.messages import LeasedRow, Purpose, RowMeta, StagedRow, StepTotals, Tag
from asyncflow.rpc.columns import Jagged

ABSENT = (1 << 32) - 1
"""Stands for a cell that is not there."""

MOST_BYTES = ABSENT - 1
"""Bytes of the largest cell."""

_SIZE = 4


def pack(sizes: Sequence[int]) -> bytes:
    """Return the bytes of each row's cell in few bytes."""
    if len(sizes) == 1:
        return sizes[0].to_bytes(_SIZE, "little")
    return _short(struct.pack(f"<{len(sizes)}I", *sizes))


def packed(column: Jagged) -> bytes:
    """Return those of the values of a column."""
    if len(column) == 1:
        return column.values.nbytes.to_bytes(_SIZE, "little")
    return _short((column.lengths * column.values.itemsize).astype("<u4").tobytes())


def _short(sizes: bytes) -> bytes:
    return sizes[:_SIZE] if sizes == sizes[:_SIZE] * (len(sizes) // _SIZE) else sizes


def part(sizes: bytes, first: int, rows: int) -> Sequence[int]:
    """Return those of so many rows from ``first`` on."""
    if len(sizes) == _SIZE:
        return (int.from_bytes(sizes, "little"),) * rows
    return struct.unpack_from(f"<{rows}I", sizes, _SIZE * first)


def chosen_sizes(sizes: bytes, rows: Sequence[int]) -> bytes:
    """Return those of the rows with these indices, as they lie."""
    if alike(sizes):
        return sizes
    if isinstance(rows, range) and rows.step == 1:
        return sizes[_SIZE * rows.start : _SIZE * rows.stop]
    return b"".join([sizes[_SIZE * row : _SIZE * (row + 1)] for row in rows])


def alike(sizes: bytes) -> bool:
    """Tell whether all rows have the same."""
    return len(sizes) == _SIZE


def one(sizes: bytes) -> int:
    """Return what all rows have, where they are alike."""
    return int.from_bytes(sizes, "little")


def fit(sizes: bytes, rows: int) -> bool:
    """Tell whether they are those of so many rows."""
    return len(sizes) in (_SIZE, _SIZE * rows)


class RowBatch(Struct, frozen=True, array_like=True, kw_only=True):
    """The rows of one lease, column by column; ``leased`` gives them one by one. Those of a slot have no lease.

    rows, serials: one for each row; the other lists too, or empty where all rows have the default (0; for ``newest``
    NEWEST; no tags). sizes: bytes by column (see ``pack``), ABSENT where a row has not got it; units: where each row
    lies, or empty where all lie where their ids say.
    """

    partition: str
    purpose: Purpose
    lease: str
    until: float
    rows: list[int]
    serials: list[int]
    samples: list[int] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    oldest: list[int] = field(default_factory=list)
    newest: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    tags: list[dict[str, Tag]] = field(default_factory=list)
    sizes: dict[str, bytes] = field(default_factory=dict)
    units: list[int] = field(default_factory=list)

    @property
    def keys(self) -> list[SampleKey]:
        """The sample that each row is."""
        return list(map(SampleKey, self.serials, self.samples or [0] * len(self.rows)))

    @property
    def homes(self) -> list[int]:
        """The unit of each row."""
        return self.units or units_of(self.rows)

    def leased(self) -> list[LeasedRow]:
        """Return the rows of a lease, in the order in which they were granted."""
        attempts = self.attempts or [0] * len(self.rows)
        return [
            LeasedRow(row=row, meta=meta, attempt=attempt, lease=self.lease, until=self.until, unit=unit, bytes=held)
            for attempt, (row, meta, unit, held) in zip(attempts, self._described(), strict=True)
        ]

    def staged(self) -> list[StagedRow]:
        """Return the rows of a slot, by key."""
        return [StagedRow(row=row, meta=meta, unit=unit, bytes=held) for row, meta, unit, held in self._described()]

    def _described(self) -> Iterator[tuple[int, RowMeta, int, dict[str, int]]]:
        """Yield of each row its id, its description, its unit and the bytes of its columns."""
        count = len(self.rows)
        zeros = [0] * count
        samples, steps = self.samples or zeros, self.steps or zeros
        units = self.homes
        oldest, newest, tokens = self.oldest or zeros, self.newest or [NEWEST] * count, self.tokens or zeros
        sizes = {name: part(of, 0, count) for name, of in self.sizes.items()}
        for index, row in enumerate(self.rows):
            meta = RowMeta(
                partition=self.partition,
                serial=self.serials[index],
                sample=samples[index],
                step=steps[index],
                purpose=self.purpose,
                min_version=oldest[index],
                max_version=newest[index],
                tokens=tokens[index],
                tags=self.tags[index] if self.tags else {},
            )
            yield row, meta, units[index], {name: of[index] for name, of in sizes.items() if of[index] != ABSENT}


class Slot(Struct, frozen=True, kw_only=True):
    """One lockstep micro-batch of one rank. batch: its rows, None where there are none; last: D_step is exhausted,
    ``totals`` says what it held.
    """

    step: int
    slot: int
    batch: RowBatch | None
    last: bool
    totals: StepTotals | None = None

    @property
    def rows(self) -> list[StagedRow]:
        """The rows one by one."""
        return self.batch.staged() if self.batch is not None else []
