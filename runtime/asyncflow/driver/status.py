"""Status of the job: answer of ``GET /v1/status``, Prometheus gauges, and the last status that a driver leaves behind;
and the HTTP routes by which clients observe the job and control it.

Invariants: if the job makes no progress, its status says what it waits for; each figure has one definition, so the
gauges and the status agree; a request only sets a desired state (drain this rollout, write a checkpoint, suspend),
which the driver's directives carry out level-triggered, so a repeated request has no further effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Protocol

import msgspec
from aiohttp import web

from asyncflow.api.job import RLJobSpec
from asyncflow.api.status import (
    BestState,
    CheckpointState,
    CorrectionFigures,
    DriverStatus,
    Phase,
    QueueDepth,
    RecentFigures,
    RewardState,
    RolloutState,
    SetState,
    Staleness,
    StepProgress,
    TaskState,
)
from asyncflow.api.versions import VersionsState
from asyncflow.driver.evaluation import SetResult
from asyncflow.driver.presence import LiveState
from asyncflow.driver.progress import RunProgress
from asyncflow.plan.job import added_roles
from asyncflow.plan.queue import holders
from asyncflow.queue.protocol.messages import QueueStats
from asyncflow.rpc.membership import Best
from asyncflow.telemetry.metrics import DriverMetrics

_KEPT: Final[dict[str, Any]] = {
    **dict.fromkeys(("phase", "step", "steps", "reward", "eval", "tokens_per_second", "staleness", "version"), True),
    **dict.fromkeys(("last_step_at", "checkpoint", "best"), True),
    "eval_sets": {"__all__": {"accuracy"}},
}
"""Figures that remain after a job has ended; unbounded ones are left out, so that they fit a termination message."""


def timestamp(at: float) -> str:
    """Return unix seconds as RFC 3339 in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def build_status(
    progress: RunProgress,
    *,
    phase: Phase,
    attempt: int,
    newest: int | None,
    versions: VersionsState,
    fleets: Mapping[str, VersionsState],
    rollouts: Sequence[RolloutState],
    stats: QueueStats | None,
    checkpoint: tuple[int, float] | None,
    best: Best | None,
    idle_share: Mapping[str, float],
    recent: RecentFigures | None,
    desired_rollouts: int | None,
    rewards: RewardState,
    tasks: Mapping[str, TaskState],
    prompts_skipped: int,
    step_progress: StepProgress | None,
    waiting_for: str,
    clock_ahead_s: float,
) -> DriverStatus:
    """Return the current status.

    newest: step of the newest version; fleets: the versions of followers, by the name of their WeightSync; checkpoint:
    step and time of the newest checkpoint, by ``clock.now``; best: version that the trainer keeps as the best; recent:
    figures that the elastic policy uses; desired_rollouts: number of rollouts that it recommends; prompts_skipped:
    number of prompts that were too long; step_progress: progress of the current step; clock_ahead_s: seconds by which
    the system clock is ahead of ``clock.now``.
    """
    last = progress.last_line
    evaluation = progress.evaluations[max(progress.evaluations)] if progress.evaluations else None
    return DriverStatus(
        attempt=attempt,
        phase=phase,
        step=progress.done,
        steps=progress.steps,
        step_progress=step_progress,
        reward=last.get("reward"),
        reward_components=last.get("reward_components", {}),
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
        correction=_correction(last),
        version=newest or 0,
        versions=versions,
        fleets=dict(fleets),
        queue=_depth(stats),
        trainer_wait_share=progress.wait_share(),
        recent=recent,
        desired_rollouts=desired_rollouts,
        idle_share=dict(idle_share),
        rewards=rewards,
        tasks=dict(tasks),
        prompts_skipped=prompts_skipped,
        rollouts=tuple(rollouts),
        checkpoint=(
            CheckpointState(step=checkpoint[0], at=timestamp(checkpoint[1] + clock_ahead_s)) if checkpoint else None
        ),
        best=BestState(step=best.step, by=best.by, value=best.value) if best else None,
        waiting_for=waiting_for,
    )


def waiting_for(
    progress: RunProgress,
    *,
    spec: RLJobSpec,
    members: Mapping[str, int],
    newest: int | None,
    evaluating: Sequence[int],
    exported: bool,
    stats: QueueStats | None,
    quiet_s: float,
    missing_prompts: int = 0,
) -> str:
    """Return a short description of what the job waits for before its next step; "" if it waits for nothing.

    members: number of members by role; newest: step of the newest published version; evaluating: versions whose
    evaluation is not finished; exported: whether the trainer has written its exports; quiet_s: seconds since the last
    step, or since the first prompt; missing_prompts: number of prompts of the next step that clients must still put. A
    task that is left to the user's process is named if it has ready rows, no process has leased any, and no sample is
    being generated.
    """
    expected = {
        "controller": spec.transfer_queue.controllers,
        **holders(spec.transfer_queue),
        "storage": spec.transfer_queue.storage_units,
        "trainer": spec.trainer.ranks,
        "rollout": max(1, spec.rollout.min_replicas),
        **{role: worker.replicas for role, worker in added_roles(spec).items()},
    }
    missing = {role: count - members.get(role, 0) for role, count in expected.items() if members.get(role, 0) < count}
    if missing:
        hint = " (the job started with rollout.replicas: 0; scale it up)" if spec.rollout.replicas == 0 else ""
        return ", ".join(f"{count} {role}{hint if role == 'rollout' else ''}" for role, count in missing.items())
    if newest is None:
        return "the trainer to publish θ_0 (it initialises or reads the model)"
    if progress.done >= progress.steps:
        if evaluating:
            return f"the evaluation of θ_{evaluating[0]}"
        return "" if exported else "the trainer to write the last checkpoint and export/"
    if missing_prompts:
        return f"{missing_prompts} prompts of step {progress.done + 1} to be put (put_prompts_data)"
    if stats is None:
        return ""
    unserved = _unserved_tasks(spec, stats)
    if quiet_s > spec.limits.stall_seconds:
        return (
            f"step {progress.done + 1}, stalled for {quiet_s:.0f} s: {unserved + ', ' if unserved else ''}"
            f"{stats.ready.get('train/rollout', 0)} samples to be generated, "
            f"{stats.leased.get('train/rollout', 0)} in generation, {stats.wanted} lost and not yet generated again, "
            f"{stats.ready.get('train/train', 0)} ready to train"
        )
    return unserved if not stats.leased.get("train/rollout", 0) else ""


def _unserved_tasks(spec: RLJobSpec, stats: QueueStats) -> str:
    """Return the tasks of the user's own processes that have ready rows and no leased ones; "" if there are none."""
    waiting = {name: stats.ready.get(f"train/{name}", 0) for name in spec.own_tasks}
    return ", ".join(
        f"{count} samples of the task {name}, which is left to your process"
        for name, count in waiting.items()
        if count and not stats.leased.get(f"train/{name}", 0)
    )


def _set_state(result: SetResult) -> SetState:
    return SetState(accuracy=result.accuracy, greedy=result.greedy, reward=result.reward, pass_at=result.pass_at)


def _correction(line: Mapping[str, Any]) -> CorrectionFigures | None:
    if line.get("correction_ess") is None:
        return None
    bounded = line.get("correction_high", 0.0) + line.get("correction_low", 0.0)
    return CorrectionFigures(effective_share=line["correction_ess"], bounded_share=bounded)


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


def set_gauges(metrics: DriverMetrics, status: DriverStatus, *, stats: QueueStats, members: Mapping[str, int]) -> None:
    """Set the gauges."""
    metrics.step.set(status.step)
    metrics.target_step.set(status.steps)
    if status.reward is not None:
        metrics.reward_mean.set(status.reward)
    for component, value in status.reward_components.items():
        metrics.reward_component.labels(component).set(value)
    if status.eval is not None:
        metrics.eval_accuracy.set(status.eval)
    if status.eval_reward is not None:
        metrics.eval_reward.set(status.eval_reward)
    for k, passing in status.eval_pass_at.items():
        metrics.eval_pass.labels(k).set(passing)
    for name, each in status.eval_sets.items():
        metrics.set_accuracy.labels(name).set(each.accuracy)
        if each.reward is not None:
            metrics.set_reward.labels(name).set(each.reward)
        for k, passing in each.pass_at.items():
            metrics.set_pass.labels(name, k).set(passing)
    for task, count in stats.ready.items():
        metrics.queue_rows.labels(f"ready {task}").set(count)
    for state, count in (("staged", stats.staged), ("live", stats.live), ("wanted", stats.wanted)):
        metrics.queue_rows.labels(state).set(count)
    metrics.queue_bytes.set(stats.bytes)
    for role, share in status.idle_share.items():
        metrics.idle_share.labels(role).set(share)
    desired = status.desired_rollouts
    metrics.desired_rollouts.set(members.get("rollout", 0) if desired is None else desired)
    for role, count in members.items():
        metrics.members.labels(role).set(count)


def count_step(metrics: DriverMetrics, line: Mapping[str, Any]) -> None:
    """Count one optimizer step, a line of ``metrics.jsonl``."""
    metrics.step_seconds.observe(line["wall_s"])
    metrics.staleness.labels("oldest").observe(line["staleness_start_max"])
    metrics.staleness.labels("newest").observe(line["staleness_end_max"])
    response, observation = line["response_tokens"], line.get("observation_tokens", 0)
    metrics.tokens.labels("prompt").inc(line["tokens"] - response - observation)
    metrics.tokens.labels("response").inc(response)
    metrics.tokens.labels("observation").inc(observation)
    metrics.samples.labels("trained").inc(line["samples"])


class Control(Protocol):
    """Requests that the driver accepts. AsyncFlow's errors become HTTP errors with their messages."""

    def drain(self, worker: str) -> None:
        """Direct a rollout to return its work and leave. Raises StaleHandle for an unknown one."""

    def checkpoint(self) -> None:
        """Write a checkpoint at the next step boundary."""

    def suspend(self) -> None:
        """Write a checkpoint at the next step boundary, then end all roles; the run can be resumed."""

    def resume(self) -> None:
        """Continue after a pause. Raises Refused if the job is not paused."""


def last_words(status: DriverStatus) -> str:
    """Return the part of its status that a driver leaves as its termination message: JSON of at most 4 KiB."""
    return status.model_dump_json(by_alias=True, include=_KEPT)


def status_route(status: Callable[[], DriverStatus]) -> web.RouteDef:
    """Return the route that serves the status of the job."""

    async def get_status(_request: web.Request) -> web.Response:
        return web.json_response(text=status().model_dump_json(by_alias=True))

    return web.get("/v1/status", get_status)


def view_routes(*, live: Callable[[], LiveState], evidence: Callable[[], Mapping[str, Any]]) -> list[web.RouteDef]:
    """Return the routes by which clients observe the job."""

    def answer(value: object) -> web.Response:
        return web.Response(body=msgspec.json.encode(value), content_type="application/json")

    async def get_live(_request: web.Request) -> web.Response:
        return answer(live())

    async def get_evidence(_request: web.Request) -> web.Response:
        return answer(evidence())

    return [web.get("/v1/live", get_live), web.get("/v1/evidence", get_evidence)]


def control_routes(control: Control) -> list[web.RouteDef]:
    """Return the routes by which clients control the job."""

    async def drain(request: web.Request) -> web.Response:
        worker = request.match_info["id"]
        control.drain(worker)
        return web.json_response({"draining": worker}, status=202)

    async def checkpoint(_request: web.Request) -> web.Response:
        control.checkpoint()
        return web.json_response({"checkpoint": "asked for"}, status=202)

    async def suspend(_request: web.Request) -> web.Response:
        control.suspend()
        return web.json_response({"suspend": "asked for"}, status=202)

    async def resume(_request: web.Request) -> web.Response:
        control.resume()
        return web.json_response({"resume": "done"}, status=202)

    return [
        web.post("/v1/rollouts/{id}/drain", drain),
        web.post("/v1/checkpoint", checkpoint),
        web.post("/v1/suspend", suspend),
        web.post("/v1/resume", resume),
    ]
