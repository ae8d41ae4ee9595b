"""The trainer: one rank, which connects ``Trainer`` with its queue, weights, backend and checkpoints.

Each rank is a member of the job, under its number among the ranks of all replicas. A rank that has made the last step
exports its weights, and keeps serving its versions until the driver stops it.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from asyncflow.algorithms.base import algorithm_of
from asyncflow.api.graph import trained_columns
from asyncflow.api.job import RLJobSpec
from asyncflow.api.placement import PROFILES
from asyncflow.driver.tasks import TRAIN
from asyncflow.flow.schedule import Schedule
from asyncflow.models.source import materialize_config, materialize_weights
from asyncflow.plan.job import critic_role
from asyncflow.queue.client import QueueClient
from asyncflow.roles.backend import EXPORT, EXPORT_BEST, backend_settings, export_best, export_weights, kind_of_backend
from asyncflow.roles.context import JobContext, RoleOptions, run_role
from asyncflow.roles.launcher import launch_ranks
from asyncflow.rpc.membership import Directives, Membership
from asyncflow.rpc.server import RpcServer
from asyncflow.telemetry.metrics import TrainerMetrics
from asyncflow.training.backend import TrainerBackend
from asyncflow.training.checkpoint import BestCheckpoints, Checkpoints
from asyncflow.training.critic import CriticLink
from asyncflow.training.ranks import GatherService, HostProcessGroup, ProcessGroup, SingleProcess
from asyncflow.training.recording import StepRecorder
from asyncflow.training.report import ReportReply, TrainReport
from asyncflow.training.settings import BackendSettings, TrainerSettings
from asyncflow.training.trainer import Trainer
from asyncflow.weights.sender import WeightSender

log = logging.getLogger(__name__)

REPORT_S = 10.0


class MakeBackend(Protocol):
    """Factory of a rank's backend, usually its class."""

    def __call__(self, settings: BackendSettings, *, group: ProcessGroup) -> TrainerBackend:
        """Return the backend, not loaded."""


def main(options: RoleOptions) -> int:
    """Run one rank, or the launcher of a replica's ranks."""
    return run_role(_serve, options)


async def _serve(context: JobContext) -> int | None:
    if context.launches:
        return await launch_ranks(context)
    await serve(context)
    return None


async def serve(context: JobContext, *, make_backend: MakeBackend | None = None) -> None:
    """Train to the last step, then serve weights until this process is to stop.

    make_backend: factory of the backend, by default that of the manifest.
    """
    spec, options, metrics = context.job.spec, context.options, TrainerMetrics()
    if make_backend is None:
        make_backend = kind_of_backend(spec, device=PROFILES[spec.trainer.accelerator.profile].device)
    server = RpcServer(
        name=f"trainer-{options.index}", bind=context.bind, credentials=context.credentials, access=context.access
    )
    path, kept = options.workdir / "checkpoints", spec.storage.checkpoints
    best_checkpoints: BestCheckpoints | None = None
    if kept.keep_best is not None:
        evaluates = Schedule.of(spec).evaluates
        best_checkpoints = BestCheckpoints(
            path, by=kept.keep_best, evaluates=evaluates, directives=lambda: membership.directives
        )
    checkpoints = Checkpoints(
        path, keep=kept.keep, also=best_checkpoints.keeps if best_checkpoints is not None else None
    )
    if options.index == 0:
        gathering = GatherService(attempt=options.attempt, world=spec.trainer.ranks, progress=checkpoints.progress)
        gathering.attach(server)
    address = await server.start()
    trainer: Trainer | None = None
    exported, exports = asyncio.Event(), dict[str, int]()

    def status() -> dict[str, object]:
        if trainer is None:
            return {"step": 0, "busy_s": 0.0}
        best = best_checkpoints.best if best_checkpoints is not None else None
        judged = {"best": msgspec.to_builtins(best)} if best is not None else {}
        return {**trainer.status(), **judged, "exported": exported.is_set(), "exports": exports}

    def ready() -> tuple[bool, str]:
        is_ready = trainer is not None and trainer.begun
        return is_ready, "ready" if is_ready else "its first weights are not published yet"

    membership = await context.join(metrics=metrics, address=address, status=status, ready=ready)
    group = _group(context, membership)
    sender = WeightSender(
        membership=membership,
        worker=context.worker,
        transport=context.transport(spec.trainer.accelerator),
        part=options.index,
        parts=spec.trainer.ranks,
    )
    await sender.start()
    queue = QueueClient.of(membership, credentials=context.credentials)
    folder = materialize_config(spec.model.source, options.workdir)
    settings = backend_settings(spec, host=context.host, local_rank=options.local_rank or 0)
    backend = make_backend(settings, group=group)
    if settings.critic is not None and (critic := critic_role(spec)) is not None:
        backend.critic_link = CriticLink(
            rank=group.rank,
            attempt=options.attempt,
            find=partial(membership.address, "critic"),
            replicas=critic.replicas,
            loop=asyncio.get_running_loop(),
            credentials=context.credentials,
            patience_s=spec.limits.stall_seconds,
        )
    starts_with_model = backend.of_model and not spec.trainer.external
    trainer = Trainer(
        queue=queue,
        sender=sender,
        backend=backend,
        group=group,
        checkpoints=checkpoints,
        report=lambda report: _report(membership, metrics, report),
        directives=lambda: membership.directives,
        settings=trainer_settings(spec, attempt=options.attempt),
        folder=folder,
        failed=metrics.checkpoint_failures.inc,
        announced=metrics.publish_seconds.observe,
        saved=metrics.checkpoint_seconds.observe,
        spans=context.spans,
        materialise=lambda: materialize_weights(spec.model.source, folder) if starts_with_model else None,
        recorder=StepRecorder(
            options.workdir, rank=options.index, attempt=options.attempt, decided=algorithm_of(spec).writes
        ),
    )
    metrics.watch_busy(trainer.meter.busy)
    leaving = asyncio.create_task(context.call_when_leaving(trainer.leave))
    step = await trainer.run()
    if step >= spec.algorithm.steps:
        await _export(
            context,
            membership,
            backend,
            folder,
            checkpoints=checkpoints,
            best_checkpoints=best_checkpoints,
            last=step,
            exports=exports,
        )
        exported.set()
        membership.report_soon()
    await context.stopping.wait()
    leaving.cancel()
    backend.close()
    if backend.critic_link is not None:
        await backend.critic_link.close()
    await group.close()
    await sender.close()
    await membership.close()
    await server.close()


async def _export(
    context: JobContext,
    membership: Membership,
    backend: TrainerBackend,
    model: Path,
    *,
    checkpoints: Checkpoints,
    best_checkpoints: BestCheckpoints | None,
    last: int,
    exports: dict[str, int],
) -> None:
    """Export the weights of the last step and, once the best step is decided, those of the best checkpoint.

    model: the model's folder; last: the last step; exports: receives the step of each exported folder.
    """
    spec, options = context.job.spec, context.options
    if backend.of_model:
        target = options.workdir / EXPORT
        await asyncio.to_thread(export_weights, spec, backend, model, run=options.workdir, target=target)
        exports[EXPORT] = last
    if best_checkpoints is None:
        return
    is_decided = await _wait_for_evaluation(context, membership, last)
    if is_decided and options.index == 0:
        await asyncio.to_thread(checkpoints.prune, options.attempt)
    if backend.of_model:
        best = await asyncio.to_thread(
            export_best,
            spec,
            backend,
            model,
            checkpoints=checkpoints,
            best=(best_checkpoints.best.step if best_checkpoints.best is not None else 0) if is_decided else None,
            last=last,
            run=options.workdir,
            target=options.workdir / EXPORT_BEST,
        )
        exports |= {EXPORT_BEST: best} if best is not None else {}


async def _wait_for_evaluation(context: JobContext, membership: Membership, step: int) -> bool:
    """Wait until the evaluation of θ_step is decided; return False if this process is to end before."""
    decided = asyncio.Event()

    def check(directives: Directives) -> None:
        if directives.judged >= step:
            decided.set()

    membership.on_directives.append(check)
    check(membership.directives)
    waits = [asyncio.create_task(event.wait()) for event in (decided, context.stopping)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    return decided.is_set()


async def _report(membership: Membership, metrics: TrainerMetrics, report: TrainReport) -> None:
    count_step(metrics, report)
    await membership.driver.call("driver.report", report, ReportReply, timeout=REPORT_S)


def count_step(metrics: TrainerMetrics, report: TrainReport) -> None:
    """Update the metrics with the report of one step."""
    metrics.step.set(report.step)
    metrics.tokens.labels("prompt").inc(report.tokens - report.response_tokens - report.observation_tokens)
    metrics.tokens.labels("response").inc(report.response_tokens)
    metrics.tokens.labels("observation").inc(report.observation_tokens)
    metrics.steps_skipped.inc(report.metrics.get("skipped", 0.0))
    metrics.wait_seconds.observe(report.seconds.wait)
    for name, gauge in (("loss", metrics.loss), ("grad_norm", metrics.grad_norm), ("approx_kl", metrics.approx_kl)):
        if name in report.metrics:
            gauge.set(report.metrics[name])
    for name, value in report.metrics.items():
        if name.startswith("correction_"):
            metrics.correction.labels(name.removeprefix("correction_")).set(value)


def _group(context: JobContext, membership: Membership) -> ProcessGroup:
    world = context.job.spec.trainer.ranks
    if world == 1:
        return SingleProcess()

    def leader() -> str | None:
        member = membership.peer("trainer", 0)
        return member.address if member is not None and member.attempt == context.options.attempt else None

    return HostProcessGroup(
        rank=context.options.index,
        world=world,
        attempt=context.options.attempt,
        leader=leader,
        loop=asyncio.get_running_loop(),
        credentials=context.credentials,
        patience_s=context.job.spec.limits.stall_seconds,
    )


def trainer_settings(spec: RLJobSpec, *, attempt: int) -> TrainerSettings:
    """Return the settings of the job for the ranks of an attempt."""
    return TrainerSettings(
        schedule=Schedule.of(spec),
        partition=TRAIN,
        attempt=attempt,
        whole=spec.schedule.whole_steps,
        epochs=spec.algorithm.epochs,
        mini_batches=spec.algorithm.mini_batches,
        published=spec.published_dtype if spec.trainer.lora is None else "float32",
        decided=algorithm_of(spec).writes,
        checkpoint_every=spec.storage.checkpoints.every,
        checkpoint_evaluated=spec.storage.checkpoints.keep_best is not None,
        extra_columns=trained_columns(spec),
        leave_s=spec.limits.stop_seconds / 4,
    )
