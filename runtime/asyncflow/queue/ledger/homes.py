"""Where rows lie, for the auditor: at the home of their ids, unless they moved, and which homes are lost.

Invariant: a row that moved away before its unit was lost is not lost with it.
"""

from __future__ import annotations

from asyncflow.identity import home, home_of
from asyncflow.queue.ledger import events as ev


class Homes:
    """The homes of all rows of a ledger."""

    def __init__(self) -> None:
        self._moved: dict[int, int] = {}
        self._lost: set[int] = set()

    def see(self, event: ev.Event) -> None:
        """Take note of what happened next."""
        if isinstance(event, ev.Moved):
            self._moved.update(dict.fromkeys(event.rows, event.home))
        elif isinstance(event, ev.UnitLost):
            self._lost.add(home(event.epoch, event.unit))
        elif isinstance(event, ev.SnapshotRows):
            for run in [run for groups in event.groups for run in groups.rows if run.moved]:
                self._moved.update(dict.fromkeys(range(run.row, run.row + run.count), run.moved))

    def lost(self, row: int) -> bool:
        """Tell whether a row lies at a home that is lost."""
        return self._moved.get(row, home_of(row)) in self._lost
