"""Shows a queue that stands alone while it is served: where it is, when it is whole, and what happens to it."""

from __future__ import annotations

from typing import Any

from asyncflow.api.queue import QueueStatus
from asyncflow.plan.describe import size
from asyncflow.view.lines import event_line
from asyncflow.view.teller import Teller


class QueueWatch(Teller):
    """The view of one queue, in lines. address: that clients dial; units: how many storage units it shall have."""

    def __init__(self, *, address: str, units: int, **crew: Any) -> None:
        super().__init__(**crew)
        self._address = address
        self._units = units

    def _show(self) -> None:
        self._print_beginning()
        going, whole = True, False
        while going:
            going, events = self._collect()
            self._print_metrics()
            for at, event in events:
                if line := event_line(event):
                    self._print(line, at)
            status = self._ask(QueueStatus) if going else None
            if status is not None and (status.ready_units == self._units) != whole:
                whole = not whole
                self._print(self._line(status))

    def _line(self, status: QueueStatus) -> str:
        if status.ready_units < self._units:
            return f"{status.ready_units} of {self._units} storage units are there"
        units = "1 storage unit" if self._units == 1 else f"{self._units} storage units"
        return f"serving at {self._address}: {units}, room for {size(status.limit)}; Ctrl-C ends it"
