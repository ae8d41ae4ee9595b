"""One server process: which ends with its parent, watched while it is waited for, ended by its pid.

Invariant: no process outlives the one that started it, also when that is killed with SIGKILL; and nothing is waited
for without a deadline, nor any longer once a process that it depends on has died.
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
    """The control plane, or something in it, did not do what was asked of it."""


class Process:
    """A server and its log. It can be ended and started again with the same command, as a failure or an upgrade.

    env: variables that it has beside those of this process.
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
        """The process id. Raises PlaneError when it does not run."""
        if self._running is None:
            raise PlaneError(f"{self.name} was not started")
        return self._running.pid

    def start(self) -> None:
        """Start it. The kernel ties its life to the thread that does this, so only the main one may."""
        if threading.current_thread() is not threading.main_thread():
            raise PlaneError(f"{self.name} has to be started by the main thread: it would end together with this one")
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
        """Send it a signal; after SIGSTOP none of its threads runs any more when this returns."""
        os.kill(self.pid, number)
        if number == signal.SIGSTOP:
            wait_until(self._is_stopped, f"{self.name} to stop")

    def _is_stopped(self) -> bool:
        stats = [each.read_text() for each in Path(f"/proc/{self.pid}/task").glob("*/stat")]
        return all(stat.rpartition(")")[2].split()[0] in "TZX" for stat in stats)

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End it and wait until it is gone; by default at once, since what it stored is thrown away."""
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
        """Say how it ended on its own, with the end of its log; "" while it runs or was not started."""
        if self._running is None or self._running.poll() is None:
            return ""
        return f"{self.name} ended with {self._running.returncode}; the end of {self.log}:\n{self.tail()}"

    def tail(self) -> str:
        """Return the last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])

    def cpu_s(self) -> float:
        """Return the processor time that it has used, in seconds."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_bytes(self) -> int:
        """Return its resident memory."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Restarted(Process):
    """A process that whoever waits for what it does starts again where it ended with ``status``, as a kubelet does."""

    def __init__(self, name: str, command: Sequence[str | Path], *, log: Path, status: int) -> None:
        super().__init__(name, command, log=log)
        self._status = status

    def died(self) -> str:
        """Start it again where it ended with ``status``; else say how it ended on its own."""
        said = super().died()
        if self._running is None or self._running.returncode != self._status:
            return said
        self.start()
        return ""


def wait_until(
    condition: Callable[[], object], what: str, *, timeout_s: float = 60.0, needs: Iterable[Process] = ()
) -> None:
    """Wait until ``condition`` holds. Raises PlaneError that names ``what`` when it does not, or cannot any more."""
    needed = list(needs)
    deadline = time.monotonic() + timeout_s
    while not condition():
        for process in needed:
            if said := process.died():
                raise PlaneError(f"waited for {what}, but {said}")
        if time.monotonic() > deadline:
            logs = "".join(f"\nthe end of {process.log}:\n{process.tail()}" for process in needed)
            raise PlaneError(f"waited {timeout_s:g} s for {what}{logs}")
        time.sleep(_POLL_S)
