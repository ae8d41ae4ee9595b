"""Processes that stand alone: each has a seat of its own, and a lost one is replaced alone.

A pod's name is its seat, and the API server gives a name once: so a seat is filled again only when its old pod is gone.
The remains of a pod that ended hold the seat until the backoff is over.

Invariant: at most one pod has a seat, and no pod that runs is deleted but one whose seat is not wanted any more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from asyncflow.api.names import RoleName
from asyncflow.api.status import RoleRecord
from asyncflow.plan.roles import Role
from asyncflow_operator.actions import Ask, Delete
from asyncflow_operator.decide.failure import cleared
from asyncflow_operator.decide.moments import Alarm
from asyncflow_operator.observed import PodView, Ref


@dataclass(frozen=True, slots=True)
class Seat:
    """A pod to be made."""

    role: RoleName
    index: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """What is to happen to the pods of a role."""

    make: tuple[Seat, ...] = ()
    remove: tuple[Delete, ...] = ()
    ask: tuple[Ask, ...] = ()

    def __add__(self, other: Moves) -> Moves:
        return Moves(make=self.make + other.make, remove=self.remove + other.remove, ask=self.ask + other.ask)


def removed(pods: Iterable[PodView]) -> tuple[Delete, ...]:
    """Give the deletion of those of ``pods`` that are not being deleted yet."""
    return tuple(Delete(ref=Ref("Pod", pod.name), uid=pod.uid) for pod in pods if not pod.deleting)


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
        remove=removed([*(pod for pod in within if cleared(role.restart, record, pod, alarm)), *beyond[-1:]]),
    )
