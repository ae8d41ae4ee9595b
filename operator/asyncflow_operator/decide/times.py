"""Times as a status writes them, and the next one at which to reconcile again.

Invariant: a time that was written is never later than the one it was written from, by less than a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

_SOON_S = 0.1
"""Least seconds between two reconciliations of an object, so that a clock that stands still makes no hot loop."""


def to_rfc3339(at: float) -> str:
    """Return unix seconds as RFC 3339 in UTC."""
    return datetime.fromtimestamp(int(at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def from_rfc3339(time: str | None) -> float | None:
    """Return unix seconds for RFC 3339; None for a text that is no time."""
    if not time:
        return None
    try:
        return datetime.fromisoformat(time).timestamp()
    except ValueError:
        return None


@dataclass(slots=True)
class Alarm:
    """The earliest of the times at which to reconcile again, though nothing is seen to change."""

    now: float
    at: float | None = None

    def until(self, time: float | None) -> bool:
        """Return whether ``time`` (unix seconds; None: never) is still to come; where it is, reconcile again then."""
        if time is None:
            return True
        if time <= self.now:
            return False
        self.at = time if self.at is None else min(self.at, time)
        return True

    @property
    def again_in_s(self) -> float | None:
        """Seconds from now to the earliest of the times."""
        return None if self.at is None else max(self.at - self.now, _SOON_S)
