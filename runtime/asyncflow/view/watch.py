"""Shows a run while it goes on: a thread that asks the driver for its status and renders what it hears.

Invariant: whoever reads our output, slowly or not at all, never holds up the supervisor: this thread is the only one
that writes, and nobody waits for it for more than a second.
"""

from __future__ import annotations

import http.client
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError
from rich.console import Console
from rich.live import Live

from asyncflow.api.status import DriverStatus
from asyncflow.substrates.local.events import Event, Stopping
from asyncflow.substrates.local.record import Placed
from asyncflow.view.frame import Frame
from asyncflow.view.lines import event_line, metrics_line, news
from asyncflow.view.screen import screen
from asyncflow.view.summary import files_line, summary_table

_log = logging.getLogger(__name__)

_PERIOD_S = 0.5
_ANSWER_S = 2.0
_CLOSE_S = 1.0
_FILES = ("summary.json", "metrics.jsonl", "job.yaml", "checkpoints", "ledger", "logs")


class Watch:
    """The view of one run. ``event`` may be called from any thread and never blocks."""

    def __init__(
        self, *, name: str, folder: Path, http_port: int, placed: Callable[[], Sequence[Placed]], console: Console
    ) -> None:
        """Show nothing yet. http_port: of the driver on 127.0.0.1; placed: gives the processes as they are now."""
        self._name = name
        self._folder = folder
        self._http_port = http_port
        self._placed = placed
        self._console = console
        self._begun = time.monotonic()
        self._events: queue.SimpleQueue[tuple[float, Event | None]] = queue.SimpleQueue()
        self._status: DriverStatus | None = None
        self._thread = threading.Thread(target=self._show, name="view", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def event(self, event: Event) -> None:
        """Show what happened to a process."""
        self._events.put((time.monotonic(), event))

    def close(self) -> bool:
        """Show the end. False where nobody took our output in time, so that the thread still hangs in a write."""
        self._events.put((time.monotonic(), None))
        self._thread.join(_CLOSE_S + _ANSWER_S)
        return not self._thread.is_alive()

    def _show(self) -> None:
        try:
            if self._console.is_terminal and not self._console.is_dumb_terminal:
                self._show_live()
            else:
                self._show_lines()
            self._show_summary()
        except OSError as error:
            _log.warning("nobody reads the view any more (%s); the run goes on", error)

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
        self._print(f"{self._name}: files in {self._folder}, logs in {self._folder / 'logs'}")
        before = DriverStatus(phase="Pending")
        going, ending, told = True, False, False
        while going:
            going, events = self._collect()
            if not told and (placed := self._placed()) and all(each.http for each in placed):
                told = True
                self._print(metrics_line(placed))
            for at, event in events:
                ending = ending or isinstance(event, Stopping)
                if line := event_line(event):
                    self._print(line, at)
            status = self._frame().status
            if status is not None:
                for line in news(before, status, ending=ending):
                    self._print(line)
                before = status

    def _show_summary(self) -> None:
        summary = read_summary(self._folder / "summary.json")
        if summary is not None:
            self._console.print(summary_table(summary))
        there = [name for name in _FILES if (self._folder / name).exists()]
        self._console.print(files_line(str(self._folder), there), soft_wrap=True, markup=False)

    def _collect(self) -> tuple[bool, list[tuple[float, Event]]]:
        """Wait a period; give whether the run goes on, and what happened when."""
        events: list[tuple[float, Event]] = []
        until = time.monotonic() + _PERIOD_S
        while (left := until - time.monotonic()) > 0:
            try:
                at, event = self._events.get(timeout=left)
            except queue.Empty:
                break
            if event is None:
                return False, events
            events.append((at, event))
        return True, events

    def _frame(self) -> Frame:
        answer = ask(self._http_port)
        self._status = answer or self._status
        return Frame(
            name=self._name,
            folder=str(self._folder),
            elapsed_s=time.monotonic() - self._begun,
            status=self._status,
            reachable=answer is not None,
            placed=self._placed(),
        )

    def _stamped(self, line: str, at: float) -> str:
        return f"{at - self._begun:7.1f} s  {line}"

    def _print(self, line: str, at: float | None = None) -> None:
        self._console.file.write(f"{self._stamped(line, time.monotonic() if at is None else at)}\n")
        self._console.file.flush()


def ask(http_port: int) -> DriverStatus | None:
    """Ask the driver on this machine for its status; None where it does not answer in time, or nonsense."""
    connection = http.client.HTTPConnection("127.0.0.1", http_port, timeout=_ANSWER_S)
    try:
        connection.request("GET", "/v1/status")
        response = connection.getresponse()
        return DriverStatus.model_validate_json(response.read()) if response.status == http.HTTPStatus.OK else None
    except (OSError, http.client.HTTPException, ValidationError) as error:
        _log.debug("no status from the driver: %s", error)
        return None
    finally:
        connection.close()


def read_summary(path: Path) -> dict[str, Any] | None:
    """Read the driver's summary; None where it wrote none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return None
