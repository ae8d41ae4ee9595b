"""Live display of events and states to whoever reads our output.

Invariant: a reader who is slow, or does not read at all, never holds up the supervisor: the thread of the teller is the
only one that writes, and nobody waits for it for more than a few seconds.
"""

from __future__ import annotations

import http.client
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from rich.console import Console

from asyncflow.substrates.local.events import Event
from asyncflow.substrates.local.record import Placed
from asyncflow.view.lines import metrics_line

_log = logging.getLogger(__name__)

_PERIOD_S = 0.5
_ANSWER_S = 2.0
_CLOSE_S = 1.0

M = TypeVar("M", bound=BaseModel)


class Teller(ABC):
    """Shows events and states of one crew. ``event`` may be called from any thread and never blocks.

    name: of the job or queue; folder: where its files are; http_port: of the service of its first process, on
    127.0.0.1; placed: gives the processes as they are now.
    """

    def __init__(
        self, *, name: str, folder: Path, http_port: int, placed: Callable[[], Sequence[Placed]], console: Console
    ) -> None:
        self._name = name
        self._folder = folder
        self._http_port = http_port
        self._placed = placed
        self._console = console
        self._begun = self._said = time.monotonic()
        self._events: queue.SimpleQueue[tuple[float, Event | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="view", daemon=True)
        self._told_metrics = False

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

    @abstractmethod
    def _show(self) -> None:
        """Show everything, until ``_collect`` says that it is over."""

    def _run(self) -> None:
        try:
            self._show()
        except OSError as error:
            _log.warning("nobody reads the view any more (%s); the run goes on", error)

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

    def _ask(self, shape: type[M]) -> M | None:
        """Return the status of the first process; None where it does not answer in time, or answers nonsense."""
        connection = http.client.HTTPConnection("127.0.0.1", self._http_port, timeout=_ANSWER_S)
        try:
            connection.request("GET", "/v1/status")
            response = connection.getresponse()
            return shape.model_validate_json(response.read()) if response.status == http.HTTPStatus.OK else None
        except (OSError, http.client.HTTPException, ValidationError) as error:
            _log.debug("no status: %s", error)
            return None
        finally:
            connection.close()

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
