"""Rows between units: which of those here are on their way, and what is packed together for the way.

Invariants: nothing is written to a row while it is on its way; a row that is here, or comes here, is not looked for
elsewhere; the rows of a pack have the same columns in the same forms, and are promised the same.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from asyncflow.errors import AsyncFlowError, Elsewhere
from asyncflow.identity import home_of
from asyncflow.net.later import Later
from asyncflow.queue.protocol.unit_calls import MovedRows, Verdict
from asyncflow.queue.unit.blocks import Block
from asyncflow.queue.unit.holdings import Holdings

_Form = tuple[str, str]


@dataclass(slots=True)
class Pack:
    """Rows that go in one message. columns, partial: all that they have, and the unfinished ones among these."""

    columns: tuple[str, ...]
    partial: tuple[str, ...]
    outputs: Mapping[str, int]
    rows: list[int] = field(default_factory=list)
    nbytes: int = 0


class Transit:
    """The rows of a unit on their way to others. home: gives where the unit's own rows lie; where: its name."""

    def __init__(self, holdings: Holdings, *, home: Callable[[], int], where: str) -> None:
        self.leaving = False
        self._holdings = holdings
        self._home = home
        self._where = where
        self._frozen: frozenset[int] = frozenset()
        self._thawed: asyncio.Future[None] | None = None

    def freeze(self, rows: Iterable[int]) -> None:
        """Let nobody write to ``rows``, and to no others, until ``thaw``."""
        self.thaw()
        self._frozen = frozenset(rows)
        self._thawed = asyncio.get_running_loop().create_future()

    def thaw(self) -> None:
        """Let the rows that are still here be written to."""
        self._frozen = frozenset()
        if self._thawed is not None and not self._thawed.done():
            self._thawed.set_result(None)

    def blocks(self, rows: Sequence[int]) -> bool:
        """Tell whether some of ``rows`` cannot be written to here now."""
        return not self._frozen.isdisjoint(rows) or bool(self._away(rows))

    async def writable(self, rows: Sequence[int]) -> None:
        """Wait until ``rows`` can be written to here. Raises Elsewhere where some lie on another unit."""
        while True:
            await self.readable(rows)
            if self._thawed is None or self._frozen.isdisjoint(rows):
                return
            await asyncio.wait([self._thawed])

    async def readable(self, rows: Sequence[int]) -> None:
        """Wait until those of ``rows`` that come here have come. Raises Elsewhere where some lie on another unit."""
        while away := self._away(rows):
            coming = [
                put.verdict
                for put in self._holdings.puts
                if isinstance(put.entry, MovedRows) and not away.isdisjoint(put.rows)
            ]
            if not coming:
                hint = "The controller knows where they lie"
                raise Elsewhere(f"{len(away)} of {len(rows)} rows do not lie here", where=self._where, hint=hint)
            await _settled(coming[-1])

    def _away(self, rows: Sequence[int]) -> set[int]:
        """Return those that are not here and may be elsewhere: what was put here and never moved is gone for good."""
        here = self._holdings.rows
        if all(map(here.__contains__, rows)):
            return set()
        home = self._home()
        return {row for row in rows if (self.leaving or home_of(row) != home) and row not in here}

    async def decided(self, rows: Iterable[int] | None = None) -> None:
        """Wait until the controller has decided about everything that was written, to ``rows`` or at all."""
        asked = frozenset(rows) if rows is not None else None
        while pending := [
            put.verdict for put in self._holdings.puts if asked is None or not asked.isdisjoint(put.rows)
        ]:
            await _settled(pending[-1])

    def first(self, *, most: int, most_bytes: int) -> tuple[list[int], int]:
        """Return the first rows that are here, no more than said unless that is none, and their bytes."""
        rows: list[int] = []
        total = 0
        for number, block in self._holdings.rows.items():
            size = block.size(number)
            if rows and (len(rows) == most or total + size > most_bytes):
                break
            rows.append(number)
            total += size
        return rows, total

    def packs(self, rows: Iterable[int], *, most_bytes: int) -> Iterator[Pack]:
        """Yield those of ``rows`` that are here, in packs of no more bytes unless that is one row."""
        open_: dict[tuple[object, ...], Pack] = {}
        for number in rows:
            block = self._holdings.rows.get(number)
            if block is None:
                continue
            whole, partial = _forms(block, partial=False), _forms(block, partial=True)
            alike = (whole, partial, tuple(sorted(block.outputs.items())))
            size = block.size(number)
            pack = open_.get(alike)
            if pack is not None and pack.nbytes + size > most_bytes:
                yield open_.pop(alike)
                pack = None
            if pack is None:
                unfinished = tuple(name for name, _ in partial)
                columns = tuple(name for name, _ in whole) + unfinished
                pack = open_[alike] = Pack(columns, unfinished, block.outputs)
            pack.rows.append(number)
            pack.nbytes += size
        yield from open_.values()


async def _settled(verdict: Later[Verdict]) -> None:
    with contextlib.suppress(AsyncFlowError):
        await verdict


def _forms(block: Block, *, partial: bool) -> tuple[_Form, ...]:
    cells = block.cells.items()
    return tuple(sorted((name, of.parcel.cells.dtypes[name]) for name, of in cells if of.partial is partial))
