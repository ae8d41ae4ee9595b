"""One decision while it is being made: the status as it will be, and what is to be done.

Invariant: it is turned into a plan once, at the end; what it holds was given to it by pure functions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from asyncflow.api.queue import QueueStatus
from asyncflow.api.status import JobStatus
from asyncflow.api.weights import WeightsStatus
from asyncflow_operator.actions import Action, Delete, Note, Plan
from asyncflow_operator.decide.conditions import Board
from asyncflow_operator.decide.moments import Alarm
from asyncflow_operator.decide.writing import to_write
from asyncflow_operator.observed import Owner

S = TypeVar("S", JobStatus, QueueStatus, WeightsStatus)


@dataclass(slots=True, kw_only=True)
class Draft(Generic[S]):
    """before: the status as it was written; fields: what of it changes; first, then: the stages of the plan."""

    owner: Owner
    before: S
    now: float
    board: Board = field(init=False)
    alarm: Alarm = field(init=False)
    fields: dict[str, Any] = field(default_factory=dict)
    first: list[Action] = field(default_factory=list)
    then: list[Action] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.board = Board(self.before.conditions, self.owner.generation, self.now)
        self.alarm = Alarm(self.now)

    def after(self) -> S:
        """Return the status as it will be."""
        shown = {"conditions": self.board.shown, "observed_generation": self.owner.generation}
        return self.before.model_copy(update={**self.fields, **shown})

    def note(self, reason: str, message: str, *, warning: bool = False) -> None:
        """Add an event about a transition, for people."""
        self.notes.append(Note(type="Warning" if warning else "Normal", reason=reason, message=message))

    def take_away(self, deletes: Iterable[Delete]) -> None:
        """Delete pods; people are told of those whose node does not let go of them."""
        for delete in deletes:
            self.first.append(delete)
            if delete.grace_s == 0:
                words = "its node does not let go of it, so it is taken off the API server"
                self.note("NodeLost", f"{delete.ref.name}: {words}", warning=True)

    def do_first(self, actions: Iterable[Action]) -> None:
        """Add what nothing has to wait for."""
        self.first.extend(actions)

    def do_then(self, actions: Iterable[Action]) -> None:
        """Add what needs what comes first."""
        self.then.extend(actions)

    def plan(self, *, figures: Collection[str]) -> Plan:
        """Return the plan. figures: the fields of the status that may wait."""
        status = to_write(self.before, self.after(), figures=figures, alarm=self.alarm)
        stages = tuple(tuple(stage) for stage in (self.first, self.then) if stage)
        return Plan(status=status, stages=stages, notes=tuple(self.notes), again_in_s=self.alarm.again_in_s)


def accept(draft: Draft[JobStatus] | Draft[QueueStatus], *, problem: str, reason: str, message: str = "") -> None:
    """Record whether the newest spec counts; where ``problem`` says why not, the last that was accepted does."""
    if not problem:
        draft.fields["accepted_generation"] = draft.owner.generation
        draft.board.say("Accepted", True, "Accepted", message)
        return
    last = draft.before.accepted_generation
    counts = f"Generation {last} runs on" if last is not None else "What runs goes on as it was accepted"
    message = f"{counts}; of this one suspend: true and its scale are obeyed, and no more. {problem}"
    if not draft.board.says("Accepted", message):
        draft.note(reason, message, warning=True)
    draft.board.say("Accepted", False, reason, message)


def refuse(draft: Draft[Any], *, problem: str, reason: str) -> Plan:
    """Record why an object is invalid and what to do about it, and return its plan; what runs is left as it is."""
    draft.board.say("Accepted", False, reason or "Invalid", problem)
    if not draft.board.has("Ready"):
        draft.board.say("Ready", False, "NotAccepted", "See the condition Accepted")
    return draft.plan(figures=())
