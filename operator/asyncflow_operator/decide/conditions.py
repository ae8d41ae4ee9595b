"""Conditions that never lie: each speaks of the generation that was looked at, and its time moves with its status.

Invariant: a condition that says the same as before is the same object, so an unchanged status compares equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from asyncflow.api.conditions import Condition
from asyncflow_operator.decide.moments import written

Status = Literal["True", "False", "Unknown"]

_LONGEST: Final = 1024
_STATUS: Final[dict[bool | None, Status]] = {True: "True", False: "False", None: "Unknown"}


@dataclass(slots=True)
class Board:
    """The conditions of one object. before: those it has; generation: of the spec that is looked at now."""

    before: Iterable[Condition]
    generation: int
    now: float
    _shown: dict[str, Condition] = field(init=False)

    def __post_init__(self) -> None:
        self._shown = {condition.type: condition for condition in self.before}

    def say(self, kind: str, holds: bool | None, reason: str, message: str = "") -> None:
        """State one aspect. holds: None where it is not known."""
        known, status, message = self._shown.get(kind), _STATUS[holds], message[:_LONGEST]
        stays = known is not None and known.status == status
        if known is not None and stays and known.reason == reason and known.message == message:
            if known.observed_generation != self.generation:
                self._shown[kind] = known.model_copy(update={"observed_generation": self.generation})
            return
        self._shown[kind] = Condition(
            type=kind,
            status=status,
            reason=reason,
            message=message,
            observed_generation=self.generation,
            last_transition_time=known.last_transition_time if known and stays else written(self.now),
        )

    def drop(self, kind: str) -> None:
        """Take an aspect away that this object does not have any more."""
        self._shown.pop(kind, None)

    def says(self, kind: str, message: str) -> bool:
        """Return whether an aspect is stated with this message."""
        return kind in self._shown and self._shown[kind].message == message[:_LONGEST]

    def has(self, kind: str) -> bool:
        """Return whether anything was ever stated about an aspect."""
        return kind in self._shown

    @property
    def shown(self) -> tuple[Condition, ...]:
        """All conditions."""
        return tuple(self._shown.values())
