"""Keeps a reaper process beside the supervisor and tells it which sessions belong to the run.

Invariant: while this process lives, a reaper holds the other end of a pipe and has been told every session on the list;
when this process ends in whatever way, the pipe closes and the reaper ends what is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from pathlib import Path

from asyncflow.substrates.local import reaper
from asyncflow.substrates.local.exits import ExitStatus
from asyncflow.substrates.local.process import Process

_log = logging.getLogger(__name__)
_AGAIN_S = 1.0
_CLOSE_S = 2.0


class Watchdog:
    """The supervisor's side of the reaper. ``mark`` names the run in the environment of its processes."""

    def __init__(self, *, mark: str, log: Path) -> None:
        """Start the reaper; its own words, if it ever has any, go to ``log``."""
        self._mark = mark
        self._log_path = log
        self._sessions: set[int] = set()
        self._gone = asyncio.Event()
        self._closing = False
        self._start()

    def add(self, session: int) -> None:
        """A session began."""
        self._sessions.add(session)
        self._tell(f"+{session}\n")

    def remove(self, session: int) -> None:
        """A session is over and its number may be given to somebody else."""
        self._sessions.discard(session)
        self._tell(f"-{session}\n")

    async def close(self) -> None:
        """Let the reaper go; it looks once more for what is left."""
        self._closing = True
        os.close(self._pipe)
        try:
            await asyncio.wait_for(self._gone.wait(), _CLOSE_S)
        except TimeoutError:
            self._process.kill()

    def _start(self) -> None:
        theirs, self._pipe = os.pipe()
        argv = [sys.executable, "-I", "-S", str(Path(reaper.__file__)), self._mark]
        self._process = Process(argv, env=os.environ, log=self._log_path, on_exit=self._ended, stdin=theirs)
        os.close(theirs)
        for session in self._sessions:
            self._tell(f"+{session}\n")

    def _tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe, line.encode())

    def _ended(self, status: ExitStatus) -> None:
        if self._closing:
            self._gone.set()
            return
        _log.warning("the reaper ended (%s); starting another", status)
        asyncio.get_running_loop().call_later(_AGAIN_S, self._again)

    def _again(self) -> None:
        if self._closing:
            return
        os.close(self._pipe)
        try:
            self._start()
        except OSError as error:
            _log.warning("no other reaper can be started now: %s", error)
            asyncio.get_running_loop().call_later(_AGAIN_S, self._again)
