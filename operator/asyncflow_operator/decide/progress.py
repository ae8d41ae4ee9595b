"""Progress of a job: the phase that it has reached, the driver's figures, and whether it makes steps.

Invariants: a phase is the furthest one reached, so a replaced pod does not turn a running job back into a starting one;
the condition Ready shows the present state. A figure comes from the driver or is absent. A job is reported as stalled
only if its driver answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Final

from asyncflow.api.durability import LimitsSpec
from asyncflow.api.status import DriverStatus, JobStatus, Phase
from asyncflow.api.versions import MOST_COUNTED
from asyncflow.plan.describe import duration
from asyncflow.plan.roles import Role
from asyncflow_operator.decide.draft import ConditionSet
from asyncflow_operator.decide.times import Alarm, from_rfc3339
from asyncflow_operator.observed import DriverProbe, PodView

ACTIVE: Final = frozenset[Phase](("Pending", "Starting", "Running"))
"""Phases in which processes run or are to run."""
FINISHED: Final = frozenset[Phase](("Succeeded", "Failed"))
"""Phases that a job never leaves."""
FIGURES: Final = frozenset(
    (
        *("step", "steps", "progress", "reward", "eval", "tokens_per_second", "staleness", "version", "queue_depth"),
        *("eta", "last_step_at", "checkpoint_step", "failed_rewards", "waiting_for", "ready_rollouts"),
        *("eval_sets", "best_step"),
    )
)
"""Fields of a job's status whose changes may be written with a delay; all others are transitions."""
SILENT_S: Final = 60.0
"""Seconds without an answer after which it is unknown whether a job makes progress."""
_STEPS: Final = 10.0
"""Time without a step after which a job is stalled, in multiples of the 95th percentile of the step time."""
_LEAST_S: Final = 60.0
_LINE: Final = 1024


def ready_of(pods: Collection[PodView]) -> Counter[str]:
    """Return the number of ready pods by role."""
    return Counter(pod.role for pod in pods if pod.ready and not pod.deleting)


def lacking(roles: Sequence[Role], ready: Counter[str]) -> list[str]:
    """Return the roles with too few ready processes as ``ROLE READY/REQUIRED``, in the order of the plan."""
    return [f"{role.name} {ready[role.name]}/{role.core}" for role in roles if ready[role.name] < role.core]


def may_start(role: Role, roles: Sequence[Role], ready: Counter[str], *, ran: bool, gang: str) -> bool:
    """Return whether pods of ``role`` may be created: the roles that it starts after are ready, or the job has run.

    Under a gang scheduler all pods are created at the same time, because it must see the whole gang.
    """
    if ran or gang != "none":
        return True
    return all(ready[other.name] >= other.core for other in roles if other.name in role.after)


def reached(
    before: Phase, roles: Sequence[Role], pods: Collection[PodView], ready: Counter[str], *, begun: bool
) -> Phase:
    """Return the phase of an active job. begun: whether the gang is recorded as begun, so that no write is added."""
    if before == "Running" or not lacking(roles, ready):
        return "Running"
    starts = before == "Starting" or (begun and any(pod.started is not None or pod.ready for pod in pods))
    return "Starting" if starts else "Pending"


def figures(seen: DriverStatus | None, rollouts: Collection[PodView]) -> dict[str, Any]:
    """Return the fields of the status that come from the driver's last answer. rollouts: the rollouts' pods."""
    if seen is None:
        return {"ready_rollouts": sum(pod.ready and not pod.deleting for pod in rollouts)}
    return {
        "step": seen.step,
        "steps": seen.steps,
        "progress": f"{seen.step}/{seen.steps}",
        "reward": four_digits(seen.reward),
        "eval": four_digits(seen.eval),
        "eval_sets": {name: four_digits(each.accuracy) for name, each in seen.eval_sets.items()},
        "tokens_per_second": four_digits(seen.tokens_per_second),
        "staleness": four_digits(seen.staleness.start),
        "version": seen.version,
        "queue_depth": seen.queue.ready,
        "eta": "" if seen.eta_seconds is None else duration(seen.eta_seconds),
        "last_step_at": seen.last_step_at,
        "checkpoint_step": seen.checkpoint.step if seen.checkpoint is not None else None,
        "best_step": seen.best.step if seen.best is not None else None,
        "failed_rewards": min(sum(seen.rewards.failed.values()), MOST_COUNTED),
        "waiting_for": one_line(seen.waiting_for),
        "ready_rollouts": sum(each.state == "ready" for each in seen.rollouts),
    }


def set_stalled(
    conditions: ConditionSet,
    *,
    limits: LimitsSpec,
    status: JobStatus,
    probe: DriverProbe,
    trainers: Collection[PodView],
    alarm: Alarm,
) -> None:
    """Set the condition Stalled: no step for ``stall_seconds``, or for ten times the usual time of a step."""
    if not probe.asked:
        return
    silent = probe.failing_since is not None and not alarm.until(probe.failing_since + SILENT_S)
    if probe.status is None or silent:
        conditions.set(
            "Stalled", None, "DriverSilent", "The driver does not answer, so the progress of the job is unknown"
        )
        return
    seen = probe.status
    if seen.phase == "Paused":
        first = [seen.waiting_for, *seen.rewards.first_failure.splitlines()]
        conditions.set("Stalled", True, "Paused", "\n".join(map(one_line, first)))
        return
    usual = max(_STEPS * seen.step_p95, _LEAST_S) if seen.step_p95 is not None else limits.stall_seconds
    limit = min(limits.stall_seconds, usual)
    started = max((pod.started or 0.0 for pod in trainers), default=0.0)
    since = max(from_rfc3339(seen.last_step_at) or 0.0, from_rfc3339(status.start_time) or 0.0, started)
    if alarm.until(since + limit):
        conditions.set("Stalled", False, "Stepping")
        return
    waits = f"; it waits for {one_line(seen.waiting_for)}" if seen.waiting_for else ""
    message = f"No step for more than {duration(limit)}, after step {seen.step} of {seen.steps}{waits}"
    conditions.set("Stalled", True, "NoStep", message)


def four_digits(figure: float | None) -> float | None:
    """Return a figure rounded to four digits, for a column of kubectl."""
    return None if figure is None else float(f"{figure:.4g}")


def one_line(text: str) -> str:
    """Return a text as one line of printable characters, of the length that a status takes."""
    return "".join(letter if letter.isprintable() else " " for letter in text)[:_LINE]
