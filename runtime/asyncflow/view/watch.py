"""View of a run that another process started: ``asyncflow top``, from its folder or its driver's address.

It shows the same screen as ``asyncflow run`` (``render.screen``), refreshed while the run is active; without a
terminal, it prints the same plain lines.

Invariants: the view does not affect the run. It ends with the run, by ``q`` or by Ctrl-C, and restores the terminal.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import sys
import termios
import time
import tty
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.live import Live

from asyncflow.api.status import DriverStatus
from asyncflow.doctor.reading import spent_of
from asyncflow.driver.journal import SUMMARY
from asyncflow.errors import AsyncFlowError
from asyncflow.local.http_client import ask_at, ask_live
from asyncflow.local.record import Placed, load_record
from asyncflow.view.pace import Paces
from asyncflow.view.render import OVER, Frame, idle_words, progress_lines, screen, still

PERIOD_S = 1.0
QUIET_S = 10.0
"""Seconds without output after which a line is printed, without a terminal."""
RECENT_S, CAUSES_S = 30.0, 5.0
"""Recent seconds over which causes of idle time are computed, and least seconds between two readings of the spans."""
_READ_INTERVAL = 20.0
"""Time between two readings of the spans, at least, as a multiple of the duration of the last one."""
_MOST_KEYS = 64
"""Most bytes of keyboard input in one read."""
GONE_S = 15.0
"""Seconds without an answer after which a run counts as ended."""


class Watched(ABC):
    """A run that is observed."""

    def __init__(self) -> None:
        self._paces = Paces()
        self._status: DriverStatus | None = None
        self._started = time.monotonic()

    @property
    @abstractmethod
    def where(self) -> str:
        """Folder or address."""

    @abstractmethod
    def url(self) -> str:
        """Return the current URL of the driver's HTTP service, "" if there is none."""

    def placed(self) -> list[Placed]:
        """Return the processes in the supervisor's record on this machine; empty for a run on another machine."""
        return []

    def causes(self) -> Mapping[str, str]:
        """Return the recent causes of idleness, as text by process name, if known."""
        return {}

    def over(self) -> bool:
        """Return whether the run is known to have ended."""
        return False

    def frame(self) -> Frame:
        """Return the current state of the run."""
        url = self.url()
        status = ask_at(url, DriverStatus) if url else None
        self._status = status or self._status
        live = ask_live(url) if status is not None else None
        members = live.members if live is not None else []
        return Frame(
            name=live.name if live is not None else Path(self.where).name,
            folder=self.where,
            elapsed_s=max((member.age_s for member in members), default=time.monotonic() - self._started),
            status=self._status,
            reachable=status is not None,
            placed=self.placed()
            or [_placed(member.role, member.index, member.attempt, member.http) for member in members],
            members=members,
            paces=self._paces.look(members),
            queue=live.queue if live is not None else {},
            causes=self.causes(),
        )


class WatchedFolder(Watched):
    """A run of this machine."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._causes: Mapping[str, str] = {}
        self._read_at = -math.inf

    @property
    def where(self) -> str:
        """The folder."""
        return str(self._folder.absolute())

    def url(self) -> str:
        """Return the URL in the record of placements."""
        record = load_record(self._folder)
        return record.http if record is not None else ""

    def placed(self) -> list[Placed]:
        """Return the recorded processes."""
        record = load_record(self._folder)
        return record.processes if record is not None else []

    def causes(self) -> Mapping[str, str]:
        """Return the causes in the spans of the last ``RECENT_S`` seconds; they are read every ``CAUSES_S`` seconds,
        less often if there are very many.
        """
        if (begun := time.monotonic()) >= self._read_at:
            spent = spent_of(self._folder, last_s=RECENT_S)
            self._causes = {name: idle_words(process) for name, process in spent.items()}
            now = time.monotonic()
            self._read_at = now + max(CAUSES_S, _READ_INTERVAL * (now - begun))
        return self._causes

    def over(self) -> bool:
        """Return whether the summary exists, which is written at the end."""
        return (self._folder / SUMMARY).is_file()


class WatchedDriver(Watched):
    """A run on any machine, observed through its driver's HTTP service."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url

    @property
    def where(self) -> str:
        """The address."""
        return self._url

    def url(self) -> str:
        """Return the address."""
        return self._url


def watch(run: Watched, *, console: Console, once: bool = False) -> None:
    """Show a run until it is over or q is pressed. Raises AsyncFlowError if its driver does not answer.

    once: whether to show only the current state.
    """
    frame = run.frame()
    if not frame.reachable:
        hint = "If the run has just started, try again in a few seconds; if it is over, see asyncflow doctor DIR"
        raise AsyncFlowError("no driver of a run answers", where=run.where, hint=hint)
    if once:
        time.sleep(PERIOD_S)
        console.print(screen(run.frame()))
    elif console.is_terminal and not console.is_dumb_terminal and sys.stdin.isatty():
        _show_screen(run, console)
    else:
        _show_lines(run, console)


def _show_screen(run: Watched, console: Console) -> None:
    with keys_pressed() as pressed, Live(console=console, auto_refresh=False, screen=True) as live:
        answered = time.monotonic()
        while True:
            frame = run.frame()
            answered = time.monotonic() if frame.reachable else answered
            live.update(screen(frame), refresh=True)
            if _ended(run, frame, answered) or "q" in pressed(PERIOD_S).lower():
                break
    console.print(screen(frame))


def _show_lines(run: Watched, console: Console) -> None:
    before, answered, printed = DriverStatus(phase="Pending"), time.monotonic(), time.monotonic()
    while True:
        frame = run.frame()
        answered = time.monotonic() if frame.reachable else answered
        lines = progress_lines(before, frame.status) if frame.status is not None else []
        if not lines and time.monotonic() - printed > QUIET_S:
            lines = [still(frame.status) if frame.reachable else "the driver does not answer"]
        for line in lines:
            console.print(line, soft_wrap=True)
            printed = time.monotonic()
        before = frame.status or before
        if _ended(run, frame, answered):
            return
        time.sleep(PERIOD_S)


def _ended(run: Watched, frame: Frame, answered: float) -> bool:
    if frame.reachable and frame.status is not None and frame.status.phase in OVER:
        return True
    return not frame.reachable and (run.over() or time.monotonic() - answered > GONE_S)


@contextlib.contextmanager
def keys_pressed() -> Iterator[Callable[[float], str]]:
    """Switch the terminal to unbuffered input; yield a function that waits for keys and returns them, "" for none.

    The argument of the function is the most seconds to wait. The terminal is restored at the end.
    """
    descriptor = sys.stdin.fileno()

    def pressed(within_s: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], within_s)
        return os.read(descriptor, _MOST_KEYS).decode(errors="replace") if ready else ""

    saved = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, saved)


def _placed(role: str, index: int, attempt: int, http: str) -> Placed:
    return Placed(role=role, index=index, attempt=attempt, state="running", http=http)
