"""How long each process of the job was there, how much of that it worked, and what it made.

A role counts the seconds in which it worked (a running sequence; forward, backward, optimizer, checkpoint) and the
tokens that it generated, and tells the sums with each heartbeat. Idle shares are those of a window, which begins with
the first prompt dispatched and ends with the last step. The job was *up* while at least one process was there: what a
driver's restart leaves out, the others cover, and what nobody covers was no time of the job.

Invariants: an idle share is between 0 and 1, and an instance that lived for half of the window weighs half; ``dump``
and ``restore`` carry all of this over to the next driver, a resumed run included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from msgspec import Meta


@dataclass(kw_only=True)
class Life:
    """One incarnation of a role; times by ``clock.now``. busy_s: what it told last, at ``busy_seen``, of its work."""

    role: str
    started: float
    seen: float
    busy_s: Annotated[float, Meta(ge=0)] | None = None
    busy_seen: float = 0.0
    tokens: Annotated[int, Meta(ge=0)] = 0


@dataclass(kw_only=True)
class Lives:
    """All incarnations of all roles that the drivers of the job have heard of. opened, closed: the window."""

    opened: float | None = None
    closed: float | None = None
    _lives: dict[str, Life] = field(default_factory=dict)

    def observe(
        self,
        incarnation: str,
        *,
        role: str,
        started: float,
        now: float,
        busy_s: float | None = None,
        tokens: int = 0,
    ) -> None:
        """Take in a heartbeat; what was worked after the window is closed does not count any more."""
        life = self._lives.setdefault(incarnation, Life(role=role, started=started, seen=now))
        life.started, life.seen = min(life.started, started), now
        life.tokens = max(life.tokens, tokens)
        if busy_s is not None and self.closed is None:
            life.busy_s, life.busy_seen = busy_s, now

    def idle_shares(self, now: float) -> dict[str, float]:
        """Give the idle share of each role that tells how it works and lived inside the window."""
        if self.opened is None:
            return {}
        end = now if self.closed is None else self.closed
        lived: defaultdict[str, float] = defaultdict(float)
        worked: defaultdict[str, float] = defaultdict(float)
        for life in self._lives.values():
            span = min(end, life.busy_seen) - max(self.opened, life.started)
            if life.busy_s is not None and span > 0:
                lived[life.role] += span
                worked[life.role] += min(life.busy_s, span)
        return {role: 1.0 - worked[role] / lived[role] for role in sorted(lived)}

    @property
    def tokens_generated(self) -> int:
        """Response tokens that all rollouts have generated, those that are gone included."""
        return sum(life.tokens for life in self._lives.values())

    def up_s(self, since: float, until: float) -> float:
        """Give the seconds between two times in which at least one process was there."""
        covered, reached = 0.0, since
        for life in sorted(self._lives.values(), key=lambda life: life.started):
            end = min(life.seen, until)
            covered += max(0.0, end - max(life.started, reached))
            reached = max(reached, end)
        return covered

    def dump(self) -> dict[str, Any]:
        """Give all lives as JSON."""
        return {incarnation: asdict(life) for incarnation, life in self._lives.items()}

    def restore(self, lives: Mapping[str, Life]) -> None:
        """Take over what an earlier driver knew."""
        self._lives = {**lives, **self._lives}
