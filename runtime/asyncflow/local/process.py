"""Child processes, each the leader of its own session, and the reaper process that ends them if this one is killed.

Invariants:

* A process is started from the main thread only, since it dies with the thread that started it. It is waited for
  exactly once, and inherits no descriptors except the standard three.
* The kernel reports the end of a process immediately (pidfd). When ``on_exit`` is called, all processes in the session
  of the ended process have been killed.
* While this process lives, a reaper holds the read end of a pipe, through which it receives each session id. When this
  process ends, for whatever reason, the pipe closes, and the reaper kills the remaining processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from asyncflow.local import reaper
from asyncflow.local.lifecycle import ExitStatus

_log = logging.getLogger(__name__)

_DEFAULT_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)
_SWEEP_S = 0.5
_REAP_S = 0.1

_RESTART_S = 1.0
_CLOSE_S = 2.0


class Process:
    """A running child of this process. ``pid`` is its process id, process group id and session id."""

    def __init__(self, pid: int, *, on_exit: Callable[[ExitStatus], None]) -> None:
        """Watch the child ``pid``, a session leader; ``on_exit`` is called once, on the event loop."""
        self.pid = pid
        self.alive = True
        self._on_exit = on_exit
        self._pidfd = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pidfd, self._ended)

    @classmethod
    def spawn(
        cls,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        on_exit: Callable[[ExitStatus], None],
        stdin: int | None = None,
    ) -> Process:
        """Start ``argv`` with its output appended to ``log``, and watch it.

        stdin: file descriptor for its standard input; None for /dev/null. Raises OSError if it cannot be started.
        """
        no_input = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        actions: list[tuple[int, int, str, int, int] | tuple[int, int, int] | tuple[int, int]] = [
            no_input if stdin is None else (os.POSIX_SPAWN_DUP2, stdin, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
            *((os.POSIX_SPAWN_CLOSE, descriptor) for descriptor in _inheritable()),
        ]
        pid = os.posix_spawnp(
            argv[0], list(argv), dict(env), file_actions=actions, setsid=True, setsigmask=(), setsigdef=_DEFAULT_SIGNALS
        )
        return cls(pid, on_exit=on_exit)

    def terminate(self) -> None:
        """Send SIGTERM, so that the process shuts down in order, and SIGCONT, in case it is stopped."""
        if self.alive:
            for number in (signal.SIGTERM, signal.SIGCONT):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Kill the whole process group immediately."""
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
        """Wait for the dead processes of the session, which became children of this process if it adopts orphans.

        Repeat while some are left: the kernel reports a killed process only after its last thread has ended.
        """
        left = False
        for pid in reaper.pids():
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                left |= os.getsid(pid) == self.pid and not os.waitpid(pid, os.WNOHANG)[0]
        if left:
            self._loop.call_later(_REAP_S, self._reap_orphans)


def _inheritable() -> list[int]:
    """Return the inheritable descriptors of this process except the standard three."""
    found = []
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if descriptor > 2 and os.get_inheritable(descriptor):
                found.append(descriptor)
    return found


class Watchdog:
    """The supervisor's side of the reaper. ``mark`` names the run in the environment of its processes."""

    def __init__(self, *, mark: str, log: Path) -> None:
        """Start the reaper, whose output is appended to ``log``."""
        self._mark = mark
        self._log_path = log
        self._sessions: set[int] = set()
        self._exited = asyncio.Event()
        self._closing = False
        self._start()

    def add(self, session: int) -> None:
        """Add a session that the reaper must end."""
        self._sessions.add(session)
        self._send(f"+{session}\n")

    def remove(self, session: int) -> None:
        """Remove a session that has ended, whose id may be reused."""
        self._sessions.discard(session)
        self._send(f"-{session}\n")

    async def close(self) -> None:
        """End the reaper, which kills the remaining processes of the run first."""
        self._closing = True
        os.close(self._pipe)
        try:
            await asyncio.wait_for(self._exited.wait(), _CLOSE_S)
        except TimeoutError:
            self._process.kill()

    def _start(self) -> None:
        read_end, write_end = os.pipe()
        argv = [sys.executable, "-I", "-S", str(Path(reaper.__file__)), self._mark]
        try:
            self._process = Process.spawn(argv, env=os.environ, log=self._log_path, on_exit=self._ended, stdin=read_end)
        except OSError:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        self._pipe = write_end
        for session in self._sessions:
            self._send(f"+{session}\n")

    def _send(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe, line.encode())

    def _ended(self, status: ExitStatus) -> None:
        if self._closing:
            self._exited.set()
            return
        _log.warning("the reaper ended (%s); starting another", status)
        asyncio.get_running_loop().call_later(_RESTART_S, self._restart)

    def _restart(self) -> None:
        if self._closing:
            return
        broken = self._pipe
        try:
            self._start()
        except OSError as error:
            _log.warning("no other reaper can be started now: %s", error)
            asyncio.get_running_loop().call_later(_RESTART_S, self._restart)
        else:
            os.close(broken)
