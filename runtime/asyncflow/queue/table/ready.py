"""Readiness: the rows or groups that a task can have now.

A row is ready for a task when it lives, has every column that the task needs, and the task neither holds it nor has
completed it. A group is ready when at least one of its rows is and none stands in the way: every other one is done or
final.

Invariant: after ``refresh(group)`` the index agrees with the rows of that group. What changes often has a shorter way
to the same end: ``freed`` and ``taken``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from asyncflow.flow.ready import ReadyIndex
from asyncflow.flow.schedule import VersionWindow
from asyncflow.flow.selection import ReadyItem, selection_of
from asyncflow.queue.protocol.messages import TaskSpec
from asyncflow.queue.table.state import IDLE, Row, RowGroup, RowState


class TaskQueue:
    """The rows or groups that are ready for one task.

    by_group: whole groups only; leased: rows that it holds; busy: living rows that it holds or has completed.
    """

    def __init__(self, spec: TaskSpec) -> None:
        self.spec = spec
        self.index: ReadyIndex[Row | RowGroup] = ReadyIndex()
        self.by_group = spec.groups or spec.kind == "gang"
        self.needs = frozenset(spec.needs)
        self._selection = selection_of(spec.order, where=f"task {spec.name}")
        self.leased = 0
        self.busy = 0

    def suits(self, row: Row) -> bool:
        """Tell whether ``row`` has all columns that the task needs."""
        return self.needs <= row.columns.keys()

    def has_ready(self, row: Row) -> bool:
        """Tell whether ``row`` is ready on its own."""
        return row.state is RowState.LIVE and not row.work.get(self.spec.name, IDLE).busy and self.suits(row)

    def open_rows(self, group: RowGroup) -> list[Row]:
        """Return the rows of ``group`` that are ready on their own, by sample."""
        return [row for row in group.rows if self.has_ready(row)]

    def refresh(self, group: RowGroup) -> None:
        """Make the index agree with ``group``."""
        if not self.by_group:
            self.index.discard_all([row for row in group.rows if not self.has_ready(row)])
            self.freed(group.rows)
            return
        ready = len(self.open_rows(group))
        if ready and ready + sum(map(self._is_over, group.rows)) == len(group.rows):
            window, order = self._place(group)
            self.index.add(group, window=window, order=order, weight=ready)
        else:
            self.index.discard(group)

    def freed(self, rows: Sequence[Row]) -> None:
        """Note that ``rows`` or their columns came to be there for this task."""
        if self.by_group:
            for group in dict.fromkeys([row.group for row in rows]):
                self.refresh(group)
            return
        ready = [row for row in rows if self.has_ready(row) and row not in self.index]
        for (window, order), alike in groupby(ready, lambda row: self._place(row.group, row)):
            self.index.extend(list(alike), window=window, order=order)

    def taken(self, rows: Sequence[Row]) -> None:
        """Note that ``rows`` are not ready any more: they are held or gone, and with them their groups' readiness."""
        self.index.discard_all({row.group for row in rows} if self.by_group else rows)

    def _place(self, group: RowGroup, row: Row | None = None) -> tuple[VersionWindow, tuple[int, ...]]:
        window = VersionWindow(group.step, group.step) if self.spec.kind == "gang" else group.window
        if self.spec.order == "fifo":
            return window, (group.step,)
        rows, sample = (group.rows, 0) if row is None else ([row], row.sample)
        version = min([each.number("version_min", otherwise=window.oldest) for each in rows])
        tokens = sum([each.weight for each in rows])
        return window, self._selection.rank(ReadyItem(group.step, group.serial, sample, version, tokens))

    def _is_over(self, row: Row) -> bool:
        """Tell whether nothing more happens to ``row`` here: it is done or final."""
        return row.state.final or (row.state is RowState.LIVE and row.work.get(self.spec.name, IDLE).done > 0)
