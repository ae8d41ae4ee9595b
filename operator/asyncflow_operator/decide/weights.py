"""Status of one WeightSync: versions, how they reach instances, which of these are behind and why, and how to follow.

What there is of versions is the driver's to say. Invariant: it owns nothing, so its plan is a status and no more; that
status is bounded however many instances there are.
"""

from __future__ import annotations

from typing import Final, Protocol

from asyncflow.api.names import FOLLOWER
from asyncflow.api.status import DriverStatus
from asyncflow.api.versions import LAG_BUCKETS, VersionsState
from asyncflow.api.weights import WeightsStatus
from asyncflow_operator.actions import Plan
from asyncflow_operator.decide.draft import Draft, refuse
from asyncflow_operator.decide.progress import ACTIVE
from asyncflow_operator.observed import Owner, SyncState

_OF_DRIVER: Final = tuple(VersionsState.model_fields)
FIGURES: Final = frozenset((*_OF_DRIVER, "version", "attempt"))
"""Fields of its status that may wait."""


class DesiredFollowing(Protocol):
    """Facts that whoever follows a job has to know."""

    def address(self, owner: Owner) -> str:
        """Return the address of a job's driver."""

    def certificate(self, owner: Owner, role: str) -> str:
        """Return the name of the Secret with a certificate of people of ``role``."""


def decide_sync(state: SyncState, *, now: float, desired: DesiredFollowing) -> Plan:
    """Return the plan for a WeightSync as it is at ``now`` (unix seconds)."""
    if state.owner.deleting:
        return Plan()
    draft = Draft(owner=state.owner, before=state.status, now=now)
    if state.sync is None:
        return refuse(draft, problem=state.problem, reason=state.problem_reason)
    draft.conditions.set("Accepted", True, "Accepted")
    draft.fields |= dict.fromkeys(("job", "address", "certificate"))
    if state.job is not None:
        job = state.job.owner
        draft.fields |= {
            "job": job.name,
            "address": desired.address(job),
            "certificate": desired.certificate(job, FOLLOWER),
        }
    seen = state.job.probe.status if state.job is not None else None
    if state.job is None or state.job.status.phase not in ACTIVE:
        draft.conditions.set("Ready", False, *_why_none(state))
        draft.fields |= {"rollouts": 0, "followers": 0, "behind": 0, "lag": (), "laggards": ()}
    elif seen is None and (state.job.probe.asked or not draft.conditions.has("Ready")):
        draft.conditions.set("Ready", False, "NoVersion", "The driver has not said which versions there are")
    elif seen is not None:
        allowed = state.job.job.spec.schedule.max_staleness if state.job.job is not None else 0
        _report(draft, seen, allowed=allowed, followed=state.sync.spec.source is not None)
    return draft.plan(figures=FIGURES)


def _why_none(state: SyncState) -> tuple[str, str]:
    """Return why no versions come, in a word and in a sentence."""
    if state.job is not None:
        return state.job.status.phase, f"RLJob {state.job.owner.name} publishes no versions now"
    source = state.sync.spec.source if state.sync is not None else None
    if source is not None:
        return "NoSource", f"spec.source.job = {source.job!r}: there is no such RLJob in this namespace"
    return "NoJob", "No RLJob names it in spec.weightSync.name"


def _report(draft: Draft[WeightsStatus], seen: DriverStatus, *, allowed: int, followed: bool) -> None:
    versions = seen.versions
    draft.fields |= {name: getattr(versions, name) for name in _OF_DRIVER}
    draft.fields |= {"version": seen.version, "attempt": seen.attempt}
    who, serving = ("follower", versions.followers) if followed else ("rollout", versions.rollouts)
    many = f"{serving} {who}{'' if serving == 1 else 's'} {'has' if serving == 1 else 'have'} a version"
    draft.conditions.set("Ready", serving > 0, "Serving" if serving else f"No{who.title()}", many)
    worst = max((each.lag for each in versions.laggards), default=0)
    lagged = any(each.type == "Lagging" and each.status == "True" for each in draft.before.conditions)
    if worst > allowed + (0 if lagged else 1):
        late = sum(versions.lag[min(allowed + 1, LAG_BUCKETS - 1) :])
        first = versions.laggards[0]
        cause = f"{first.id} by {first.lag}: {first.cause}"
        message = (
            f"{late} {'instance is' if late == 1 else 'instances are'} more than {allowed} versions behind, {cause}"
        )
        draft.conditions.set("Lagging", True, "Behind", message)
    else:
        draft.conditions.set("Lagging", False, "CaughtUp")
