"""Live display of a run, a standalone queue or a publisher: on the terminal, as lines, or by calls of a function.

Invariant: a slow or blocked reader of the output never blocks the supervisor: only the thread of the view writes, and
the supervisor waits for that thread for a few seconds at most.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel
from rich.console import Console
from rich.live import Live

from asyncflow.api.queue import QueueStatus
from asyncflow.api.status import DriverStatus
from asyncflow.driver.journal import SUMMARY, read_summary
from asyncflow.local.http_client import ANSWER_S, ask, ask_live
from asyncflow.local.lifecycle import Event, Stopping
from asyncflow.local.record import Placed
from asyncflow.plan.describe import size
from asyncflow.view.pace import Paces
from asyncflow.view.render import (
    Frame,
    event_line,
    files_line,
    metrics_line,
    progress_lines,
    screen,
    still,
    summary_table,
)

_log = logging.getLogger(__name__)

_PERIOD_S = 0.5
_CLOSE_S = 1.0

M = TypeVar("M", bound=BaseModel)


class LiveView(ABC):
    """Live display of the processes of one job or queue. ``event`` may be called from any thread and never blocks.

    name: name of the job or queue; folder: folder of its files; http_port: port of the HTTP service of its first
    process, on 127.0.0.1; placed: returns the current state of the processes.
    """

    stop: Callable[[], object]
    """Ends the run in order; set while the run is active, and called from the thread of the view."""

    def __init__(self, *, name: str, folder: Path, http_port: int, placed: Callable[[], Sequence[Placed]]) -> None:
        self._name = name
        self._folder = folder
        self._http_port = http_port
        self._placed = placed
        self._events: queue.SimpleQueue[tuple[float, Event | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="view", daemon=True)
        self.closed = False

    def start(self) -> None:
        """Start the thread of the view."""
        self._thread.start()

    def event(self, event: Event) -> None:
        """Show an event of a process."""
        self._events.put((time.monotonic(), event))

    def close(self) -> None:
        """Show the end of the run. ``closed`` stays False if the thread is blocked in a write to a full pipe."""
        self._events.put((time.monotonic(), None))
        self._thread.join(_CLOSE_S + ANSWER_S)
        self.closed = not self._thread.is_alive()

    @abstractmethod
    def _show(self) -> None:
        """Display the run until ``_collect`` reports its end."""

    def _run(self) -> None:
        try:
            self._show()
        except OSError as error:
            _log.warning("the output of the view is no longer read (%s); the run continues", error)

    def _collect(self) -> tuple[bool, list[tuple[float, Event]]]:
        """Wait for a period. Return whether the run is active, and the new events with their times."""
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

    def _ask(self, shape: type[M]) -> M | None:
        """Return the status of the first process, or None without a valid answer."""
        return ask(self._http_port, shape)


class ProgressView(LiveView):
    """Calls ``progress`` with each new status of the driver. failure: the exception that it raised; it ends the run."""

    def __init__(self, *, progress: Callable[[DriverStatus], None] | None, **options: Any) -> None:
        super().__init__(**options)
        self._progress = progress
        self.failure: BaseException | None = None

    def _show(self) -> None:
        before = DriverStatus()
        active = True
        while active:
            active, _ = self._collect()
            if self._progress is None or self.failure is not None or not active:
                continue
            status = self._ask(DriverStatus)
            if status is not None and status != before:
                before = status
                self._call(self._progress, status)

    def _call(self, progress: Callable[[DriverStatus], None], status: DriverStatus) -> None:
        try:
            progress(status)
        except BaseException as error:  # noqa: BLE001  an error of the caller's code: it ends the run, and is raised there
            self.failure = error
            with suppress(RuntimeError):  # the run has already ended
                self.stop()


class TextView(LiveView):
    """Live display as text on ``console``."""

    def __init__(self, *, console: Console, **options: Any) -> None:
        super().__init__(**options)
        self._console = console
        self._started = self._printed = time.monotonic()
        self._metrics_printed = False

    def _print_folder(self) -> None:
        """Print the folders of files and logs."""
        self._print(f"{self._name}: files in {self._folder}, logs in {self._folder / 'logs'}")

    def _print_metrics(self) -> None:
        """Print the metrics address of each process once, as soon as all are known."""
        placed = self._placed()
        if not self._metrics_printed and placed and all(each.http for each in placed):
            self._metrics_printed = True
            self._print(metrics_line(placed))

    def _stamped(self, line: str, at: float) -> str:
        return f"{at - self._started:7.1f} s  {line}"

    def _print(self, line: str, at: float | None = None) -> None:
        self._console.file.write(f"{self._stamped(line, time.monotonic() if at is None else at)}\n")
        self._console.file.flush()
        self._printed = time.monotonic()


_QUIET_S = 5.0
"""Seconds without output after which a line is printed; with a slow driver, output pauses for less than 10 s."""
_FILES = ("summary.json", "metrics.jsonl", "samples", "job.yaml", "checkpoints", "ledger", "logs")


class RunView(TextView):
    """The view of one run."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._status: DriverStatus | None = None
        self._paces = Paces()

    def _show(self) -> None:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._show_live()
        else:
            self._show_lines()
        self._show_summary()

    def _show_live(self) -> None:
        with Live(console=self._console, auto_refresh=False) as live:
            active = True
            while active:
                active, events = self._collect()
                for at, event in events:
                    if line := event_line(event):
                        live.console.print(self._stamped(line, at))
                live.update(screen(self._frame()), refresh=True)

    def _show_lines(self) -> None:
        self._print_folder()
        before = DriverStatus(phase="Pending")
        active, ending = True, False
        while active:
            active, events = self._collect()
            self._print_metrics()
            for at, event in events:
                ending = ending or isinstance(event, Stopping)
                if line := event_line(event):
                    self._print(line, at)
            status = self._frame().status
            if status is not None:
                for line in progress_lines(before, status, ending=ending):
                    self._print(line)
                before = status
            if active and time.monotonic() - self._printed > _QUIET_S:
                self._print("ending" if ending else still(status))

    def _show_summary(self) -> None:
        summary = read_summary(self._folder / SUMMARY)
        if summary is not None:
            self._console.print(summary_table(summary))
        existing = [name for name in _FILES if (self._folder / name).exists()]
        self._console.print(files_line(str(self._folder), existing), soft_wrap=True)

    def _frame(self) -> Frame:
        answer = self._ask(DriverStatus)
        self._status = answer or self._status
        live = ask_live(f"http://127.0.0.1:{self._http_port}") if answer is not None else None
        members = live.members if live is not None else []
        return Frame(
            name=self._name,
            folder=str(self._folder),
            elapsed_s=time.monotonic() - self._started,
            status=self._status,
            reachable=answer is not None,
            placed=self._placed(),
            members=members,
            paces=self._paces.look(members),
            queue=live.queue if live is not None else {},
        )


class StandaloneView(TextView, Generic[M]):
    """The view of a standalone queue or publisher, as lines.

    address: address to which all processes connect; shape: type of its status.
    """

    shape: type[M]

    def __init__(self, *, address: str, **options: Any) -> None:
        super().__init__(**options)
        self._address = address

    @abstractmethod
    def _line(self, status: M) -> str:
        """Return the line about its state; it is printed when it has changed."""

    def _show(self) -> None:
        self._print_folder()
        active, printed = True, ""
        while active:
            active, events = self._collect()
            self._print_metrics()
            for at, event in events:
                if line := event_line(event):
                    self._print(line, at)
            status = self._ask(self.shape) if active else None
            if status is not None and (state := self._line(status)) not in ("", printed):
                printed = state
                self._print(state)


class QueueView(StandaloneView[QueueStatus]):
    """The view of one queue. units: wanted number of storage units."""

    shape = QueueStatus

    def __init__(self, *, units: int, **options: Any) -> None:
        super().__init__(**options)
        self._units = units
        self._complete = False

    def _line(self, status: QueueStatus) -> str:
        if status.ready_units < self._units:
            was_complete, self._complete = self._complete, False
            return f"{status.ready_units} of {self._units} storage units are ready" if was_complete else ""
        self._complete = True
        units = "1 storage unit" if self._units == 1 else f"{self._units} storage units"
        return f"serving at {self._address}: {units}, room for {size(status.limit)}; press Ctrl-C to end"


class PublisherView(StandaloneView[DriverStatus]):
    """The view of one publisher."""

    shape = DriverStatus

    def _line(self, status: DriverStatus) -> str:
        waits = f"waiting for {status.waiting_for}" if status.waiting_for else ""
        if status.versions.bytes is None:
            return waits
        serving = f"serving θ_{status.version} at {self._address}: {size(status.versions.bytes)}; press Ctrl-C to end"
        return f"{serving}; {waits}" if waits else serving
