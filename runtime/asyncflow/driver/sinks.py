"""Processes that feed the sinks of a job, one for each: the driver starts them, and tells them when there is more.

Invariants: whatever a sink does, the driver waits for it at the end only, and there not long; a sink that fails is
tried again, ever more seldom, and goes on where it was; each failure is counted, and logged the first time and when
its words change; a process that feeds a sink ends with the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Callable, Sequence
from pathlib import Path

from asyncflow.process import PARENT

log = logging.getLogger(__name__)

CLOSE_S = 20.0
"""Seconds that sinks have at the end of a run to write what they lack."""
_FIRST_PAUSE_S = 2.0
_LONGEST_PAUSE_S = 600.0
_MOST_WORDS = 1000
"""Bytes of what a process said last that are looked at for the reason of its end."""


class Sinks:
    """The sinks ``kinds`` of the job in the file ``job``, whose run is in ``folder``.

    failed: called with the kind of a sink whenever it failed.
    """

    def __init__(self, kinds: Sequence[str], *, job: Path, folder: Path, failed: Callable[[str], None]) -> None:
        self._kinds = kinds
        self._job = job
        self._folder = folder
        self._failed = failed
        self._tasks: list[asyncio.Task[None]] = []
        self._running: dict[str, Process] = {}
        self._closing = asyncio.Event()

    def start(self) -> None:
        """Start one process for each sink."""
        self._tasks = [asyncio.create_task(self._keep(kind), name=f"sink {kind}") for kind in self._kinds]

    def notify(self) -> None:
        """Wake each process that feeds a sink: the files of the run have new lines."""
        for process in self._running.values():
            if process.stdin is not None and not process.stdin.is_closing():
                process.stdin.write(b"\n")

    async def close(self, *, within_s: float = CLOSE_S) -> None:
        """End the feeding once all is written, or after that time; what is missing then ``asyncflow sinks`` writes."""
        self._closing.set()
        for process in self._running.values():
            if process.stdin is not None:
                process.stdin.close()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=within_s)
            for task in late:
                log.warning(
                    "%s is not done %g s after the end: asyncflow sinks writes the rest", task.get_name(), within_s
                )
        await self.abandon()

    async def abandon(self) -> None:
        """Kill the processes that still run."""
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, kind: str) -> None:
        """Feed one sink until the end; start its process again where it fails."""
        pause_s, said = _FIRST_PAUSE_S, ""
        while True:
            try:
                words = await self._feed(kind)
            except OSError as error:
                words = f"its process cannot be started: {error}"
            if words is None:
                return
            self._failed(kind)
            if words != said:
                log.warning("the sink %s failed, the run goes on without it and tries again: %s", kind, words)
                said = words
            if self._closing.is_set():
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._closing.wait()
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _feed(self, kind: str) -> str | None:
        """Run the process of a sink to its end; return the words with which it failed, None where it did not."""
        words = ["sinks", str(self._folder), "--job", str(self._job), "--kind", kind, "--follow"]
        process = self._running[kind] = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "asyncflow",
            *words,
            stdin=PIPE,
            stdout=PIPE,
            stderr=STDOUT,
            env={**os.environ, PARENT: str(os.getpid())},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        if self._closing.is_set():
            process.stdin.close()
        said = b""
        while more := await process.stdout.read(_MOST_WORDS):
            said = (said + more)[-_MOST_WORDS:]
        status = await process.wait()
        last = said.decode(errors="replace").strip().rpartition("\n")[2]
        return None if status == 0 else f"exit status {status}: {last}"
