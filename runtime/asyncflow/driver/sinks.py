"""Processes that feed the sinks of a job, one for each sink: the driver starts them and notifies them of new lines.

Invariants: the driver waits for a sink only at the end of the run, and for a limited time; a sink that fails is
restarted after growing pauses and continues from its last position; each failure is counted, and logged if its message
differs from the previous one; a process that feeds a sink ends with the driver.
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
"""Seconds that sinks have at the end of a run to write the remaining lines."""
_FIRST_PAUSE_S = 2.0
_LONGEST_PAUSE_S = 600.0
_MOST_OUTPUT = 1000
"""Last bytes of a process's output in which the reason of its end is sought."""


class Sinks:
    """The sinks ``kinds`` of the job in the file ``job``, whose run is in ``folder``.

    failed: called with the kind of a sink after each of its failures.
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
        """Stop the processes when they have written all lines, or after ``within_s`` seconds.

        ``asyncflow sinks`` can write the remaining lines then.
        """
        self._closing.set()
        for process in self._running.values():
            if process.stdin is not None:
                process.stdin.close()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=within_s)
            for task in late:
                log.warning(
                    "%s is not done %g s after the end; asyncflow sinks can write the rest",
                    task.get_name(),
                    within_s,
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
        """Feed one sink until the end, and restart its process after a failure."""
        pause_s, logged = _FIRST_PAUSE_S, ""
        while True:
            try:
                failure = await self._feed(kind)
            except OSError as error:
                failure = f"its process cannot be started: {error}"
            if failure is None:
                return
            self._failed(kind)
            if failure != logged:
                log.warning("the sink %s failed; the run continues and will restart the sink: %s", kind, failure)
                logged = failure
            if self._closing.is_set():
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._closing.wait()
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _feed(self, kind: str) -> str | None:
        """Run the process of a sink to its end; return the message of its failure, None if it did not fail."""
        arguments = ["sinks", str(self._folder), "--job", str(self._job), "--kind", kind, "--follow"]
        process = self._running[kind] = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "asyncflow",
            *arguments,
            stdin=PIPE,
            stdout=PIPE,
            stderr=STDOUT,
            env={**os.environ, PARENT: str(os.getpid())},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        if self._closing.is_set():
            process.stdin.close()
        output = b""
        while more := await process.stdout.read(_MOST_OUTPUT):
            output = (output + more)[-_MOST_OUTPUT:]
        status = await process.wait()
        last = output.decode(errors="replace").strip().rpartition("\n")[2]
        return None if status == 0 else f"exit status {status}: {last}"
