"""Lifetime, working time and output of each process of the job.

A role counts the seconds in which it worked (a running sequence; forward, backward, optimizer, checkpoint). A rollout
also counts the seconds in which it had work, and its generated tokens. Each heartbeat reports the sums. Idle shares
refer to a window from the first dispatched prompt to the last step. The job was *up* while at least one process lived:
other processes cover the restart of a driver, and a time in which no process lived does not count. The elastic policy
uses the figures of the last laps.

Invariants: an idle share is between 0 and 1, and an instance that lived for half of the window has half the weight;
``dump`` and ``restore`` pass all lives to the next driver, also when a run is resumed; the figures of a lap come from
one attempt of the trainer, and from steps that followed a step of the same attempt.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Final

from msgspec import Meta

from asyncflow.api.names import ROLE_NAME
from asyncflow.api.status import RecentFigures
from asyncflow.driver.journal import Count, Finite, Moment, Seconds

LAP_S: Final = 5.0
"""Least seconds of a lap: several heartbeats."""
LAPS: Final = 3
"""Number of laps that the elastic policy uses."""
_LEAST_S: Final = 1e-6


@dataclass(kw_only=True)
class Life:
    """One incarnation of a role; times by ``clock.now``.

    seen: time of its last heartbeat; busy_s: seconds of work as reported last, at ``busy_seen``; held_s: seconds since
    ``held_since`` in which it had work, including waits for weights or rewards; figures: its last reported metrics
    (``telemetry.metrics.RoleMetrics.figures``); left: whether it left as directed.
    """

    role: Annotated[str, Meta(pattern=f"^{ROLE_NAME}$")]
    started: Moment
    seen: Moment
    busy_s: Seconds | None = None
    busy_seen: Moment = 0.0
    held_s: Seconds = 0.0
    held_since: Moment | None = None
    tokens: Count = 0
    figures: Annotated[dict[Annotated[str, Meta(max_length=128)], Finite], Meta(max_length=64)] = field(
        default_factory=dict
    )
    left: bool = False


@dataclass(kw_only=True)
class Lives:
    """All incarnations of all roles that the drivers of the job have observed. opened, closed: the window."""

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
        held_s: float | None = None,
        tokens: int = 0,
        figures: Mapping[str, float] | None = None,
    ) -> None:
        """Record a heartbeat; work after the end of the window does not count. held_s: None before it has weights."""
        life = self._lives.setdefault(incarnation, Life(role=role, started=started, seen=now))
        life.started, life.seen = min(life.started, started), now
        life.tokens = max(life.tokens, tokens)
        life.figures = dict(figures) if figures else life.figures
        if busy_s is not None and self.closed is None:
            life.busy_s, life.busy_seen = busy_s, now
            if held_s is not None:
                life.held_s = held_s
                life.held_since = now if life.held_since is None else life.held_since

    def leave(self, incarnation: str) -> None:
        """Record that a process left as directed."""
        if (life := self._lives.get(incarnation)) is not None:
            life.left = True

    def idle_shares(self, now: float) -> dict[str, float]:
        """Return the idle share of each role that reports its work and lived inside the window."""
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

    def occupied(self, role: str) -> tuple[float, float]:
        """Return the seconds in which the processes of a role were ready to work, up to their last reports, and the
        part of these seconds in which they had work.
        """
        ready = held = 0.0
        for life in self._lives.values():
            if life.role == role and life.held_since is not None:
                ready += life.busy_seen - life.held_since
                held += life.held_s
        return ready, held

    def start_seconds(self, role: str) -> float:
        """Return the median of the seconds from the start of a process of a role until it was ready, 0 if none was."""
        took = [
            life.held_since - life.started
            for life in self._lives.values()
            if life.role == role and life.held_since is not None
        ]
        return max(0.0, statistics.median(took)) if took else 0.0

    @property
    def tokens_generated(self) -> int:
        """Response tokens that all rollouts have generated, including rollouts that have ended."""
        return sum(life.tokens for life in self._lives.values())

    def up_s(self, since: float, until: float) -> float:
        """Return the seconds between two times in which at least one process lived."""
        covered, reached = 0.0, since
        for life in sorted(self._lives.values(), key=lambda life: life.started):
            end = min(life.seen, until)
            covered += max(0.0, end - max(life.started, reached))
            reached = max(reached, end)
        return covered

    def dump(self) -> dict[str, Life]:
        """Return all lives by incarnation."""
        return dict(self._lives)

    def restore(self, lives: Mapping[str, Life]) -> None:
        """Restore the lives that an earlier driver wrote."""
        self._lives = {**lives, **self._lives}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """Sums at the end of a step.

    wall_s: seconds of the steps; wait_s: seconds of them that the trainer waited; ready_s: seconds in which rollouts
    were ready to work; held_s: seconds of them in which they had work; samples, trained: trained samples and tokens;
    generated: generated tokens; slot_share: mean share of the slots in use since the previous mark.
    """

    step: int
    wall_s: float
    wait_s: float
    ready_s: float
    held_s: float
    samples: int
    trained: int
    generated: int
    slot_share: float


class Laps:
    """The last laps of the run. A lap is a number of whole steps that took at least ``LAP_S`` seconds together, so that
    every lap contains several heartbeats.
    """

    def __init__(self, lives: Lives) -> None:
        self._lives = lives
        self._marks: deque[_Mark] = deque(maxlen=LAPS + 1)
        self._attempt = -1
        self._wall_s = self._wait_s = 0.0
        self._samples = self._trained = 0
        self._slot_share, self._observations = 0.0, 0

    def record_slots(self, slot_share: float) -> None:
        """Record the share of all slots in use now; called at equal intervals."""
        self._observations += 1
        self._slot_share += (slot_share - self._slot_share) / self._observations

    def step(self, line: Mapping[str, Any]) -> None:
        """Record an optimizer step, a line of ``metrics.jsonl``."""
        if line["attempt"] != self._attempt:
            self._attempt = line["attempt"]
            self._marks.clear()
        else:
            self._wall_s += line["wall_s"]
            self._wait_s += line["wait_s"]
            self._samples += line["samples"]
            self._trained += line["tokens"]
            if self._wall_s - self._marks[-1].wall_s < LAP_S:
                return
        ready_s, held_s = self._lives.occupied("rollout")
        mark = _Mark(
            step=line["step"],
            wall_s=self._wall_s,
            wait_s=self._wait_s,
            ready_s=ready_s,
            held_s=held_s,
            samples=self._samples,
            trained=self._trained,
            generated=self._lives.tokens_generated,
            slot_share=self._slot_share if self._observations else 1.0,
        )
        self._marks.append(mark)
        self._slot_share, self._observations = 0.0, 0

    def recent(self) -> RecentFigures | None:
        """Return the figures of the last ``LAPS`` laps, None if there are fewer."""
        if len(self._marks) <= LAPS:
            return None
        laps, first, last = list(pairwise(self._marks)), self._marks[0], self._marks[-1]
        return RecentFigures(
            since=first.step,
            wait_share=min(_share(b.wait_s - a.wait_s, b.wall_s - a.wall_s, otherwise=0.0) for a, b in laps),
            busy_share=max(_share(b.held_s - a.held_s, b.ready_s - a.ready_s, otherwise=1.0) for a, b in laps),
            slot_share=min(1.0, max(b.slot_share for _, b in laps)),
            tokens_per_second=max(0, last.generated - first.generated) / max(last.wall_s - first.wall_s, _LEAST_S),
            tokens_per_sample=(last.trained - first.trained) / max(last.samples - first.samples, 1),
        )


def _share(part: float, whole: float, *, otherwise: float) -> float:
    return max(0.0, min(1.0, part / whole)) if whole > 0 else otherwise
