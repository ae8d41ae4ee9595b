"""Pods of a role: those that stand alone, and the trainer's ranks, which begin and end together.

A pod's name is its replica's, and the API server accepts a name once: so a replica is made again only when its old pod
is gone. The remains of a pod that ended keep the name until the backoff is over. A pod that was deleted and whose node
does not let go of it is taken off the API server, so that nothing waits for a node that is lost. Its process may still
run there: it is fenced, since its successor has the next attempt and whatever it writes as the older one is refused.

An attempt of the gang is *begun* on record before the first of its pods is made, and *whole* once all of them have been
seen. So a pod that is missing is known to have been lost where the attempt was whole; where it was not, the gang has
not trained, and the pod is made. Where none of a begun attempt is there, and none was refused or asked for only just
now, it cannot be known whether one has run: that attempt is over, too.

Invariants: at most one pod has the name of a replica; no pod that runs is deleted but one whose replica is not wanted
any more, and ranks whose gang cannot train; one that has not begun is deleted where the spec would shape it otherwise
now, so that a spec that is mended is enough, and of a gang it ends the attempt; none loses its grace period but one on
a node that does not answer. Of one attempt no rank is made again once the gang could have trained; of two attempts no
pods are there at the same time but those that are being deleted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from asyncflow.api.names import RoleName
from asyncflow.api.records import RoleRecord
from asyncflow.plan.roles import Role
from asyncflow_operator.actions import Delete, DriverOrder, Note
from asyncflow_operator.decide.failure import begins_at, may_be_replaced
from asyncflow_operator.decide.times import Alarm
from asyncflow_operator.observed import PodView, Ref

ENDED: Final = "it has ended, and is made again under its name"
OUTDATED: Final = "it has not begun, and is made again by the spec as it is now"
OVERDUE_S: Final = 30.0
"""Seconds beyond its grace period after which a pod that is still there is on a node that does not answer."""


@dataclass(frozen=True, slots=True)
class PodReplica:
    """A pod to make."""

    role: RoleName
    index: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMoves:
    """Changes to the pods of a role."""

    make: tuple[PodReplica, ...] = ()
    remove: tuple[Delete, ...] = ()
    ask: tuple[DriverOrder, ...] = ()

    def __add__(self, other: ReplicaMoves) -> ReplicaMoves:
        return ReplicaMoves(make=self.make + other.make, remove=self.remove + other.remove, ask=self.ask + other.ask)


def removed(pods: Iterable[PodView], alarm: Alarm, *, why: str) -> tuple[Delete, ...]:
    """Return the deletions of those of ``pods`` that are not being deleted yet, and, without a grace period, of those
    whose node does not let go of them. why: the reason, in words.
    """
    wanted = ((pod, None if not pod.deleting else 0) for pod in pods if not pod.deleting or _held_by_node(pod, alarm))
    return tuple(Delete(ref=Ref("Pod", pod.name), uid=pod.uid, grace_s=grace_s, why=why) for pod, grace_s in wanted)


def replaced(role: Role, pods: Collection[PodView], record: RoleRecord, alarm: Alarm) -> tuple[Delete, ...]:
    """Return the deletions of those of ``pods`` that are made again: past their backoff, or by a spec that changed."""
    over = (pod for pod in pods if may_be_replaced(role.restart, record, pod, alarm))
    return removed(over, alarm, why=ENDED) + removed((pod for pod in pods if pod.outdated), alarm, why=OUTDATED)


def _held_by_node(pod: PodView, alarm: Alarm) -> bool:
    """Return whether a pod that was deleted stays because its node does not answer."""
    if pod.forced or pod.ends_by is None:
        return False
    return pod.unreachable or not alarm.until(pod.ends_by + OVERDUE_S)


def plan_replicas(
    role: Role, pods: Collection[PodView], record: RoleRecord, *, may_make: bool, alarm: Alarm
) -> ReplicaMoves:
    """Plan the pods 0 to ``role.replicas`` - 1. may_make: whether pods may be made now.

    Pods beyond are deleted one after another, the highest first.
    """
    within = [pod for pod in pods if pod.index < role.replicas]
    beyond = sorted((pod for pod in pods if pod.index >= role.replicas), key=lambda pod: pod.index)
    taken = {pod.index for pod in within}
    free = [index for index in range(role.replicas) if index not in taken] if may_make else []
    return ReplicaMoves(
        make=tuple(PodReplica(role.name, index, record.attempt) for index in free),
        remove=replaced(role, within, record, alarm)
        + removed(beyond[-1:], alarm, why=f"{role.replicas} of {role.name} are wanted, and it is beyond them"),
    )


def caught_up(record: RoleRecord, pods: Collection[PodView], *, known: int) -> RoleRecord:
    """Return the record, never behind an attempt that a pod, the driver or an older status knows."""
    newest = max((known, *(pod.attempt for pod in pods)))
    if newest <= record.attempt:
        return record
    return record.model_copy(update={"attempt": newest, "begun": True, "whole": False})


def next_attempt(record: RoleRecord) -> RoleRecord:
    """Return the record as it is after the present attempt was ended, though no rank failed."""
    return record.model_copy(update={"attempt": record.attempt + 1, "begun": False, "whole": False})


def followed(record: RoleRecord, pods: Collection[PodView], *, before: RoleRecord) -> RoleRecord:
    """Return the record of a role of one process, no two of whose pods may have the same attempt.

    before: the record without the ends that were entered just now. A pod of the present attempt that was seen and is
    gone has ended, though nobody saw how, as where a person deletes it at once.
    """
    if record.attempt > before.attempt:
        return record.model_copy(update={"whole": False})
    if any(pod.attempt == record.attempt for pod in pods):
        return record.model_copy(update={"whole": True})
    return next_attempt(record) if record.whole else record


def plan_gang(
    role: Role, pods: Collection[PodView], record: RoleRecord, *, may_make: bool, never_made: bool, alarm: Alarm
) -> tuple[RoleRecord, ReplicaMoves, tuple[Note, ...]]:
    """Plan all ranks of one attempt, or the deletion of those of an older one.

    may_make: whether pods may be made now; never_made: whether missing pods of a begun attempt were surely never made.
    """
    notes: tuple[Note, ...] = ()
    if lost := _lost(role, pods, record, never_made=never_made):
        record = next_attempt(record)
        notes = (Note(type="Normal", reason="TrainerGone", message=f"{lost}: the gang starts again"),)
    old = [pod for pod in pods if pod.attempt < record.attempt]
    there = {pod.index for pod in pods if pod.attempt == record.attempt}
    free = [index for index in range(role.replicas) if index not in there]
    if not free:
        record = record.model_copy(update={"begun": True, "whole": True})
    if old or not free or not may_make or alarm.until(begins_at(role.restart, record)):
        why = f"attempt {record.attempt} of {role.name} begins when all pods of older ones are gone"
        return record, ReplicaMoves(remove=removed(old, alarm, why=why)), notes
    make = tuple(PodReplica(role.name, index, record.attempt) for index in free)
    return record.model_copy(update={"begun": True}), ReplicaMoves(make=make), notes


def _lost(role: Role, pods: Collection[PodView], record: RoleRecord, *, never_made: bool) -> str:
    """Return which rank ends the attempt: one that is missing though it could have trained, that is not wanted, or that
    has not begun and is outdated; "" for none.
    """
    there = {pod.index for pod in pods if pod.attempt == record.attempt}
    if beyond := [index for index in there if index >= role.replicas]:
        return f"{role.name} rank {max(beyond)} is beyond the {role.replicas} wanted"
    if outdated := [pod.index for pod in pods if pod.attempt == record.attempt and pod.outdated]:
        return f"{role.name} rank {min(outdated)} has not begun, and the spec has changed"
    missing = [index for index in range(role.replicas) if index not in there]
    if missing and (record.whole or (record.begun and not there and not never_made)):
        return f"{role.name} rank {missing[0]} is gone"
    return ""
