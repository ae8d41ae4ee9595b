"""A process that asks the kernel to end it when its parent ends, and one that adopts the orphans below it.

``python -m asyncflow.leash COMMAND ...`` becomes a program that knows nothing of this, on the leash of its parent.

Invariant: a leashed process outlives its parent by no Python statement, also when the parent is killed with SIGKILL or
has died before the leash was on.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from asyncflow.errors import AsyncFlowError

PARENT = "ASYNCFLOW_PARENT"
"""Environment variable that holds the pid of whoever started this process and takes it along."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise AsyncFlowError(f"prctl({option}) failed: {os.strerror(code)}", where="leash")


def leash() -> None:
    """Die with the parent; called first thing by a role. Without a supervisor (in a pod) nothing happens."""
    parent = os.environ.pop(PARENT, None)
    if parent is None:
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit("the parent ended before this process began")


def adopt_orphans(*, enabled: bool) -> None:
    """Have orphaned descendants become children of this process, so that it can see and end them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(enabled))


if __name__ == "__main__":
    leash()
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 — the program that our parent names
