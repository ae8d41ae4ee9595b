"""How much of its life each instance was idle.

A role counts the seconds in which it worked (a running sequence; forward, backward, optimizer, checkpoint) and tells
the sum with each heartbeat. The window that is judged begins with the first prompt dispatched and ends with the last
step.

Invariant: an idle share is between 0 and 1, and an instance that lived for half of the window weighs half.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Life:
    """One incarnation of a role; all times unix seconds."""

    role: str
    started: float
    seen: float
    busy_s: float = 0.0


@dataclass(kw_only=True)
class Lives:
    """All incarnations of all roles that the driver has heard of."""

    opened: float | None = None
    closed: float | None = None
    _lives: dict[str, Life] = field(default_factory=dict)

    def observe(self, incarnation: str, *, role: str, started: float, busy_s: float, now: float) -> None:
        """Take in a heartbeat; after the window is closed nothing changes any more."""
        if self.closed is not None:
            return
        life = self._lives.setdefault(incarnation, Life(role=role, started=started, seen=now))
        life.seen = now
        life.busy_s = busy_s

    def idle_shares(self, now: float) -> dict[str, float]:
        """Give the idle share of each role that lived inside the window."""
        if self.opened is None:
            return {}
        end = now if self.closed is None else self.closed
        lived: defaultdict[str, float] = defaultdict(float)
        worked: defaultdict[str, float] = defaultdict(float)
        for life in self._lives.values():
            span = min(end, life.seen) - max(self.opened, life.started)
            if span > 0:
                lived[life.role] += span
                worked[life.role] += min(life.busy_s, span)
        return {role: 1.0 - worked[role] / lived[role] for role in sorted(lived)}
