"""Status of the job as the driver reports it: the answer of ``GET /v1/status``.

Invariant: pure; a status says what is waited for whenever the job makes no progress.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from asyncflow.api.job import RLJobSpec
from asyncflow.api.status import (
    BestState,
    CheckpointState,
    DriverStatus,
    Phase,
    QueueDepth,
    RecentFigures,
    RewardState,
    RolloutState,
    SetState,
    Staleness,
    StepProgress,
)
from asyncflow.driver.evaluation import SetResult
from asyncflow.driver.progress import Progress
from asyncflow.identity import Version
from asyncflow.net.roster import Best, Member, Status
from asyncflow.plan.holding import holders
from asyncflow.queue.protocol.messages import QueueStats

Standing = Literal["starting", "ready", "lagging", "draining", "lost"]


def timestamp(at: float) -> str:
    """Return unix seconds as RFC 3339 in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def rollout_state(member: Member, status: Status, *, newest: int | None, lag: int) -> RolloutState:
    """Return one rollout's state from its last heartbeat; it lags when it is further behind than the schedule says."""
    packed = status.get("version")
    version = Version.unpack(packed).step if isinstance(packed, int) and packed >= 0 else None
    standing: Standing = "ready"
    if status.get("draining"):
        standing = "draining"
    elif version is None:
        standing = "starting"
    elif newest is not None and newest - version > lag + 1:
        standing = "lagging"
    return RolloutState(
        id=member.incarnation,
        index=member.index,
        state=standing,
        version=version or 0,
        inflight=int(status.get("inflight", 0)),
    )


def build_status(
    progress: Progress,
    *,
    phase: Phase,
    attempt: int,
    newest: int | None,
    version_bytes: int | None,
    transfer_seconds: float | None,
    rollouts: Sequence[RolloutState],
    stats: QueueStats | None,
    checkpoint: tuple[int, float] | None,
    best: Best | None,
    idle_share: Mapping[str, float],
    recent: RecentFigures | None,
    rewards: RewardState,
    prompts_skipped: int,
    inside: StepProgress | None,
    waiting_for: str,
    clock_ahead_s: float,
) -> DriverStatus:
    """Put together what is known now.

    newest: step of the newest version; version_bytes: its size; transfer_seconds: what its transfers take; checkpoint:
    step and when, by ``clock.now``; best: what the trainer keeps as the best; recent: what the elastic policy goes by;
    prompts_skipped: those that were too long; inside: how far the next step is; clock_ahead_s: by how much the system
    clock is ahead of ``clock.now``.
    """
    last: dict[str, Any] = progress.lines[-1] if progress.lines else {}
    evaluation = progress.evaluations[max(progress.evaluations)] if progress.evaluations else None
    return DriverStatus(
        attempt=attempt,
        phase=phase,
        step=progress.done,
        steps=progress.steps,
        step_progress=inside,
        reward=last.get("reward"),
        eval=evaluation.accuracy if evaluation else None,
        eval_greedy=evaluation.greedy if evaluation else None,
        eval_reward=evaluation.reward if evaluation else None,
        eval_pass_at=evaluation.pass_at if evaluation else {},
        eval_sets={name: _set_state(result) for name, result in evaluation.sets.items()} if evaluation else {},
        tokens_per_second=progress.tokens_per_second(),
        eta_seconds=progress.eta_seconds(),
        last_step_at=timestamp(last["at"] + clock_ahead_s) if last else None,
        step_p95=progress.step_p95(),
        staleness=_staleness(last) if last else Staleness(),
        version=newest or 0,
        version_bytes=version_bytes,
        transfer_seconds=transfer_seconds,
        queue=_depth(stats),
        trainer_wait_share=progress.wait_share(),
        recent=recent,
        idle_share=dict(idle_share),
        rewards=rewards,
        prompts_skipped=prompts_skipped,
        rollouts=tuple(rollouts),
        checkpoint=(
            CheckpointState(step=checkpoint[0], at=timestamp(checkpoint[1] + clock_ahead_s)) if checkpoint else None
        ),
        best=BestState(step=best.step, by=best.by, value=best.value) if best else None,
        waiting_for=waiting_for,
    )


def waiting_for(
    progress: Progress,
    *,
    spec: RLJobSpec,
    members: Mapping[str, int],
    newest: int | None,
    evaluating: Sequence[int],
    exported: bool,
    stats: QueueStats | None,
    quiet_s: float,
) -> str:
    """Return in a few words what keeps the job from its next step; "" while nothing does.

    members: how many there are of each role; newest: step of the newest published version; evaluating: versions whose
    evaluation is not finished; exported: whether the trainer has written what the run leaves behind; quiet_s: seconds
    since the last step, or since the first prompt.
    """
    expected = {
        "controller": spec.transfer_queue.controllers,
        **holders(spec.transfer_queue),
        "storage": spec.transfer_queue.storage_units,
        "trainer": spec.trainer.ranks,
        "rollout": max(1, spec.rollout.min_replicas),
    }
    missing = {role: count - members.get(role, 0) for role, count in expected.items() if members.get(role, 0) < count}
    if missing:
        none = " (the job began with rollout.replicas: 0; scale it up)" if spec.rollout.replicas == 0 else ""
        return ", ".join(f"{count} {role}{none if role == 'rollout' else ''}" for role, count in missing.items())
    if newest is None:
        return "the trainer to publish θ_0 (it makes or reads the model)"
    if progress.done >= progress.steps:
        if evaluating:
            return f"the evaluation of θ_{evaluating[0]}"
        return "" if exported else "the trainer to write the last checkpoint and export/"
    if quiet_s > spec.limits.stall_seconds and stats is not None:
        return (
            f"step {progress.done + 1}, stalled for {quiet_s:.0f} s: "
            f"{stats.ready.get('train/rollout', 0)} samples to be generated, "
            f"{stats.leased.get('train/rollout', 0)} in generation, {stats.wanted} lost and not yet made again, "
            f"{stats.ready.get('train/train', 0)} ready to train"
        )
    return ""


def _set_state(result: SetResult) -> SetState:
    return SetState(accuracy=result.accuracy, greedy=result.greedy, reward=result.reward, pass_at=result.pass_at)


def _staleness(line: Mapping[str, Any]) -> Staleness:
    return Staleness(
        start=line["staleness_start_max"], end=line["staleness_end_max"], mean=line["staleness_token_mean"]
    )


def _depth(stats: QueueStats | None) -> QueueDepth:
    if stats is None:
        return QueueDepth()
    return QueueDepth(
        ready=sum(count for task, count in stats.ready.items() if task.endswith("/train")),
        leased=sum(count for task, count in stats.leased.items() if task.endswith("/rollout")),
        staged=stats.staged,
        bytes=stats.bytes,
        limit=stats.limit,
    )
