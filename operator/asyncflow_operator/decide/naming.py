"""The WeightSync that a job names: whether the job may have its fields, and which it goes on with if it may not.

Invariant: a WeightSync serves one job at a time; a job that has begun keeps the fields that it had, whatever becomes of
the object.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncflow.api.weights import SyncSpec, WeightsSpec

_NAMED = "spec.weightSync.name"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSync:
    """View of the WeightSync ``name``.

    exists: whether there is one; spec: the one in force, None for none; owned: whether it was made for a job; user: the
    job that has it, "" for none, which is the oldest of those that name it and are not over.
    """

    name: str
    exists: bool = False
    spec: SyncSpec | None = None
    owned: bool = False
    user: str = ""


def weights_for(
    job: str, sync: NamedSync, *, staggered: bool, begun: WeightsSpec | None
) -> tuple[WeightsSpec | None, str]:
    """Return the fields that ``job`` runs by, None where it may not begin, and why the WeightSync is not in force.

    staggered: whether the job's rollouts are; begun: the fields that it had last, None where it has not begun.
    """
    weights, why = None, ""
    if not sync.exists:
        why = "there is no such WeightSync. Make one, or leave the name out"
    elif sync.spec is None:
        why = "that WeightSync is refused, or is being deleted. Its condition Accepted says why"
    elif sync.owned or sync.spec.source is not None:
        why = "that WeightSync is for another job, or for followers. Make one without a source, or leave the name out"
    elif sync.user not in ("", job):
        why = f"RLJob {sync.user} has that WeightSync, and it serves one job. Make another one"
    elif begun is not None and sync.spec.transport != begun.transport:
        why = f"its transport is {sync.spec.transport}, and was {begun.transport} when the job began. Make it so again"
    elif sync.spec.stagger is not None and not staggered:
        why = "it has a stagger, and this job's rollouts change weights whenever they can. Leave stagger out of it"
    else:
        weights = sync.spec.own
    return weights or begun, f"{_NAMED} = {sync.name!r}: {why}" if why else ""
