"""Events that a supervisor reports. Invariant: plain immutable facts, in the order in which they happened."""

from __future__ import annotations

from dataclasses import dataclass

from asyncflow.substrates.local.crew import Restart, Seat
from asyncflow.substrates.local.exits import ExitStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """A process runs."""

    seat: Seat
    attempt: int
    pid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A process ended; ``wanted`` where it was told to."""

    seat: Seat
    attempt: int
    status: ExitStatus
    wanted: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Restarting:
    """A replica or a gang starts again."""

    restart: Restart


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopping:
    """Everything is told to end, for this reason."""

    reason: str


Event = Started | Ended | Restarting | Stopping
