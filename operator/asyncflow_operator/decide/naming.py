"""The WeightSync that a job names: whether the job may use its fields, and which fields it uses otherwise.

Invariants: a WeightSync serves one job at a time. A job that has started keeps its fields, whatever happens to the
object.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from asyncflow.api.weights import SyncSpec, WeightsSpec

NO_SYNC: Final = "NoWeightSync"
"""Reason of ``Accepted`` for a job that may not use the WeightSync that it names."""
_NAMED: Final = "spec.weightSync.name"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSync:
    """View of the WeightSync ``name``.

    exists: whether the object exists; spec: its spec in force, None for none; owned: whether it belongs to a job; user:
    the job that uses it, "" for none.
    """

    name: str
    exists: bool = False
    spec: SyncSpec | None = None
    owned: bool = False
    user: str = ""


def weights_for(
    job: str, sync: NamedSync, *, staggered: bool, current: WeightsSpec | None
) -> tuple[WeightsSpec | None, str]:
    """Return the fields that ``job`` uses, None if it may not start, and why the WeightSync is not in force.

    staggered: whether the job's rollouts update staggered; current: its present fields, None if it has not started.
    """
    weights, why = None, ""
    if not sync.exists:
        why = "there is no such WeightSync. Create one, or leave the name out"
    elif sync.spec is None:
        why = "that WeightSync is refused, or is being deleted. Its condition Accepted says why"
    elif sync.owned or sync.spec.source is not None:
        why = "that WeightSync is for another job or for followers. Create one without a source, or leave the name out"
    elif sync.user not in ("", job):
        why = f"RLJob {sync.user} uses that WeightSync, and it serves one job only. Create another one"
    elif current is not None and sync.spec.transport != current.transport:
        why = f"its transport is {sync.spec.transport}, and was {current.transport} when the job started. Restore it"
    elif sync.spec.stagger is not None and not staggered:
        why = "it has a stagger, and this job's updates are not staggered. Remove stagger from it"
    else:
        weights = sync.spec.own
    return weights or current, f"{_NAMED} = {sync.name!r}: {why}" if why else ""
