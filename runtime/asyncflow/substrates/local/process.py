"""Real processes, each the leader of its own session, whose end is told at once by the kernel (pidfd).

Invariants: a process is started from the main thread only (its leash hangs on the thread that started it); it is waited
for exactly once; it inherits no descriptor but its three; and when its end is reported, what it has started within its
session has ended with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from asyncflow.substrates.local import reaper
from asyncflow.substrates.local.exits import ExitStatus

_DEFAULTED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)
_SWEEP_S = 0.5


class Process:
    """A running process. ``pid`` is its process id, its process group and its session."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        on_exit: Callable[[ExitStatus], None],
        stdin: int | None = None,
    ) -> None:
        """Start ``argv`` with its output appended to ``log``; ``on_exit`` is called once, on the event loop.

        stdin: a file descriptor that becomes its input, nothing otherwise. Raises OSError where it cannot be started.
        """
        silence = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        actions: list[tuple[int, int, str, int, int] | tuple[int, int, int] | tuple[int, int]] = [
            silence if stdin is None else (os.POSIX_SPAWN_DUP2, stdin, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
            *((os.POSIX_SPAWN_CLOSE, descriptor) for descriptor in _inheritable()),
        ]
        self.pid = os.posix_spawnp(
            argv[0], list(argv), dict(env), file_actions=actions, setsid=True, setsigmask=(), setsigdef=_DEFAULTED
        )
        self.alive = True
        self._on_exit = on_exit
        self._pidfd = os.pidfd_open(self.pid)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pidfd, self._ended)

    def terminate(self) -> None:
        """Send the process SIGTERM, so that it ends in order; a stopped one is continued so that it can."""
        if self.alive:
            for number in (signal.SIGTERM, signal.SIGCONT):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """End the whole process group at once."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        reaper.sweep(mark=None, sessions={self.pid}, within_s=_SWEEP_S)
        _, wait_status = os.waitpid(self.pid, 0)
        self._reap_orphans()
        self.alive = False
        self._on_exit(ExitStatus.of(wait_status))

    def _reap_orphans(self) -> None:
        """Wait for the dead of the group, which became children of this process if it adopts orphans."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-self.pid, os.WNOHANG)[0]:
                pass


def _inheritable() -> list[int]:
    """Return the descriptors beyond the first three that whoever started us has left open for our children."""
    found = []
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if descriptor > 2 and os.get_inheritable(descriptor):
                found.append(descriptor)
    return found
