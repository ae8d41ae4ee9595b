"""Readiness: the rows or groups that a task can have now.

A row is ready for a task when it lives, has every column that the task needs, and the task neither holds it nor has
completed it. A group is ready when at least one of its rows is and none stands in the way: every other one is done or
final.

Invariant: after ``refresh(group)`` the index agrees with the rows of that group. What changes often has a shorter way
to the same end: ``created``, ``freed`` and ``taken``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from asyncflow.flow.ready import ReadyIndex
from asyncflow.flow.schedule import VersionWindow
from asyncflow.queue.protocol.messages import TaskSpec
from asyncflow.queue.table.state import IDLE, Row, RowGroup, RowState, Shape

_READY: Final = 1
_PASSED: Final = 0
"""It is done or final: nothing more happens to it here."""
_BLOCKS: Final = -1
"""It is neither: its group has to wait for it."""


class TaskQueue:
    """The rows or groups that are ready for one task.

    by_group: whole groups only; leased: rows that it holds; busy: living rows that it holds or has completed.
    """

    def __init__(self, spec: TaskSpec) -> None:
        self.spec = spec
        self.index: ReadyIndex[Row | RowGroup] = ReadyIndex()
        self.by_group = spec.groups or spec.kind == "gang"
        self.leased = 0
        self.busy = 0
        self._name = spec.name
        self._needs = frozenset(spec.needs)
        self._suits: dict[Shape, bool] = {}
        self._keyed = spec.order == "key"
        self._steps: dict[int, VersionWindow] | None = {} if spec.kind == "gang" else None

    def suits(self, shape: Shape) -> bool:
        """Tell whether rows of ``shape`` have all that the task needs."""
        suits = self._suits.get(shape)
        if suits is None:
            suits = self._suits[shape] = self._needs <= shape.has
        return suits

    def has_ready(self, row: Row) -> bool:
        """Tell whether ``row`` is ready on its own."""
        return self._stand(row) == _READY

    def open_rows(self, group: RowGroup) -> list[Row]:
        """Return the rows of ``group`` that are ready on their own, by sample."""
        return [row for row, stand in self._stands(group.rows) if stand == _READY]

    def refresh(self, group: RowGroup) -> None:
        """Make the index agree with ``group``."""
        if not self.by_group:
            for row in group.rows:
                if self.has_ready(row):
                    self._add(row)
                else:
                    self.index.discard(row)
            return
        ready = 0
        for _, stand in self._stands(group.rows):
            if stand == _BLOCKS:
                self.index.discard(group)
                return
            ready += stand == _READY
        if ready:
            self.index.add(group, window=self._window(group), order=self._order(group, 0), weight=ready)
        else:
            self.index.discard(group)

    def created(self, rows: Sequence[Row]) -> None:
        """Take in new rows, which have all that the task needs; their groups differ in nothing but their serials."""
        if self.by_group or self._keyed:
            self.freed(rows)
        elif len(rows) == 1:
            self._add(rows[0])
        elif rows:
            window, order = self._place(rows[0])
            self.index.extend(rows, window=window, order=order)

    def freed(self, rows: Sequence[Row]) -> None:
        """Note that ``rows`` or their columns came to be there for this task."""
        if self.by_group:
            for group in dict.fromkeys([row.group for row in rows]):
                self.refresh(group)
            return
        ready = [row for row in rows if self.has_ready(row) and row not in self.index]
        if len(ready) == 1:
            self._add(ready[0])
            return
        for (window, order), alike in groupby(ready, self._place):
            self.index.extend(list(alike), window=window, order=order)

    def taken(self, rows: Sequence[Row]) -> None:
        """Note that ``rows`` are not ready any more: they are held or gone, and with them their groups' readiness."""
        self.index.discard_all({row.group for row in rows} if self.by_group else rows)

    def _add(self, row: Row) -> None:
        window, order = self._place(row)
        self.index.add(row, window=window, order=order)

    def _place(self, row: Row) -> tuple[VersionWindow, tuple[int, ...]]:
        return row.group.window, self._order(row.group, row.sample)

    def _stands(self, rows: Sequence[Row]) -> Iterator[tuple[Row, int]]:
        """Yield how each row stands on its own; those alike, as most of a group are, are looked at once."""
        known, stand = None, _PASSED
        for row in rows:
            if known is None or not (row.work is known.work and row.shape is known.shape and row.state is known.state):
                known, stand = row, self._stand(row)
            yield row, stand

    def _stand(self, row: Row) -> int:
        if row.state is not RowState.LIVE:
            return _PASSED if row.state.final else _BLOCKS
        work = row.work.get(self._name, IDLE)
        if work.done:
            return _PASSED
        return _READY if not work.lease and self.suits(row.shape) else _BLOCKS

    def _window(self, group: RowGroup) -> VersionWindow:
        if self._steps is None:
            return group.window
        window = self._steps.get(group.step)
        if window is None:
            window = self._steps[group.step] = VersionWindow(group.step, group.step)
        return window

    def _order(self, group: RowGroup, sample: int) -> tuple[int, ...]:
        return (group.serial, sample) if self._keyed else (group.step,)
