"""Accounting of the virtual seconds of one process: spans of its track, and their sums.

Invariants: the main spans fill the life of the process without a gap. Sums are exact even if no spans are kept.
"""

from __future__ import annotations

from collections import defaultdict

from asyncflow.timeline.tracks import Kind, Span, Track


class TrackRecorder:
    """Recorder of one life of one process. keeps: whether spans are kept in addition to their sums."""

    def __init__(self, role: str, index: int, attempt: int, *, now: float, keeps: bool) -> None:
        self.role, self.index, self.attempt = role, index, attempt
        self.killed = False
        self._keeps = keeps
        self._main: list[Span] = []
        self._background: list[Span] = []
        self._state: tuple[Kind, int, int, str] = ("starting", -1, -1, "")
        self._begin = self._counted = now
        self._ended = False
        self._spent: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._before: dict[tuple[str, str], float] = {}

    def turn(self, now: float, kind: Kind, *, step: int = -1, version: int = -1, waits: str = "") -> None:
        """Record what the process does from now on; a repeated state changes nothing."""
        state = (kind, step, version, waits)
        if state != self._state:
            self._close(now)
            self._state = state

    def background(self, kind: Kind, begin: float, end: float, *, step: int = -1, version: int = -1) -> None:
        """Record a background span."""
        if self._keeps:
            self._background.append(Span(kind=kind, begin=begin, end=end, step=step, version=version))

    def spent(self, now: float) -> dict[tuple[str, str], float]:
        """Return the seconds until now, by kind of span and by reason to wait."""
        if not self._ended:
            kind, _, _, waits = self._state
            self._spent[kind, waits] += now - self._counted
            self._counted = now
        return dict(self._spent)

    def reset(self, now: float) -> None:
        """Start the measured window."""
        self._before = self.spent(now)

    def counted(self, now: float) -> dict[tuple[str, str], float]:
        """Return the seconds since the start of the measured window."""
        return {what: seconds - self._before.get(what, 0.0) for what, seconds in self.spent(now).items()}

    def finish(self, now: float, *, killed: bool = False) -> None:
        """Record the end of the process."""
        if not self._ended:
            self._close(now)
            self._ended, self.killed = True, killed

    def track(self) -> Track | None:
        """Return the track of an ended process; None if no spans are kept or its life had no duration."""
        if not self._main:
            return None
        return Track(
            role=self.role,
            index=self.index,
            attempt=self.attempt,
            main=self._main,
            background=self._background,
            killed=self.killed,
        )

    def _close(self, now: float) -> None:
        self.spent(now)
        if self._keeps and now > self._begin:
            kind, step, version, waits = self._state
            self._main.append(Span(kind=kind, begin=self._begin, end=now, step=step, version=version, waits=waits))
        self._begin = now
