"""Readiness: the rows or groups that a task can claim now.

A row is ready for a task if it is live, has every column that the task needs, and the task has neither leased nor
completed it. A group is ready if at least one of its rows is ready and every other row is done or final.

Invariant: after ``refresh(group)`` the index agrees with the rows of that group. ``freed`` and ``taken`` are shorter
ways to the same result for frequent changes.
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

    by_group: only whole groups are ready; leased: number of leased rows; busy: number of live rows leased or completed.
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
        """Return whether ``row`` has all columns that the task needs."""
        return self.needs <= row.columns.keys()

    def has_ready(self, row: Row) -> bool:
        """Return whether ``row`` is ready, regardless of its group."""
        return row.state is RowState.LIVE and not row.work.get(self.spec.name, IDLE).busy and self.suits(row)

    def open_rows(self, group: RowGroup) -> list[Row]:
        """Return the rows of ``group`` that are ready, by sample."""
        return [row for row in group.rows if self.has_ready(row)]

    def refresh(self, group: RowGroup) -> None:
        """Update the index for ``group``."""
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
        """Note that ``rows``, or their columns, became available to this task."""
        if self.by_group:
            for group in dict.fromkeys([row.group for row in rows]):
                self.refresh(group)
            return
        ready = [row for row in rows if self.has_ready(row) and row not in self.index]
        for (window, order), alike in groupby(ready, lambda row: self._place(row.group, row)):
            self.index.extend(list(alike), window=window, order=order)

    def taken(self, rows: Sequence[Row]) -> None:
        """Note that ``rows``, which were leased or ended, are no longer ready, and neither are their groups."""
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
        """Return whether this task is finished with ``row``, which is done or final."""
        return row.state.final or (row.state is RowState.LIVE and row.work.get(self.spec.name, IDLE).done > 0)
