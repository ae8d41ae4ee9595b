"""Draft of a decision: the conditions, the new status and the actions, collected before they become a plan.

A transition is written immediately, a change of figures at most every ``FIGURES_S`` seconds, and an unchanged status
never.

Invariants: a draft is turned into a plan once, at the end. Each condition names the generation for which it was
decided, and its time changes only with its status; an unchanged condition is the same object. An unchanged status
causes no write, however often it is decided.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Literal, TypeVar

from asyncflow.api.base import Condition
from asyncflow.api.queue import QueueStatus
from asyncflow.api.status import JobStatus
from asyncflow.api.weights import WeightsStatus
from asyncflow_operator.actions import Action, Delete, Note, Plan
from asyncflow_operator.decide.naming import NO_SYNC
from asyncflow_operator.decide.secrets import SecretUpkeep
from asyncflow_operator.decide.times import Alarm, from_rfc3339, to_rfc3339
from asyncflow_operator.observed import Denial, Manifest, Owner, Ref

Status = Literal["True", "False", "Unknown"]

_LONGEST: Final = 1024
_NAMED: Final = 8
"""Largest number of pods that an event names."""
_STATUS: Final[dict[bool | None, Status]] = {True: "True", False: "False", None: "Unknown"}
FIGURES_S: Final = 15.0
"""Least seconds between two writes of one status that differ only in figures."""
_FOLLOWED: Final = {
    "RLJob": "; of the newest spec only suspend: true and its scale are followed",
    "TransferQueue": "; of the newest spec only its scale is followed",
}
"""Parts of a refused spec that are followed, by kind."""
_SECOND: Final = 1.0
"""Most seconds by which a written time is earlier than the original one."""

S = TypeVar("S", JobStatus, QueueStatus, WeightsStatus)


@dataclass(slots=True)
class ConditionSet:
    """The conditions of one object. before: the present ones; generation: the generation that is being decided."""

    before: Iterable[Condition]
    generation: int
    now: float
    _shown: dict[str, Condition] = field(init=False)

    def __post_init__(self) -> None:
        self._shown = {condition.type: condition for condition in self.before}

    def set(self, kind: str, holds: bool | None, reason: str, message: str = "") -> None:
        """Set the condition of type ``kind``. holds: None if it is unknown."""
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
            last_transition_time=known.last_transition_time if known and stays else to_rfc3339(self.now),
        )

    def drop(self, kind: str) -> None:
        """Remove the condition of type ``kind``, which no longer applies to the object."""
        self._shown.pop(kind, None)

    def has_message(self, kind: str, message: str) -> bool:
        """Return whether the condition of type ``kind`` has this message."""
        return kind in self._shown and self._shown[kind].message == message[:_LONGEST]

    def holds(self, kind: str) -> bool:
        """Return whether the condition of type ``kind`` is true."""
        return kind in self._shown and self._shown[kind].status == "True"

    def has(self, kind: str) -> bool:
        """Return whether the object has a condition of type ``kind``."""
        return kind in self._shown

    @property
    def current(self) -> tuple[Condition, ...]:
        """All conditions."""
        return tuple(self._shown.values())


def to_write(before: S, after: S, *, figures: Collection[str], alarm: Alarm) -> Manifest | None:
    """Return the status to write now, None for none. figures: the fields whose changes may be written with a delay."""
    changed = {name for name in type(after).model_fields if getattr(before, name) != getattr(after, name)}
    changed.discard("progress_time")
    if not changed:
        return None
    waits = changed <= {*figures, "conditions"} and _transitions(before.conditions) == _transitions(after.conditions)
    last = from_rfc3339(before.progress_time)
    if waits and last is not None and last <= alarm.now and alarm.until(last + FIGURES_S + _SECOND):
        return None
    return _dump(after.model_copy(update={"progress_time": to_rfc3339(alarm.now)}))


def _transitions(conditions: Collection[Condition]) -> dict[str, tuple[str, str, int]]:
    """Return the parts of the conditions whose change is a transition: all except the messages."""
    return {each.type: (each.status, each.reason, each.observed_generation) for each in conditions}


def _dump(status: S) -> dict[str, Any]:
    """Return the status as JSON values, without empty maps."""
    dumped = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {name: value for name, value in dumped.items() if value != {}}


@dataclass(slots=True, kw_only=True)
class Draft(Generic[S]):
    """Draft of a plan.

    before: the status as last written; denied: the API server's refusals so far; fields: the changed fields of the
    status; first, then: the stages of the plan; records: the entries of the status for Secrets, to add once they have
    been written.
    """

    owner: Owner
    before: S
    now: float
    denied: Collection[Denial] = ()
    conditions: ConditionSet = field(init=False)
    alarm: Alarm = field(init=False)
    fields: dict[str, Any] = field(default_factory=dict)
    first: list[Action] = field(default_factory=list)
    then: list[Action] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    records: dict[Ref, Manifest] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.conditions = ConditionSet(self.before.conditions, self.owner.generation, self.now)
        self.alarm = Alarm(self.now)

    def after(self) -> S:
        """Return the new status."""
        observed = {"conditions": self.conditions.current, "observed_generation": self.owner.generation}
        return self.before.model_copy(update={**self.fields, **observed})

    def note(self, reason: str, message: str, *, warning: bool = False) -> None:
        """Add an event about a transition."""
        self.notes.append(Note(type="Warning" if warning else "Normal", reason=reason, message=message))

    def delete_pods(self, deletes: Iterable[Delete]) -> None:
        """Delete pods, with an event for each reason, and a warning for each pod whose node does not confirm it. A pod
        whose deletion is refused has no further event.
        """
        refused = {denial.ref for denial in self.denied}
        names_by_reason: dict[str, list[str]] = {}
        for delete in deletes:
            self.first.append(delete)
            if delete.ref in refused:
                continue
            if delete.grace_s == 0:
                message = "its node does not confirm the deletion, so it is removed from the API server"
                self.note("NodeLost", f"{delete.ref.name}: {message}", warning=True)
            else:
                names_by_reason.setdefault(delete.why, []).append(delete.ref.name)
        for reason, names in names_by_reason.items():
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            self.note("PodsDeleted", f"{', '.join(names[:_NAMED])}{more}: {reason}")

    def add_first(self, actions: Iterable[Action]) -> None:
        """Add actions to the first stage, which depend on no other action."""
        self.first.extend(actions)

    def add_then(self, actions: Iterable[Action]) -> None:
        """Add actions to the second stage, which may need objects of the first one."""
        self.then.extend(actions)

    def keep_secrets(self, secrets: SecretUpkeep) -> None:
        """Add the writes of Secrets, and the entries of the status that record them."""
        self.fields["secrets"] = dict(secrets.kept)
        self.add_first(secrets.write)
        for ref, (part, record) in secrets.written.items():
            self.records[ref] = {part: record.model_dump(mode="json", by_alias=True)}

    def plan(self, *, figures: Collection[str]) -> Plan:
        """Return the plan. figures: the fields of the status whose changes may be written with a delay."""
        status = to_write(self.before, self.after(), figures=figures, alarm=self.alarm)
        stages = tuple(tuple(stage) for stage in (self.first, self.then) if stage)
        after = status or _dump(self.after().model_copy(update={"progress_time": to_rfc3339(self.now)}))
        return Plan(
            status=status,
            stages=stages,
            notes=tuple(self.notes),
            again_in_s=self.alarm.again_in_s,
            records=self.records,
            after=after if self.records else None,
        )


def accept(draft: Draft[Any], *, problem: str, reason: str, message: str = "") -> None:
    """Record that the newest spec is accepted or, if it has a ``problem``, which one is in force instead.

    Without the WeightSync that it names, a job follows its newest spec with the last known fields of the WeightSync.
    """
    if not problem or reason == NO_SYNC:
        draft.fields["accepted_generation"] = draft.owner.generation
    if not problem:
        draft.conditions.set("Accepted", True, "Accepted", message)
        return
    last = draft.before.accepted_generation
    in_force = f"Generation {last} stays in force" if last is not None else "The last accepted spec stays in force"
    in_force += _FOLLOWED.get(draft.owner.kind, "")
    if reason == NO_SYNC:
        in_force = "The newest spec is in force with the last known fields of its WeightSync"
    message = f"{in_force}. {problem}"
    if not draft.conditions.has_message("Accepted", message):
        draft.note(reason, message, warning=True)
    draft.conditions.set("Accepted", False, reason, message)


def refuse(draft: Draft[Any], *, problem: str, reason: str) -> Plan:
    """Record why an object is invalid and how to fix it, and return its plan; its running pods are not changed."""
    reason = reason or "Invalid"
    if not draft.conditions.has_message("Accepted", problem):
        draft.note(reason, problem, warning=True)
    draft.conditions.set("Accepted", False, reason, problem)
    if not draft.conditions.has("Ready"):
        draft.conditions.set("Ready", False, "NotAccepted", "See the condition Accepted")
    return draft.plan(figures=())
