"""The trainer's ranks: they begin together, and one that is gone takes all others with it into the next attempt.

An attempt is *begun* on record before the first of its pods is made, and *whole* once all of them have been seen. So a
pod that is missing is known to have been lost where the attempt was whole; where it was not, the gang has not trained,
and the pod is made. Where none of a begun attempt is there, and none was refused or asked for only just now, nobody can
know whether one has run: that attempt is over, too.

Invariant: of one attempt no rank is made again once the gang could have trained; of two attempts no pods are there at
the same time but those that are being deleted.
"""

from __future__ import annotations

from collections.abc import Collection

from asyncflow.api.status import RoleRecord
from asyncflow.plan.roles import Role
from asyncflow_operator.actions import Note
from asyncflow_operator.decide.failure import begins_at
from asyncflow_operator.decide.moments import Alarm
from asyncflow_operator.decide.seats import Moves, Seat, removed
from asyncflow_operator.observed import PodView


def caught_up(record: RoleRecord, pods: Collection[PodView], *, known: int) -> RoleRecord:
    """Return the record, never behind an attempt that a pod, the driver or an older status knows."""
    newest = max((known, *(pod.attempt for pod in pods)))
    if newest <= record.attempt:
        return record
    return record.model_copy(update={"attempt": newest, "begun": True, "whole": False})


def next_attempt(record: RoleRecord) -> RoleRecord:
    """Return the record as it is after the present attempt was given up, though nobody failed."""
    return record.model_copy(update={"attempt": record.attempt + 1, "begun": False, "whole": False})


def tend_gang(
    role: Role, pods: Collection[PodView], record: RoleRecord, *, open_: bool, unmade: bool, alarm: Alarm
) -> tuple[RoleRecord, Moves, tuple[Note, ...]]:
    """Make all ranks of one attempt, or make room for them.

    open_: whether pods may be made now; unmade: whether missing pods of a begun attempt were surely never made.
    """
    notes: tuple[Note, ...] = ()
    if lost := _lost(role, pods, record, unmade=unmade):
        record = next_attempt(record)
        notes = (Note(type="Normal", reason="TrainerGone", message=f"{lost}: the gang starts again"),)
    old = [pod for pod in pods if pod.attempt < record.attempt]
    there = {pod.index for pod in pods if pod.attempt == record.attempt}
    free = [index for index in range(role.replicas) if index not in there]
    if not free:
        record = record.model_copy(update={"begun": True, "whole": True})
    if old or not free or not open_ or alarm.until(begins_at(role.restart, record)):
        return record, Moves(remove=removed(old, alarm)), notes
    make = tuple(Seat(role.name, index, record.attempt) for index in free)
    return record.model_copy(update={"begun": True}), Moves(make=make), notes


def _lost(role: Role, pods: Collection[PodView], record: RoleRecord, *, unmade: bool) -> str:
    """Return who is not there though the attempt could have trained, or is there and not wanted; "" if nobody."""
    there = {pod.index for pod in pods if pod.attempt == record.attempt}
    if beyond := [index for index in there if index >= role.replicas]:
        return f"{role.name} rank {max(beyond)} is beyond the {role.replicas} wanted"
    missing = [index for index in range(role.replicas) if index not in there]
    if missing and (record.whole or (record.begun and not there and not unmade)):
        return f"{role.name} rank {missing[0]} is gone"
    return ""
