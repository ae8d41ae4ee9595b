"""Shows a run while it goes on: what the driver answers, as a live view or as lines."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
from rich.live import Live

from asyncflow.api.status import DriverStatus
from asyncflow.substrates.local.events import Stopping
from asyncflow.view.frame import Frame
from asyncflow.view.lines import event_line, news, still
from asyncflow.view.screen import screen
from asyncflow.view.summary import files_line, summary_table
from asyncflow.view.teller import Teller

_QUIET_S = 5.0
"""Most seconds of silence: with a period and a driver that is slow to answer it is never more than 10 s."""
_FILES = ("summary.json", "metrics.jsonl", "job.yaml", "checkpoints", "ledger", "logs")


class Watch(Teller):
    """The view of one run."""

    _status: DriverStatus | None = None

    def _show(self) -> None:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._show_live()
        else:
            self._show_lines()
        self._show_summary()

    def _show_live(self) -> None:
        with Live(console=self._console, auto_refresh=False) as live:
            going = True
            while going:
                going, events = self._collect()
                for at, event in events:
                    if line := event_line(event):
                        live.console.print(self._stamped(line, at), highlight=False, markup=False)
                live.update(screen(self._frame()), refresh=True)

    def _show_lines(self) -> None:
        self._print_beginning()
        before = DriverStatus(phase="Pending")
        going, ending = True, False
        while going:
            going, events = self._collect()
            self._print_metrics()
            for at, event in events:
                ending = ending or isinstance(event, Stopping)
                if line := event_line(event):
                    self._print(line, at)
            status = self._frame().status
            if status is not None:
                for line in news(before, status, ending=ending):
                    self._print(line)
                before = status
            if going and time.monotonic() - self._said > _QUIET_S:
                self._print("ending" if ending else still(status))

    def _show_summary(self) -> None:
        summary = read_summary(self._folder / "summary.json")
        if summary is not None:
            self._console.print(summary_table(summary))
        there = [name for name in _FILES if (self._folder / name).exists()]
        self._console.print(files_line(str(self._folder), there), soft_wrap=True, markup=False)

    def _frame(self) -> Frame:
        answer = self._ask(DriverStatus)
        self._status = answer or self._status
        return Frame(
            name=self._name,
            folder=str(self._folder),
            elapsed_s=time.monotonic() - self._begun,
            status=self._status,
            reachable=answer is not None,
            placed=self._placed(),
        )


def read_summary(path: Path) -> dict[str, Any] | None:
    """Read the driver's summary; None where it wrote none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return None
