"""End of a process, and what it says about starting the process again.

Invariant: a process has either exited with a status or been ended by a signal, never both.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from asyncflow.plan.roles import DISRUPTED, REFUSED

CANNOT_START = 127
"""Exit status that stands for a process that the kernel would not start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitStatus:
    """The end of one process: an exit status from 0 to 255, or the number of the signal that ended it."""

    status: int = 0
    signal: int = 0

    @classmethod
    def of(cls, wait_status: int) -> ExitStatus:
        """Read the status word of ``os.waitpid``."""
        if os.WIFSIGNALED(wait_status):
            return cls(signal=os.WTERMSIG(wait_status))
        return cls(status=os.WEXITSTATUS(wait_status))

    @property
    def ok(self) -> bool:
        """Whether the process ended by itself and had nothing to complain about."""
        return self.status == 0 and self.signal == 0

    @property
    def final(self) -> bool:
        """Whether another attempt would end in the same way."""
        return self.status == REFUSED

    @property
    def disrupted(self) -> bool:
        """Whether the process lost what it worked on with another one, which is no failure of its role."""
        return self.status == DISRUPTED

    def __str__(self) -> str:
        if not self.signal:
            return f"exit status {self.status}"
        try:
            return signal.Signals(self.signal).name
        except ValueError:
            return f"signal {self.signal}"
