"""Pods of a role: independent replicas, and the trainer's ranks, which start and end together as a gang.

A pod has the name of its replica, and the API server accepts each name once. A replica is therefore created again only
after its old pod has been deleted; an ended pod is kept until the backoff is over. If the node of a deleted pod does
not confirm the deletion, the pod is removed from the API server, so that nothing waits for a lost node. Its process may
still run there, but it is fenced: its successor has the next attempt, and writes of the older attempt are refused.

An attempt of the gang is recorded as *begun* before its first pod is created, and as *whole* after all its pods have
been seen. A pod that is missing from a whole attempt was therefore lost. A pod that is missing from an attempt that was
never whole is created, because the gang has not trained. If no pod of a begun attempt exists, although none was refused
and the status was not written only just now, it is unknown whether one has run, so that attempt is over too.

Invariants: at most one pod has the name of a replica. A running pod is deleted only if its replica is no longer wanted,
or if it is a rank whose gang cannot train. A pod that has not started is deleted if the present spec would build it
differently, so that correcting the spec is enough; in a gang that ends the attempt. A pod loses its grace period only
if its node does not answer. No rank is created again in an attempt in which the gang may have trained. Pods of two
attempts exist at the same time only while those of the older one are being deleted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from asyncflow.api.names import RoleName
from asyncflow.api.records import RoleRecord
from asyncflow.plan.roles import Role
from asyncflow_operator.actions import Delete, DriverOrder, Note
from asyncflow_operator.decide.failure import may_be_replaced, starts_at
from asyncflow_operator.decide.times import Alarm
from asyncflow_operator.observed import LEFT_BEHIND, PodView, Ref

ENDED: Final = "it has ended, and is replaced under the same name"
OUTDATED: Final = "it has not started, and is replaced because the spec has changed"
AT_ONCE: Final = 512
"""Most pods of a role to create in one decision. Each takes 0.5 ms, in which the operator does nothing else."""
OVERDUE_S: Final = 30.0
"""Seconds after the end of its grace period when the node of a deleted pod counts as not answering."""


@dataclass(frozen=True, slots=True)
class PodReplica:
    """A pod to create."""

    role: RoleName
    index: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMoves:
    """Changes to the pods of a role, and orders to the driver."""

    make: tuple[PodReplica, ...] = ()
    remove: tuple[Delete, ...] = ()
    orders: tuple[DriverOrder, ...] = ()

    def __add__(self, other: ReplicaMoves) -> ReplicaMoves:
        return ReplicaMoves(
            make=self.make + other.make, remove=self.remove + other.remove, orders=self.orders + other.orders
        )


def removed(pods: Iterable[PodView], alarm: Alarm, *, why: str) -> tuple[Delete, ...]:
    """Return the deletions of those of ``pods`` that are not being deleted yet and, without a grace period, of those
    whose node does not confirm the deletion. why: the reason in words.
    """
    wanted = ((pod, None if not pod.deleting else 0) for pod in pods if not pod.deleting or _held_by_node(pod, alarm))
    return tuple(Delete(ref=Ref("Pod", pod.name), uid=pod.uid, grace_s=grace_s, why=why) for pod, grace_s in wanted)


def replaced(role: Role, pods: Collection[PodView], record: RoleRecord, alarm: Alarm) -> tuple[Delete, ...]:
    """Return the deletions of the pods to replace: those that are left behind, those that ended and whose backoff is
    over, and outdated ones.
    """
    ended = (pod for pod in pods if pod.attempt == LEFT_BEHIND or may_be_replaced(role.restart, record, pod, alarm))
    return removed(ended, alarm, why=ENDED) + removed((pod for pod in pods if pod.outdated), alarm, why=OUTDATED)


def _held_by_node(pod: PodView, alarm: Alarm) -> bool:
    """Return whether a deleted pod still exists because its node does not answer."""
    if pod.forced or pod.ends_by is None:
        return False
    return pod.unreachable or not alarm.until(pod.ends_by + OVERDUE_S)


def plan_replicas(
    role: Role, pods: Collection[PodView], record: RoleRecord, *, may_make: bool, alarm: Alarm
) -> ReplicaMoves:
    """Plan the pods 0 to ``role.replicas`` - 1; surplus pods are deleted one at a time, the highest index first."""
    within = [pod for pod in pods if pod.index < role.replicas]
    surplus = sorted((pod for pod in pods if pod.index >= role.replicas), key=lambda pod: pod.index)
    taken = {pod.index for pod in within}
    free = [index for index in range(role.replicas) if index not in taken] if may_make else []
    return ReplicaMoves(
        make=tuple(PodReplica(role.name, index, record.attempt) for index in free[:AT_ONCE]),
        remove=replaced(role, within, record, alarm)
        + removed(surplus[-1:], alarm, why=f"only {role.replicas} of {role.name} are wanted"),
    )


def caught_up(record: RoleRecord, pods: Collection[PodView], *, known: int) -> RoleRecord:
    """Return the record with at least the newest attempt of its pods and ``known``, that of driver and status."""
    newest = max((known, *(pod.attempt for pod in pods)))
    if newest <= record.attempt:
        return record
    return record.model_copy(update={"attempt": newest, "begun": True, "whole": False})


def next_attempt(record: RoleRecord) -> RoleRecord:
    """Return the record after the end of the present attempt without a failed rank."""
    return record.model_copy(update={"attempt": record.attempt + 1, "begun": False, "whole": False})


def track_single_pod(record: RoleRecord, pods: Collection[PodView], *, before: RoleRecord) -> RoleRecord:
    """Return the record of a role with one process, no two of whose pods may have the same attempt.

    before: the record without the ends that were entered just now. A pod of the present attempt that was seen and no
    longer exists has ended, even if the end was not observed.
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

    may_make: whether pods may be created; never_made: whether missing pods of a begun attempt may never have existed.
    """
    notes: tuple[Note, ...] = ()
    if lost := _lost(role, pods, record, never_made=never_made):
        record = next_attempt(record)
        notes = (Note(type="Normal", reason="TrainerGone", message=f"{lost}: the gang starts again"),)
    old = [pod for pod in pods if pod.attempt < record.attempt]
    existing = {pod.index for pod in pods if pod.attempt == record.attempt}
    free = [index for index in range(role.replicas) if index not in existing]
    if not free:
        record = record.model_copy(update={"begun": True, "whole": True})
    if old or not free or not may_make or alarm.until(starts_at(role.restart, record)):
        why = f"attempt {record.attempt} of {role.name} starts when all pods of older attempts are deleted"
        return record, ReplicaMoves(remove=removed(old, alarm, why=why)), notes
    make = tuple(PodReplica(role.name, index, record.attempt) for index in free[:AT_ONCE])
    return record.model_copy(update={"begun": True}), ReplicaMoves(make=make), notes


def _lost(role: Role, pods: Collection[PodView], record: RoleRecord, *, never_made: bool) -> str:
    """Return which rank ends the attempt, "" for none: a surplus rank, an outdated one, or one that was lost."""
    existing = {pod.index for pod in pods if pod.attempt == record.attempt}
    if surplus := [index for index in existing if index >= role.replicas]:
        return f"{role.name} rank {max(surplus)} is surplus, only {role.replicas} are wanted"
    if outdated := [pod.index for pod in pods if pod.attempt == record.attempt and pod.outdated]:
        return f"{role.name} rank {min(outdated)} has not started, and the spec has changed"
    missing = [index for index in range(role.replicas) if index not in existing]
    if missing and (record.whole or (record.begun and not existing and not never_made)):
        return f"{role.name} rank {missing[0]} is lost"
    return ""
