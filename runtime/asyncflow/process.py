"""Processes that end with their parent, what they leave behind, and one that adopts the orphans below it.

``python -m asyncflow.process COMMAND ...`` becomes a program that knows nothing of this, and ends with its parent, too.

Invariant: a process that has called ``die_with_parent`` outlives its parent by no Python statement, also when the
parent is killed with SIGKILL or has died before the call.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

PARENT = "ASYNCFLOW_PARENT"
"""Environment variable that holds the pid of the process that this one ends with."""

RUN = "ASYNCFLOW_RUN"
"""Environment variable that holds the mark of the run that this process belongs to (``local.reaper.MARK``)."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_START_TIME = 19
"""Place of field 22 of ``/proc/PID/stat``, counted from 0 behind the name (field 2)."""


def prctl(option: int, argument: int) -> int:
    """Ask the kernel for something about this process (``prctl(2)``), and return its answer. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.prctl(option, *(ctypes.c_ulong(value) for value in (argument, 0, 0, 0)))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {argument}): {os.strerror(ctypes.get_errno())}")
    return result


def die_with_parent(parent: int | None = None) -> None:
    """Make the kernel kill this process when its parent ends; called before anything else.

    parent: its pid; where None, that of the variable PARENT, and nothing happens where that is not set (in a pod).
    """
    named = os.environ.pop(PARENT, None)
    parent = int(named) if parent is None and named is not None else parent
    if parent is None:
        return
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent ended before this process began")


def scratch_folder() -> Path:
    """Make a folder for temporary files, by whose name the run's supervisor finds it when this process was killed."""
    import tempfile

    return Path(tempfile.mkdtemp(prefix=f"asyncflow-scratch-{os.environ.get(RUN, '')}-"))


def age_s() -> float:
    """Return the seconds since this process was started, its imports included."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    began = int(fields[_START_TIME]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)


def adopt_orphans(*, enabled: bool) -> None:
    """Make orphaned descendants become children of this process, so that it can see and end them."""
    prctl(_PR_SET_CHILD_SUBREAPER, int(enabled))


if __name__ == "__main__":
    die_with_parent()
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 — the program that our parent names
