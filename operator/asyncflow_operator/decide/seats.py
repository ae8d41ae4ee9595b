"""Processes that stand alone: each has a seat of its own, and a lost one is replaced alone.

A pod's name is its seat, and the API server gives a name once: so a seat is filled again only when its old pod is gone.
The remains of a pod that ended hold the seat until the backoff is over. A pod that was deleted and whose node does not
let go of it is taken off the API server, so that nobody waits for a node that is lost. Its process may still run there:
it is fenced, since its successor has the next attempt and whatever it writes as the older one is refused.

Invariant: at most one pod has a seat, and no pod that runs is deleted but one whose seat is not wanted any more; none
loses its grace period but one on a node that does not answer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from asyncflow.api.names import RoleName
from asyncflow.api.status import RoleRecord
from asyncflow.plan.roles import Role
from asyncflow_operator.actions import Ask, Delete
from asyncflow_operator.decide.failure import cleared
from asyncflow_operator.decide.moments import Alarm
from asyncflow_operator.observed import PodView, Ref

OVERDUE_S: Final = 30.0
"""Seconds beyond its grace period after which a pod that is still there is on a node that does not answer."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A pod to be made."""

    role: RoleName
    index: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """Changes to the pods of a role."""

    make: tuple[Seat, ...] = ()
    remove: tuple[Delete, ...] = ()
    ask: tuple[Ask, ...] = ()

    def __add__(self, other: Moves) -> Moves:
        return Moves(make=self.make + other.make, remove=self.remove + other.remove, ask=self.ask + other.ask)


def removed(pods: Iterable[PodView], alarm: Alarm) -> tuple[Delete, ...]:
    """Return the deletions of those of ``pods`` that are not being deleted yet, and, without a grace period, of those
    whose node does not let go of them.
    """
    wanted = ((pod, None if not pod.deleting else 0) for pod in pods if not pod.deleting or _kept(pod, alarm))
    return tuple(Delete(ref=Ref("Pod", pod.name), uid=pod.uid, grace_s=grace_s) for pod, grace_s in wanted)


def _kept(pod: PodView, alarm: Alarm) -> bool:
    """Return whether a pod that was deleted stays because its node does not answer."""
    if pod.forced or pod.ends_by is None:
        return False
    return pod.unreachable or not alarm.until(pod.ends_by + OVERDUE_S)


def tend(role: Role, pods: Collection[PodView], record: RoleRecord, *, open_: bool, alarm: Alarm) -> Moves:
    """Fill the seats 0 to ``role.replicas`` - 1. open_: whether pods may be made now.

    Seats beyond are given up one after another, the highest first.
    """
    within = [pod for pod in pods if pod.index < role.replicas]
    beyond = sorted((pod for pod in pods if pod.index >= role.replicas), key=lambda pod: pod.index)
    taken = {pod.index for pod in within}
    free = [index for index in range(role.replicas) if index not in taken] if open_ else []
    return Moves(
        make=tuple(Seat(role.name, index, record.attempt) for index in free),
        remove=removed([*(pod for pod in within if cleared(role.restart, record, pod, alarm)), *beyond[-1:]], alarm),
    )
