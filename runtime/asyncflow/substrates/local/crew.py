"""State machine of a job's processes, pure: which run, which run again, and when the job is over.

A *unit* is what starts and ends together: one replica, or all ranks of a gang. When a member of a unit dies, the others
are told to end, and the whole unit starts again with the next attempt.

Invariants: the attempt of a seat only grows, and no two processes of one seat are ever alive together: a unit starts
only when all its seats are down. The verdict, once given, never changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from asyncflow.plan.roles import MOST_DISRUPTIONS, Role
from asyncflow.substrates.local.exits import ExitStatus
from asyncflow.substrates.local.restart import SETTLED_S, Budget, delay


@dataclass(frozen=True, order=True, slots=True)
class Seat:
    """One replica of a role."""

    role: str
    index: int

    def __str__(self) -> str:
        return f"{self.role}-{self.index}"


class State(StrEnum):
    """State of a seat. done: it ended well by itself; ended: with the job, whose verdict was given before."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDING = "ending"
    DOWN = "down"
    DONE = "done"
    ENDED = "ended"


class Start(NamedTuple):
    """Start this seat now, as this attempt."""

    seat: Seat
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Restart:
    """A unit will start again: which seats, as which attempt, after how many seconds, and what ended whom."""

    seats: tuple[Seat, ...]
    attempt: int
    delay_s: float
    culprit: Seat
    status: ExitStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """End of the job: a good one, or one because ``culprit`` ended with ``status`` and may not start again."""

    ok: bool
    culprit: Seat | None = None
    status: ExitStatus = field(default_factory=ExitStatus)
    reason: str = ""


@dataclass(slots=True)
class _Unit:
    role: Role
    attempt: int
    states: dict[Seat, State]
    start_at: float
    failures: int = 0
    started_at: float = 0.0


class Crew:
    """The seats of a job. Times are seconds of one monotonic clock that the caller reads."""

    def __init__(self, roles: Sequence[Role], *, now: float, attempts: Mapping[str, int] | None = None) -> None:
        """Seat every replica, to be started at ``now``; ``attempts`` names the roles whose first attempt is not 0."""
        first = attempts or {}
        self._budgets: dict[str, Budget] = {role.name: Budget(role.restart) for role in roles}
        self._disruptions: dict[str, Budget] = {
            role.name: Budget(replace(role.restart, max_restarts=MOST_DISRUPTIONS)) for role in roles
        }
        self._led = any(role.leader for role in roles)
        self._unit_of: dict[Seat, _Unit] = {}
        self._verdict: Verdict | None = None
        for role in roles:
            seats = [Seat(role.name, index) for index in range(role.replicas)]
            for group in [seats] if role.gang else [[seat] for seat in seats]:
                unit = _Unit(role, first.get(role.name, 0), dict.fromkeys(group, State.WAITING), start_at=now)
                self._unit_of.update(dict.fromkeys(group, unit))

    @property
    def verdict(self) -> Verdict | None:
        """Verdict on the job, or None while it goes on."""
        return self._verdict

    @property
    def seats(self) -> dict[Seat, tuple[State, int]]:
        """Every seat in plan order, with its state and its attempt."""
        return {seat: (unit.states[seat], unit.attempt) for seat, unit in self._unit_of.items()}

    def stop(self, reason: str) -> None:
        """End the job from outside, for ``reason``: nothing starts any more. Without effect once there is a verdict."""
        self._verdict = self._verdict or Verdict(ok=False, reason=reason)

    def wake_at(self) -> float | None:
        """Return the time at which ``due`` has something to start, or None."""
        return min(
            (unit.start_at for seat, unit in self._unit_of.items() if unit.states[seat] is State.WAITING), default=None
        )

    def due(self, now: float) -> list[Start]:
        """Return the seats to start at ``now``, in plan order; from here on they count as running."""
        starts = []
        for seat, unit in self._unit_of.items():
            if self._verdict is None and unit.states[seat] is State.WAITING and unit.start_at <= now:
                unit.states[seat] = State.RUNNING
                unit.started_at = now
                starts.append(Start(seat, unit.attempt))
        return starts

    def ended(self, seat: Seat, status: ExitStatus, now: float) -> tuple[list[Seat], Restart | None]:
        """Take the end of a running seat.

        Gives the seats to be ended because they belong to the same unit, and the restart where one was decided now.
        """
        unit = self._unit_of[seat]
        if self._verdict is not None:
            unit.states[seat] = State.DONE if status.ok else State.ENDED
            return [], None
        if unit.states[seat] is State.ENDING:
            unit.states[seat] = State.DOWN
            self._rest_if_down(unit, now)
            return [], None
        if status.ok:
            unit.states[seat] = State.DONE
            self._judge_done(unit.role)
            return [], None
        unit.states[seat] = State.DOWN
        return self._failed(unit, seat, status, now)

    def _judge_done(self, role: Role) -> None:
        all_done = all(unit.states[seat] is State.DONE for seat, unit in self._unit_of.items())
        if role.leader or (all_done and not self._led):
            self._verdict = Verdict(ok=True)

    def _failed(self, unit: _Unit, seat: Seat, status: ExitStatus, now: float) -> tuple[list[Seat], Restart | None]:
        if status.final:
            self._verdict = Verdict(ok=False, culprit=seat, status=status, reason="it refuses its input")
            return [], None
        budget = (self._disruptions if status.disrupted else self._budgets)[seat.role]
        if not budget.grant(now):
            limit = budget.policy
            reason = f"all {limit.max_restarts} restarts within {limit.window_s:.0f} s are used up"
            self._verdict = Verdict(ok=False, culprit=seat, status=status, reason=reason)
            return [], None
        unit.failures = 1 if now - unit.started_at >= SETTLED_S else unit.failures + 1
        others = [other for other, state in unit.states.items() if state is State.RUNNING]
        unit.states.update(dict.fromkeys(others, State.ENDING))
        unit.attempt += 1
        if unit.role.leader:
            self._recall(now)
        self._rest_if_down(unit, now)
        wait = delay(unit.role.restart, unit.failures)
        return others, Restart(
            seats=tuple(unit.states), attempt=unit.attempt, delay_s=wait, culprit=seat, status=status
        )

    def _recall(self, now: float) -> None:
        """A leader that failed may have dismissed others already; its successor needs them again."""
        for unit in self._unit_of.values():
            if all(state is State.DONE for state in unit.states.values()):
                unit.attempt += 1
                unit.states.update(dict.fromkeys(unit.states, State.WAITING))
                unit.start_at = now

    def _rest_if_down(self, unit: _Unit, now: float) -> None:
        if self._verdict or any(state in (State.RUNNING, State.ENDING) for state in unit.states.values()):
            return
        unit.states.update(dict.fromkeys(unit.states, State.WAITING))
        unit.start_at = now + delay(unit.role.restart, unit.failures)
