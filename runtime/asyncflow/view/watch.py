"""View of a run that somebody else started: ``asyncflow top``, from its folder or its driver's address.

It shows what the view of ``asyncflow run`` shows (``render.screen``), refreshed while the run goes on; where there is
no terminal, the same plain lines.

Invariant: nothing of the run is changed; the view ends with the run, by ``q``, or by Ctrl-C, and a terminal is left as
it was.
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
from asyncflow.local.asking import ask_at, ask_live
from asyncflow.local.folder import Placed, load_record
from asyncflow.view.pace import Paces
from asyncflow.view.render import OVER, Frame, idle_words, progress_lines, screen, still

PERIOD_S = 1.0
QUIET_S = 10.0
"""Most seconds without a line, where there is no terminal."""
LATELY_S, CAUSES_S = 30.0, 5.0
"""Seconds over which causes of idle time are shares, and after which they are read again."""
_MOST_KEYS = 64
"""Keys that are read at once."""
GONE_S = 15.0
"""Seconds without an answer after which a run is over, however it ended."""


class Watched(ABC):
    """A run that is looked at. url: of its driver's HTTP, "" where it has none."""

    def __init__(self) -> None:
        self._paces = Paces()
        self._status: DriverStatus | None = None
        self._began = time.monotonic()

    @property
    @abstractmethod
    def where(self) -> str:
        """Folder or address."""

    @abstractmethod
    def url(self) -> str:
        """Return where the driver answers now."""

    def placed(self) -> list[Placed]:
        """Return the processes that the supervisor of this machine has on record; none of those elsewhere."""
        return []

    def causes(self) -> Mapping[str, str]:
        """Return why each process was idle lately, by its name, as far as that is known."""
        return {}

    def over(self) -> bool:
        """Return whether the run is known to be over."""
        return False

    def frame(self) -> Frame:
        """Return the state of the run now."""
        url = self.url()
        status = ask_at(url, DriverStatus) if url else None
        self._status = status or self._status
        live = ask_live(url) if status is not None else None
        members = live.members if live is not None else []
        return Frame(
            name=live.name if live is not None else Path(self.where).name,
            folder=self.where,
            elapsed_s=max((member.age_s for member in members), default=time.monotonic() - self._began),
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
        self._read = -math.inf

    @property
    def where(self) -> str:
        """The folder."""
        return str(self._folder.absolute())

    def url(self) -> str:
        """Return what the record of placements says."""
        record = load_record(self._folder)
        return record.http if record is not None else ""

    def placed(self) -> list[Placed]:
        """Return the processes on record."""
        record = load_record(self._folder)
        return record.processes if record is not None else []

    def causes(self) -> Mapping[str, str]:
        """Return what the spans of the last ``LATELY_S`` seconds say, read anew every ``CAUSES_S`` seconds."""
        if time.monotonic() - self._read > CAUSES_S:
            spent = spent_of(self._folder, last_s=LATELY_S)
            self._causes = {name: idle_words(process) for name, process in spent.items()}
            self._read = time.monotonic()
        return self._causes

    def over(self) -> bool:
        """Return whether there is a summary, which is written at the end."""
        return (self._folder / SUMMARY).is_file()


class WatchedDriver(Watched):
    """A run anywhere, whose driver answers at an address."""

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
    """Show a run until it is over, or until q. once: one look only. Raises AsyncFlowError where nobody answers."""
    frame = run.frame()
    if not frame.reachable:
        hint = "asyncflow doctor DIR says what a run that is over leaves; a run that begins answers within seconds"
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
    before, answered, said = DriverStatus(phase="Pending"), time.monotonic(), time.monotonic()
    while True:
        frame = run.frame()
        answered = time.monotonic() if frame.reachable else answered
        lines = progress_lines(before, frame.status) if frame.status is not None else []
        if not lines and time.monotonic() - said > QUIET_S:
            lines = [still(frame.status) if frame.reachable else "the driver does not answer"]
        for line in lines:
            console.print(line, soft_wrap=True)
            said = time.monotonic()
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
    """Read keys of the terminal without Enter meanwhile, by calls that return those of so many seconds, "" for none."""
    descriptor = sys.stdin.fileno()

    def pressed(within_s: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], within_s)
        return os.read(descriptor, _MOST_KEYS).decode(errors="replace") if ready else ""

    usual = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, usual)


def _placed(role: str, index: int, attempt: int, http: str) -> Placed:
    return Placed(role=role, index=index, attempt=attempt, state="running", http=http)
