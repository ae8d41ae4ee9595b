"""A server process that ends with its parent, and waits that fail as soon as such a process ends.

Invariant: no process outlives the one that started it, even if that is killed with SIGKILL. Every wait has a deadline,
and ends early if a process that it depends on has ended.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_POLL_S: Final = 0.05
_END_DEADLINE_S: Final = 20.0
_TAIL_LINES: Final = 15


class PlaneError(RuntimeError):
    """The control plane or a part of it failed, or missed a deadline."""


class Process:
    """A server and its log. It can be ended and restarted with the same command, to simulate a failure or an upgrade.

    env: variables in addition to those of this process.
    """

    def __init__(
        self, name: str, command: Sequence[str | Path], *, log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.command = [str(part) for part in command]
        self.log = log
        self._env = dict(env or {})
        self._running: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id. Raises PlaneError if the process was not started."""
        if self._running is None:
            raise PlaneError(f"{self.name} was not started")
        return self._running.pid

    def start(self) -> None:
        """Start the process. The kernel kills it when the calling thread ends: only the main thread may call this."""
        if threading.current_thread() is not threading.main_thread():
            raise PlaneError(f"{self.name} must be started by the main thread, because it ends with its thread")
        parent = os.getpid()

        def die_with_parent() -> None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

        with self.log.open("ab") as log:
            self._running = subprocess.Popen(
                self.command,
                env=os.environ | self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509
            )

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process. For SIGSTOP, return after all of its threads have stopped."""
        os.kill(self.pid, number)
        if number == signal.SIGSTOP:
            wait_until(self._is_stopped, f"{self.name} to stop")

    def _is_stopped(self) -> bool:
        stats = [each.read_text() for each in Path(f"/proc/{self.pid}/task").glob("*/stat")]
        return all(stat.rpartition(")")[2].split()[0] in "TZX" for stat in stats)

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End the process and wait for its end; by default with SIGKILL, since its state is not kept."""
        if self._running is None:
            return
        if self._running.poll() is None:
            self._running.send_signal(number)
            try:
                self._running.wait(_END_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self._running.kill()
                self._running.wait(_END_DEADLINE_S)
        self._running = None

    def died(self) -> str:
        """Return the exit status and the end of the log if the process ended by itself, "" otherwise."""
        if self._running is None or self._running.poll() is None:
            return ""
        return f"{self.name} ended with {self._running.returncode}; the end of {self.log}:\n{self.tail()}"

    def tail(self) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])

    def cpu_s(self) -> float:
        """Return the CPU time that the process has used, in seconds."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_bytes(self) -> int:
        """Return the resident memory of the process."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Restarted(Process):
    """A process that a wait restarts if it ended with ``status``, as a kubelet restarts a container."""

    def __init__(self, name: str, command: Sequence[str | Path], *, log: Path, status: int) -> None:
        super().__init__(name, command, log=log)
        self._status = status

    def died(self) -> str:
        """Restart the process if it ended with ``status``; otherwise return how it ended by itself."""
        message = super().died()
        if self._running is None or self._running.returncode != self._status:
            return message
        self.start()
        return ""


def wait_until(
    condition: Callable[[], object], what: str, *, timeout_s: float = 60.0, needs: Iterable[Process] = ()
) -> None:
    """Wait until ``condition`` holds. Raises PlaneError, which names ``what``, at the deadline or if a process of
    ``needs`` ended.
    """
    needed = list(needs)
    deadline = time.monotonic() + timeout_s
    while not condition():
        for process in needed:
            if message := process.died():
                raise PlaneError(f"waited for {what}, but {message}")
        if time.monotonic() > deadline:
            logs = "".join(f"\nthe end of {process.log}:\n{process.tail()}" for process in needed)
            raise PlaneError(f"waited {timeout_s:g} s for {what}{logs}")
        time.sleep(_POLL_S)
