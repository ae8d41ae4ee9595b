"""May a role start again, and after how long? A pure policy: it owns no clock, task or process.

Invariant: no interval of the policy's ``window_s`` seconds ever holds more than ``max_restarts`` granted restarts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from asyncflow.plan.roles import RestartPolicy

LONGEST_S = 60.0
"""Most seconds that a restart is put off."""

SETTLED_S = 20.0
"""A process that ran for so many seconds can run: its next failure is the first of a row."""

_MOST_DOUBLINGS = 32


def delay(policy: RestartPolicy, failures: int) -> float:
    """Return the seconds to wait after ``failures`` failures in a row (at least one)."""
    return float(min(policy.backoff_s * 2.0 ** min(failures - 1, _MOST_DOUBLINGS), LONGEST_S))


@dataclass(slots=True)
class Budget:
    """The restarts that one role has used within its window."""

    policy: RestartPolicy
    granted: deque[float] = field(default_factory=deque)

    def grant(self, now: float) -> bool:
        """Take one restart at ``now`` (seconds, never decreasing); False where the budget is used up."""
        while self.granted and self.granted[0] <= now - self.policy.window_s:
            self.granted.popleft()
        if len(self.granted) >= self.policy.max_restarts:
            return False
        self.granted.append(now)
        return True
