"""Moments: as a status writes them, and the next one that matters.

Invariant: a moment that was written is never later than the one it was written from, by less than a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

_SOON_S = 0.1
"""Least seconds between two looks at the same object, so that a clock that stands still makes no hot loop."""


def written(at: float) -> str:
    """Return unix seconds as RFC 3339 in UTC."""
    return datetime.fromtimestamp(int(at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def read(time: str | None) -> float | None:
    """Return unix seconds for RFC 3339; None for what is no time."""
    if not time:
        return None
    try:
        return datetime.fromisoformat(time).timestamp()
    except ValueError:
        return None


@dataclass(slots=True)
class Alarm:
    """The earliest of the moments at which to look again, though nothing is seen to change."""

    now: float
    at: float | None = None

    def until(self, moment: float | None) -> bool:
        """Return whether ``moment`` (unix seconds; None: never) is still to come; where it is, look again then."""
        if moment is None:
            return True
        if moment <= self.now:
            return False
        self.at = moment if self.at is None else min(self.at, moment)
        return True

    @property
    def again_in_s(self) -> float | None:
        """Seconds from now to the earliest moment."""
        return None if self.at is None else max(self.at - self.now, _SOON_S)
