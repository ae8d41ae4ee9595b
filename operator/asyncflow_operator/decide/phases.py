"""Phase that a job has reached, seen from its pods.

Invariant: a phase says what was reached, so a pod that is replaced does not turn a running job back into a starting
one; whether all is well now is what the condition Ready says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Final

from asyncflow.api.status import Phase
from asyncflow.plan.roles import Role
from asyncflow_operator.observed import PodView

ACTIVE: Final = frozenset[Phase](("Pending", "Starting", "Running"))
"""Phases in which processes run, or are to."""
FINISHED: Final = frozenset[Phase](("Succeeded", "Failed"))
"""Phases that a job never leaves."""


def ready_of(pods: Collection[PodView]) -> Counter[str]:
    """Count the ready pods by role."""
    return Counter(pod.role for pod in pods if pod.ready and not pod.deleting)


def lacking(roles: Sequence[Role], ready: Counter[str]) -> list[str]:
    """Return the roles with fewer ready processes than they must have, in few words each, in the order of the plan."""
    return [f"{role.name} {ready[role.name]}/{role.core}" for role in roles if ready[role.name] < role.core]


def may_start(role: Role, roles: Sequence[Role], ready: Counter[str], *, ran: bool, gang: str) -> bool:
    """Return whether processes of ``role`` may be made: all that it starts after are ready, or ``roles`` ran already.

    A gang scheduler wants to see all of the gang at once.
    """
    if ran or gang != "none":
        return True
    return all(ready[other.name] >= other.core for other in roles if other.name in role.after)


def reached(
    before: Phase, roles: Sequence[Role], pods: Collection[PodView], ready: Counter[str], *, begun: bool
) -> Phase:
    """Return the phase of an active job. begun: the trainer's gang is on record, so that this costs no status write."""
    if before == "Running" or not lacking(roles, ready):
        return "Running"
    starts = before == "Starting" or (begun and any(pod.started is not None or pod.ready for pod in pods))
    return "Starting" if starts else "Pending"
