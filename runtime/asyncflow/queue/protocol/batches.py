"""The rows of a claim or of a slot as they cross the socket: column by column."""

from __future__ import annotations

from msgspec import Struct

from asyncflow.identity import SampleKey
from asyncflow.queue.protocol.messages import LeasedRow, Purpose, RowMeta, StepTotals, Tag

ABSENT = -1
"""Stands for the bytes of a cell that is not there."""


class RowBatch(Struct, frozen=True, array_like=True, kw_only=True):
    """The rows of one lease, column by column; ``leased`` gives them one by one. Those of a slot have no lease.

    Each list has one entry for each row. sizes: bytes by column, ABSENT where a row has not got it.
    """

    partition: str
    purpose: Purpose
    lease: str
    until: float
    rows: list[int]
    serials: list[int]
    samples: list[int]
    attempts: list[int]
    steps: list[int]
    oldest: list[int]
    newest: list[int]
    tokens: list[int]
    tags: list[dict[str, Tag]]
    sizes: dict[str, list[int]]
    units: list[int]

    @property
    def keys(self) -> list[SampleKey]:
        """The sample that each row is."""
        return list(map(SampleKey, self.serials, self.samples))

    def leased(self) -> list[LeasedRow]:
        """Return the rows one by one, in the order in which they were granted; those of a slot by key."""
        return [
            LeasedRow(
                row=row,
                meta=RowMeta(
                    partition=self.partition,
                    serial=self.serials[index],
                    sample=self.samples[index],
                    step=self.steps[index],
                    purpose=self.purpose,
                    min_version=self.oldest[index],
                    max_version=self.newest[index],
                    tokens=self.tokens[index],
                    tags=self.tags[index],
                ),
                attempt=self.attempts[index],
                lease=self.lease,
                until=self.until,
                unit=self.units[index],
                bytes={name: sizes[index] for name, sizes in self.sizes.items() if sizes[index] != ABSENT},
            )
            for index, row in enumerate(self.rows)
        ]


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
    def rows(self) -> list[LeasedRow]:
        """The rows one by one."""
        return self.batch.leased() if self.batch is not None else []
