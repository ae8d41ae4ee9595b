"""What the gang scheduler's object says: whether the core has its place, has lost it, or needs it no more.

Volcano holds the pods of its PodGroup back by itself. Kueue admits a Workload of ours, and then pods are made; one that
it evicts is suspended, and asks for a place again with a Workload of its own once the old one is gone.

Invariant: with Kueue no pod is made without an admitted Workload; a job that has ended or is suspended holds no place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from asyncflow_operator.actions import Delete
from asyncflow_operator.observed import ObjectView, Ref

_WORKLOAD: Final = "Workload"
_GANGS: Final = frozenset(("PodGroup", _WORKLOAD))

Objects = Mapping[Ref, ObjectView]


def admitted(objects: Objects, *, gang: str) -> bool:
    """Say whether pods may be made, as far as the gang scheduler is concerned."""
    return gang != "kueue" or any(each.phase == "Admitted" for each in _workloads(objects))


def evicted(objects: Objects, *, gang: str) -> bool:
    """Say whether the place of a job is wanted for another one."""
    return gang == "kueue" and any(each.phase == "Evicted" for each in _workloads(objects))


def waits_for(objects: Objects) -> str:
    """Say in words what keeps the Workload from being admitted."""
    return next((each.said for each in _workloads(objects) if each.said), "it has said nothing yet")


def given_back(objects: Objects) -> tuple[Delete, ...]:
    """Give the deletion of what holds the core's place."""
    gangs = (view for ref, view in objects.items() if ref.kind in _GANGS and not view.deleting)
    return tuple(Delete(ref=view.ref, uid=view.uid) for view in gangs)


def _workloads(objects: Objects) -> list[ObjectView]:
    return [view for ref, view in objects.items() if ref.kind == _WORKLOAD and not view.deleting]
