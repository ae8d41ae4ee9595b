"""Status of one WeightSync: versions, how far behind rollouts are, and which are furthest.

Invariant: it owns nothing, so its plan is a status and no more; that status is bounded however many rollouts there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Final

from asyncflow.api.status import DriverStatus, RolloutState
from asyncflow.api.weights import Laggard, WeightsStatus
from asyncflow_operator.actions import Plan
from asyncflow_operator.decide.draft import Draft, refuse
from asyncflow_operator.decide.progress import ACTIVE
from asyncflow_operator.observed import SyncState

BUCKETS: Final = 16
LAGGARDS: Final = 10
FIGURES: Final = frozenset(("version", "attempt", "lag", "laggards", "bytes", "transfer_seconds"))
"""Fields of its status that may wait: all of them."""


def decide_sync(state: SyncState, *, now: float) -> Plan:
    """Return the plan for a WeightSync as it is at ``now`` (unix seconds)."""
    if state.owner.deleting:
        return Plan()
    draft = Draft(owner=state.owner, before=state.status, now=now)
    if state.sync is None:
        return refuse(draft, problem=state.problem, reason=state.problem_reason)
    draft.conditions.set("Accepted", True, "Accepted")
    seen = state.job.probe.status if state.job is not None else None
    if state.job is None or state.job.status.phase not in ACTIVE:
        reason = "NoJob" if state.job is None else state.job.status.phase
        draft.conditions.set("Ready", False, reason, "No job publishes versions here now")
        draft.fields |= {"lag": (), "laggards": ()}
    elif seen is None and (state.job.probe.asked or not draft.conditions.has("Ready")):
        draft.conditions.set("Ready", False, "NoVersion", "The driver has not said which versions there are")
    elif seen is not None:
        _report(draft, seen, allowed=state.job.job.spec.schedule.max_staleness if state.job.job is not None else 0)
    return draft.plan(figures=FIGURES)


def _report(draft: Draft[WeightsStatus], seen: DriverStatus, *, allowed: int) -> None:
    serving = [each for each in seen.rollouts if each.state in ("ready", "lagging", "draining")]
    behind = {each.id: max(seen.version - each.version, 0) for each in serving}
    draft.fields |= {
        "version": seen.version,
        "attempt": seen.attempt,
        "lag": histogram(behind.values()),
        "laggards": furthest(serving, behind),
        "bytes": seen.version_bytes,
        "transfer_seconds": seen.transfer_seconds,
    }
    ready = any(each.state == "ready" for each in serving)
    draft.conditions.set("Ready", ready, "Serving" if ready else "NoRollout", f"{len(serving)} rollouts have a version")
    worst = max(behind.values(), default=0)
    lagged = any(each.type == "Lagging" and each.status == "True" for each in draft.before.conditions)
    if worst > allowed + (0 if lagged else 1):
        many = sum(lag > allowed for lag in behind.values())
        draft.conditions.set("Lagging", True, "Behind", f"{many} rollouts are more than {allowed} versions behind")
    else:
        draft.conditions.set("Lagging", False, "CaughtUp")


def histogram(lags: Collection[int]) -> tuple[int, ...]:
    """Count rollouts by how many versions they are behind; the last of ``BUCKETS`` entries counts those further."""
    counts = Counter(min(lag, BUCKETS - 1) for lag in lags)
    return tuple(counts[lag] for lag in range(max(counts, default=-1) + 1))


def furthest(serving: Collection[RolloutState], behind: dict[str, int]) -> tuple[Laggard, ...]:
    """Return the rollouts that are behind, the furthest first, ten at most."""
    late = sorted((each for each in serving if behind[each.id]), key=lambda each: (-behind[each.id], each.index))
    return tuple(Laggard(id=each.id, version=each.version, lag=behind[each.id]) for each in late[:LAGGARDS])
