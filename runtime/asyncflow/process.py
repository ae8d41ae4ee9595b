"""Functions for processes that end with their parent, for adopting orphans, for temporary folders and open files.

``python -m asyncflow.process COMMAND ...`` replaces itself by COMMAND, which then ends with its parent, too.

Invariant: a process that has called ``die_with_parent`` executes no Python statement after the end of its parent, also
if the parent is killed with SIGKILL or ended before the call.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from pathlib import Path

from asyncflow.errors import AsyncFlowError

PARENT = "ASYNCFLOW_PARENT"
"""Environment variable that holds the pid of the parent with which this process must end."""

RUN = "ASYNCFLOW_RUN"
"""Environment variable that holds the mark of the run that this process belongs to (``local.reaper.MARK``)."""

_FEWEST_FILES = 256
_RANDOM = 8
"""Characters that ``mkdtemp`` adds to a name."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_REAP_S = 0.01
_START_TIME = 19
"""Index of field 22 (starttime) of ``/proc/PID/stat`` among the fields after the name (field 2)."""


def prctl(option: int, argument: int) -> int:
    """Call ``prctl(2)`` for this process, and return its result. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.prctl(option, *(ctypes.c_ulong(value) for value in (argument, 0, 0, 0)))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {argument}): {os.strerror(ctypes.get_errno())}")
    return result


def die_with_parent(parent: int | None = None) -> None:
    """Make the kernel kill this process when its parent ends; must be called before anything else.

    parent: the parent's pid; None takes it from the variable PARENT, and does nothing if that is not set (in a pod).
    """
    named = os.environ.pop(PARENT, None)
    parent = int(named) if parent is None and named is not None else parent
    if parent is None:
        return
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent ended before this process started")


def scratch_folder(*, longest: int | None = None) -> Path:
    """Create a temporary folder, whose name lets the run's supervisor find and remove it if this process is killed.

    longest: most characters of its path; if it would be longer, the folder is in /tmp.
    """
    import tempfile

    prefix, parent = f"asyncflow-scratch-{os.environ.get(RUN, '')}-", tempfile.gettempdir()
    if longest is not None and len(f"{parent}/{prefix}") + _RANDOM > longest:
        parent = "/tmp"  # noqa: S108  mkdtemp makes a folder of its own there
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))


def allow_open_files() -> None:
    """Raise the limit of open files and sockets to its hard limit. Raises AsyncFlowError if that is too low."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most < _FEWEST_FILES:
        what = f"it may open {most} files and sockets, and needs at least {_FEWEST_FILES}"
        raise AsyncFlowError(what, where="this process", hint="Raise the hard limit (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def age_s() -> float:
    """Return the seconds since the start of this process, including its imports."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[_START_TIME]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)


def adopt_orphans(*, enabled: bool) -> None:
    """Set whether orphaned descendants become children of this process, so that it can find and end them."""
    prctl(_PR_SET_CHILD_SUBREAPER, int(enabled))


async def reap(pid: int) -> None:
    """Wait for a killed child, or with a negative ``pid`` for all killed children of a group, adopted ones included.

    A process that adopts orphans, as process 1 of a container does, must do this: each zombie takes a process id.
    """
    import asyncio

    with contextlib.suppress(ChildProcessError):
        while True:
            await asyncio.sleep(0 if _reaped(pid) else _REAP_S)


def _reaped(pid: int) -> bool:
    return os.waitpid(pid, os.WNOHANG) != (0, 0)


if __name__ == "__main__":
    die_with_parent()
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 — the parent chose this program
