"""Progress: the driver's figures in the words of ``kubectl get``, and whether the job still makes any.

Invariant: a figure is the driver's or absent; that a job stalls is said only of a driver that answers.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from asyncflow.api.durability import LimitsSpec
from asyncflow.api.status import MOST_COUNTED, DriverStatus, JobStatus
from asyncflow.plan.describe import duration
from asyncflow_operator.decide.conditions import Board
from asyncflow_operator.decide.moments import Alarm, read
from asyncflow_operator.observed import PodView, Probe

FIGURES: Final = frozenset(
    (
        *("step", "steps", "progress", "reward", "eval", "tokens_per_second", "staleness", "version", "queue_depth"),
        *("eta", "last_step_at", "checkpoint_step", "failed_rewards", "waiting_for", "ready_rollouts", "elasticity"),
        *("eval_sets", "best_step"),
    )
)
"""Fields of a job's status that may wait; all others are transitions."""
SILENT_S: Final = 60.0
"""Seconds without an answer after which nobody can say whether a job makes progress."""
_STEPS: Final = 10.0
"""Steps, at the length that 95 of 100 keep, that may pass without one."""
_LEAST_S: Final = 60.0
_LINE: Final = 1024


def figures(seen: DriverStatus | None, rollouts: Collection[PodView]) -> dict[str, Any]:
    """Return the fields of the status that the driver's last answer fills; rollouts: their pods."""
    if seen is None:
        return {"ready_rollouts": sum(pod.ready and not pod.deleting for pod in rollouts)}
    return {
        "step": seen.step,
        "steps": seen.steps,
        "progress": f"{seen.step}/{seen.steps}",
        "reward": seen.reward,
        "eval": seen.eval,
        "eval_sets": {name: each.accuracy for name, each in seen.eval_sets.items()},
        "tokens_per_second": seen.tokens_per_second,
        "staleness": seen.staleness.start,
        "version": seen.version,
        "queue_depth": seen.queue.ready,
        "eta": "" if seen.eta_seconds is None else duration(seen.eta_seconds),
        "last_step_at": seen.last_step_at,
        "checkpoint_step": seen.checkpoint.step if seen.checkpoint is not None else None,
        "best_step": seen.best.step if seen.best is not None else None,
        "failed_rewards": min(sum(seen.rewards.failed.values()), MOST_COUNTED),
        "waiting_for": _shown(seen.waiting_for),
        "ready_rollouts": sum(each.state == "ready" for each in seen.rollouts),
    }


def judge(
    board: Board, *, limits: LimitsSpec, status: JobStatus, probe: Probe, trainers: Collection[PodView], alarm: Alarm
) -> None:
    """State whether a running job has stalled: no step for ``stall_seconds``, or for ten times what steps take."""
    if not probe.asked:
        return
    silent = probe.failing_since is not None and not alarm.until(probe.failing_since + SILENT_S)
    if probe.status is None or silent:
        board.say("Stalled", None, "DriverSilent", "The driver does not answer, so nobody knows how far the job is")
        return
    seen = probe.status
    if seen.phase == "Paused":
        board.say("Stalled", True, "Paused", _shown(seen.waiting_for))
        return
    usual = max(_STEPS * seen.step_p95, _LEAST_S) if seen.step_p95 is not None else limits.stall_seconds
    patience = min(limits.stall_seconds, usual)
    began = max((pod.started or 0.0 for pod in trainers), default=0.0)
    since = max(read(seen.last_step_at) or 0.0, read(status.start_time) or 0.0, began)
    if alarm.until(since + patience):
        board.say("Stalled", False, "Stepping")
        return
    what = f"; it waits for {_shown(seen.waiting_for)}" if seen.waiting_for else ""
    message = f"No step for more than {duration(patience)}, after step {seen.step} of {seen.steps}{what}"
    board.say("Stalled", True, "NoStep", message)


def _shown(words: str) -> str:
    """Return a driver's words as one line that a terminal may show."""
    return "".join(letter if letter.isprintable() else " " for letter in words)[:_LINE]
