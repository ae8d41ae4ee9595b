"""The rows of a claim or of a slot as they cross the socket: column by column, nothing where all have the default.

Invariant: ``lot.shrunk().expanded()`` is ``lot``.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import Struct, field

from asyncflow.identity import NEWEST, SampleKey, units_of
from asyncflow.queue.protocol.messages import LeasedRow, Purpose, RowMeta, StagedRow, StepTotals, Tag
from asyncflow.queue.protocol.runs import expand, expand_equal, shrink, shrink_equal
from asyncflow.queue.protocol.sizes import ABSENT, part

_MANY = 32


class Lot(Struct, frozen=True, array_like=True, kw_only=True):
    """The rows of one lease, column by column; ``leased`` gives them one by one. Those of a slot have no lease.

    rows, serials: one for each row; the other lists too, or empty where all rows have the default (0; for ``newest``
    NEWEST; no tags). sizes: bytes by column (see ``sizes``), ABSENT where a row has not got it; units: where each row
    lies, or empty where all lie where their ids say. It crosses the socket ``shrunk``, which ``short`` says.
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
    short: bool = False
    units: list[int] = field(default_factory=list)

    @property
    def keys(self) -> list[SampleKey]:
        """The sample that each row is."""
        return list(map(SampleKey, self.serials, self.samples or [0] * len(self.rows)))

    @property
    def homes(self) -> list[int]:
        """The unit of each row."""
        return self.units or units_of(self.rows)

    def shrunk(self) -> Lot:
        """Return the same in few bytes, where there are many."""
        if len(self.rows) < _MANY:
            return self
        return msgspec.structs.replace(
            self,
            short=True,
            rows=shrink(self.rows),
            serials=shrink(self.serials),
            steps=shrink_equal(self.steps),
            oldest=shrink_equal(self.oldest),
            newest=shrink_equal(self.newest),
            units=shrink_equal(self.units),
        )

    def expanded(self) -> Lot:
        """Return what was ``shrunk``."""
        if not self.short:
            return self
        rows = list(expand(self.rows))
        return msgspec.structs.replace(
            self,
            short=False,
            rows=rows,
            serials=list(expand(self.serials)),
            steps=expand_equal(self.steps, len(rows)),
            oldest=expand_equal(self.oldest, len(rows)),
            newest=expand_equal(self.newest, len(rows)),
            units=expand_equal(self.units, len(rows)),
        )

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
    """One lockstep micro-batch of one rank. lot: its rows, None where there are none; last: D_step is exhausted,
    ``totals`` says what it held.
    """

    step: int
    slot: int
    lot: Lot | None
    last: bool
    totals: StepTotals | None = None

    @property
    def rows(self) -> list[StagedRow]:
        """The rows one by one."""
        return self.lot.staged() if self.lot is not None else []

    def shrunk(self) -> Slot:
        """Return the same in few bytes, where there are many rows."""
        lot = self.lot.shrunk() if self.lot is not None else None
        return self if lot is self.lot else msgspec.structs.replace(self, lot=lot)

    def expanded(self) -> Slot:
        """Return what was ``shrunk``."""
        lot = self.lot.expanded() if self.lot is not None else None
        return self if lot is self.lot else msgspec.structs.replace(self, lot=lot)
