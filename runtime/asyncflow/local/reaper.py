"""Killing the processes that belong to a run, and removing their temporary folders.

The supervisor calls these functions. This module also runs as a separate small process, which does the same if the
supervisor is killed with SIGKILL.

A process belongs to a run if its session was started by one of the run's roles, or if its environment contains the
run's mark. Roles die with the supervisor by themselves (``process``); the reaper ends the processes that they started.

Invariant: no process outside the run is ever signalled: membership is checked again after opening the pidfd, which
pins the process. This module imports the standard library only: the reaper process starts with ``python -I -S``.
"""

from __future__ import annotations

import contextlib
import glob
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Collection

MARK = "ASYNCFLOW_RUN"
"""Environment variable with the mark of the run, which all descendants of its roles inherit."""

_SWEEP_S = 5.0


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def _marked(pid: int, mark: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:
            return f"{MARK}={mark}".encode() in environ.read().split(b"\0")
    except OSError:
        return False


def _belongs(pid: int, mark: str | None, sessions: Collection[int]) -> bool:
    try:
        in_session = os.getsid(pid) in sessions
    except ProcessLookupError:
        return False
    return _alive(pid) and (in_session or (mark is not None and _marked(pid, mark)))


def pids() -> list[int]:
    """Return the pids of all processes, including dead ones for which their parent has not waited."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def members(*, mark: str | None, sessions: Collection[int]) -> list[int]:
    """Return the pids of living processes that belong to the run, except this process."""
    return [pid for pid in pids() if pid != os.getpid() and _belongs(pid, mark, sessions)]


def kill(*, mark: str | None, sessions: Collection[int]) -> dict[int, int]:
    """Send SIGKILL to all members once. Return pid -> open pidfd, which the caller closes."""
    killed = {}
    for pid in members(mark=mark, sessions=sessions):
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        if _belongs(pid, mark, sessions):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            killed[pid] = pidfd
        else:
            os.close(pidfd)
    return killed


def sweep(*, mark: str | None, sessions: Collection[int], within_s: float = _SWEEP_S) -> list[int]:
    """Kill members until none is left. Return the pids that are still alive after ``within_s`` seconds.

    mark: mark of the run; if no member is left, its temporary folders (``process.scratch_folder``) are removed.
    """
    deadline = time.monotonic() + within_s
    while killed := kill(mark=mark, sessions=sessions):
        poll = select.poll()
        for pidfd in killed.values():
            poll.register(pidfd, select.POLLIN)
        poll.poll(max(0.0, min(deadline - time.monotonic(), 0.2)) * 1000)
        for pidfd in killed.values():
            os.close(pidfd)
        if time.monotonic() >= deadline:
            return members(mark=mark, sessions=sessions)
    with contextlib.suppress(FileNotFoundError):  # no temporary folder is usable: all disks are full
        for parent in {tempfile.gettempdir(), "/tmp"} if mark else ():  # noqa: S108  scratch_folder uses both
            for folder in glob.glob(f"{glob.escape(parent)}/asyncflow-scratch-{mark}-*"):
                shutil.rmtree(folder, ignore_errors=True)
    return []


def main(mark: str) -> int:
    """Read the supervisor's lines (``+SESSION``, ``-SESSION``) until its end of the pipe closes; then sweep."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sessions: set[int] = set()
    for line in sys.stdin:
        (sessions.add if line.startswith("+") else sessions.discard)(int(line[1:]))
    return 1 if sweep(mark=mark, sessions=sessions) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
