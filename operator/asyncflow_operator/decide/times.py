"""Times in the format of a status, and the time of the next reconciliation.

Invariant: a written time is the original time rounded down to a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

_SOON_S = 0.1
"""Least seconds between two reconciliations of an object, so that a stopped clock causes no busy loop."""


def to_rfc3339(at: float) -> str:
    """Return unix seconds as RFC 3339 in UTC."""
    return datetime.fromtimestamp(int(at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def from_rfc3339(time: str | None) -> float | None:
    """Return unix seconds for an RFC 3339 time; None for a text that is not a time."""
    if not time:
        return None
    try:
        return datetime.fromisoformat(time).timestamp()
    except ValueError:
        return None


@dataclass(slots=True)
class Alarm:
    """The earliest time at which to reconcile again without an observed change."""

    now: float
    at: float | None = None

    def until(self, time: float | None) -> bool:
        """Return whether ``time`` (unix seconds; None: never) is in the future; if so, reconcile again at that time."""
        if time is None:
            return True
        if time <= self.now:
            return False
        self.at = time if self.at is None else min(self.at, time)
        return True

    @property
    def again_in_s(self) -> float | None:
        """Seconds from now to the earliest time, None if there is none."""
        return None if self.at is None else max(self.at - self.now, _SOON_S)
