"""Live display of a run, or of a queue that stands alone, on the terminal, as lines, or to a function.

Invariant: a reader who is slow, or does not read at all, never holds up the supervisor: the thread of the view is the
only one that writes, and it is not waited for for more than a few seconds.
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
from asyncflow.local.asking import ANSWER_S, ask, ask_live
from asyncflow.local.folder import Placed
from asyncflow.local.lifecycle import Event, Stopping
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

    name: of the job or queue; folder: where its files are; http_port: of the service of its first process, on
    127.0.0.1; placed: gives the processes as they are now.
    """

    stop: Callable[[], object]
    """Ends the run in order; set while it goes on, and called from the thread of the view."""

    def __init__(self, *, name: str, folder: Path, http_port: int, placed: Callable[[], Sequence[Placed]]) -> None:
        self._name = name
        self._folder = folder
        self._http_port = http_port
        self._placed = placed
        self._events: queue.SimpleQueue[tuple[float, Event | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="view", daemon=True)
        self.closed = False

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def event(self, event: Event) -> None:
        """Show what happened to a process."""
        self._events.put((time.monotonic(), event))

    def close(self) -> None:
        """Show the end. ``closed`` stays False where the thread hangs, in a write of output that is not read."""
        self._events.put((time.monotonic(), None))
        self._thread.join(_CLOSE_S + ANSWER_S)
        self.closed = not self._thread.is_alive()

    @abstractmethod
    def _show(self) -> None:
        """Show everything, until ``_collect`` says that it is over."""

    def _run(self) -> None:
        try:
            self._show()
        except OSError as error:
            _log.warning("the output of the view is read no more (%s); the run goes on", error)

    def _collect(self) -> tuple[bool, list[tuple[float, Event]]]:
        """Wait a period. Return whether the run goes on, and events with their times."""
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
        """Return the status of the first process; None where it says nothing that can be used."""
        return ask(self._http_port, shape)


class ProgressView(LiveView):
    """Calls ``progress`` with each new status of the driver. failure: what it raised, which ends the run."""

    def __init__(self, *, progress: Callable[[DriverStatus], None] | None, **options: Any) -> None:
        super().__init__(**options)
        self._progress = progress
        self.failure: BaseException | None = None

    def _show(self) -> None:
        before = DriverStatus()
        going = True
        while going:
            going, _ = self._collect()
            if self._progress is None or self.failure is not None or not going:
                continue
            status = self._ask(DriverStatus)
            if status is not None and status != before:
                before = status
                self._call(self._progress, status)

    def _call(self, progress: Callable[[DriverStatus], None], status: DriverStatus) -> None:
        try:
            progress(status)
        except BaseException as error:  # noqa: BLE001  the caller's code: the run is ended, and raises it
            self.failure = error
            with suppress(RuntimeError):  # the run has ended meanwhile
                self.stop()


class TextView(LiveView):
    """Live display as text on ``console``."""

    def __init__(self, *, console: Console, **options: Any) -> None:
        super().__init__(**options)
        self._console = console
        self._begun = self._said = time.monotonic()
        self._told_metrics = False

    def _print_beginning(self) -> None:
        """Print where files are."""
        self._print(f"{self._name}: files in {self._folder}, logs in {self._folder / 'logs'}")

    def _print_metrics(self) -> None:
        """Print once where each process serves its metrics, as soon as that is known."""
        placed = self._placed()
        if not self._told_metrics and placed and all(each.http for each in placed):
            self._told_metrics = True
            self._print(metrics_line(placed))

    def _stamped(self, line: str, at: float) -> str:
        return f"{at - self._begun:7.1f} s  {line}"

    def _print(self, line: str, at: float | None = None) -> None:
        self._console.file.write(f"{self._stamped(line, time.monotonic() if at is None else at)}\n")
        self._console.file.flush()
        self._said = time.monotonic()


_QUIET_S = 5.0
"""Most seconds of silence: with a period and a driver that is slow to answer it is never more than 10 s."""
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
            going = True
            while going:
                going, events = self._collect()
                for at, event in events:
                    if line := event_line(event):
                        live.console.print(self._stamped(line, at))
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
                for line in progress_lines(before, status, ending=ending):
                    self._print(line)
                before = status
            if going and time.monotonic() - self._said > _QUIET_S:
                self._print("ending" if ending else still(status))

    def _show_summary(self) -> None:
        summary = read_summary(self._folder / SUMMARY)
        if summary is not None:
            self._console.print(summary_table(summary))
        there = [name for name in _FILES if (self._folder / name).exists()]
        self._console.print(files_line(str(self._folder), there), soft_wrap=True)

    def _frame(self) -> Frame:
        answer = self._ask(DriverStatus)
        self._status = answer or self._status
        live = ask_live(f"http://127.0.0.1:{self._http_port}") if answer is not None else None
        members = live.members if live is not None else []
        return Frame(
            name=self._name,
            folder=str(self._folder),
            elapsed_s=time.monotonic() - self._begun,
            status=self._status,
            reachable=answer is not None,
            placed=self._placed(),
            members=members,
            paces=self._paces.look(members),
            queue=live.queue if live is not None else {},
        )


class StandaloneView(TextView, Generic[M]):
    """The view of what is served until it is told to end, in lines. address: that all dial; shape: of its status."""

    shape: type[M]

    def __init__(self, *, address: str, **options: Any) -> None:
        super().__init__(**options)
        self._address = address

    @abstractmethod
    def _line(self, status: M) -> str:
        """Return the line about how it is; it is printed when it is another than before."""

    def _show(self) -> None:
        self._print_beginning()
        going, said = True, ""
        while going:
            going, events = self._collect()
            self._print_metrics()
            for at, event in events:
                if line := event_line(event):
                    self._print(line, at)
            status = self._ask(self.shape) if going else None
            if status is not None and (told := self._line(status)) not in ("", said):
                said = told
                self._print(told)


class QueueView(StandaloneView[QueueStatus]):
    """The view of one queue. units: how many storage units it shall have."""

    shape = QueueStatus

    def __init__(self, *, units: int, **options: Any) -> None:
        super().__init__(**options)
        self._units = units
        self._whole = False

    def _line(self, status: QueueStatus) -> str:
        if status.ready_units < self._units:
            lacks, self._whole = self._whole, False
            return f"{status.ready_units} of {self._units} storage units are there" if lacks else ""
        self._whole = True
        units = "1 storage unit" if self._units == 1 else f"{self._units} storage units"
        return f"serving at {self._address}: {units}, room for {size(status.limit)}; Ctrl-C ends it"


class PublisherView(StandaloneView[DriverStatus]):
    """The view of one publisher."""

    shape = DriverStatus

    def _line(self, status: DriverStatus) -> str:
        waits = f"waiting for {status.waiting_for}" if status.waiting_for else ""
        if status.versions.bytes is None:
            return waits
        serving = f"serving θ_{status.version} at {self._address}: {size(status.versions.bytes)}; Ctrl-C ends it"
        return f"{serving}; {waits}" if waits else serving
