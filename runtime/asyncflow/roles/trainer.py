"""One rank of the trainer: queue, weights, backend and checkpoints around ``train.trainer``.

A replica of several ranks starts them as processes of their own (``ranks``), and is none itself.
A rank that has made the last step stays, and serves its versions, until the driver says stop.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from asyncflow.api.accelerators import PROFILES
from asyncflow.driver.tasks import TRAIN
from asyncflow.flow.schedule import Schedule
from asyncflow.models.source import materialize_config, materialize_weights
from asyncflow.net.membership import Membership
from asyncflow.net.roster import Directives
from asyncflow.net.rpc import RpcServer
from asyncflow.queue.client.client import QueueClient
from asyncflow.roles.backend import backend_settings, export_weights, kind_of_backend
from asyncflow.roles.base import run_role
from asyncflow.roles.post import JobPost, RoleOptions
from asyncflow.roles.ranks import serve_ranks
from asyncflow.telemetry.metrics import TrainerMetrics
from asyncflow.train.best import BestKeeper
from asyncflow.train.checkpoint import Checkpoints
from asyncflow.train.ranks import Alone, GatherService, Group, HostGroup
from asyncflow.train.report import Reported, TrainReport
from asyncflow.train.settings import TrainerSettings
from asyncflow.train.trainer import Trainer
from asyncflow.weights.sender import WeightSender
from asyncflow.weights.transports.base import open_transport

log = logging.getLogger(__name__)

REPORT_S = 10.0


def main(options: RoleOptions) -> int:
    """Run one rank, or all those of a replica that has several."""
    return run_role(_serve, options)


async def _serve(post: JobPost) -> int | None:
    if post.options.local_rank is None and post.job.spec.trainer.local_ranks > 1:
        return await serve_ranks(post)
    await serve(post)
    return None


async def serve(post: JobPost) -> None:
    """Train to the last step, then serve weights until told to stop."""
    spec, options = post.job.spec, post.options
    kind, metrics = kind_of_backend(spec, device=PROFILES[spec.trainer.accelerator.profile].device), TrainerMetrics()
    server = RpcServer(name=f"trainer-{options.index}", bind=post.bind, keys=post.keys)
    where, kept = options.workdir / "checkpoints", spec.storage.checkpoints
    keeper: BestKeeper | None = None
    if kept.keep_best is not None:
        evaluates = Schedule.of(spec).evaluates
        keeper = BestKeeper(where, by=kept.keep_best, evaluates=evaluates, directives=lambda: membership.directives)
    checkpoints = Checkpoints(where, keep=kept.keep, also=keeper.keeps if keeper is not None else None)
    if options.index == 0:
        gathering = GatherService(attempt=options.attempt, world=spec.trainer.ranks, progress=checkpoints.progress)
        gathering.attach(server)
    address = await server.start()
    trainer: Trainer | None = None
    exported = asyncio.Event()

    def status() -> dict[str, object]:
        if trainer is None:
            return {"step": 0, "busy_s": 0.0}
        best = {"best": msgspec.to_builtins(keeper.best)} if keeper is not None and keeper.best is not None else {}
        return {**trainer.status(), **best, "exported": exported.is_set()}

    def ready() -> tuple[bool, str]:
        begun = trainer is not None and trainer.begun
        return begun, "ready" if begun else "its first weights are not published yet"

    membership = await post.join(metrics=metrics, address=address, status=status, ready=ready)
    group = _group(post, membership)
    transport = open_transport(
        spec.weight_sync.transport, name=f"trainer-{options.index}", bind=post.bind, keys=post.keys
    )
    sender = WeightSender(
        membership=membership,
        worker=post.worker,
        transport=transport,
        part=options.index,
        parts=spec.trainer.ranks,
    )
    await sender.start()
    queue = QueueClient.of(membership, keys=post.keys)
    folder = materialize_config(spec.model.source, options.workdir)
    settings = backend_settings(spec, host=post.host, local_rank=options.local_rank or 0)
    backend = kind(settings, group=group)
    trainer = Trainer(
        queue=queue,
        sender=sender,
        backend=backend,
        group=group,
        checkpoints=checkpoints,
        report=lambda report: _report(membership, metrics, report),
        directives=lambda: membership.directives,
        settings=_settings(post),
        folder=folder,
        failed=metrics.checkpoint_failures.inc,
        announced=metrics.publish_seconds.observe,
        saved=metrics.checkpoint_seconds.observe,
        materialise=lambda: materialize_weights(spec.model.source, folder) if backend.of_model else None,
    )
    metrics.watch_busy(trainer.busy)
    leaving = asyncio.create_task(_leave_when_told(post, trainer))
    step = await trainer.run()
    if step >= spec.algorithm.steps:
        if backend.of_model:
            await asyncio.to_thread(
                export_weights, spec, backend, folder, run=options.workdir, target=options.workdir / "export"
            )
        if keeper is not None and options.index == 0 and await _judged(post, membership, step):
            await asyncio.to_thread(checkpoints.prune, options.attempt)
        exported.set()
        membership.nudge()
    await post.stopping.wait()
    leaving.cancel()
    backend.close()
    await group.close()
    await sender.close()
    await membership.close()
    await server.close()


async def _judged(post: JobPost, membership: Membership, step: int) -> bool:
    """Wait until the evaluation of θ_step is decided; False where this process is told to end before."""
    judged = asyncio.Event()

    def look(directives: Directives) -> None:
        if directives.judged >= step:
            judged.set()

    membership.on_directives.append(look)
    look(membership.directives)
    waits = [asyncio.create_task(event.wait()) for event in (judged, post.stopping)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    return judged.is_set()


async def _leave_when_told(post: JobPost, trainer: Trainer) -> None:
    waits = [asyncio.create_task(event.wait()) for event in (post.stopping, post.draining)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    trainer.leave()


async def _report(membership: Membership, metrics: TrainerMetrics, report: TrainReport) -> None:
    metrics.step.set(report.step)
    metrics.tokens.labels("prompt").inc(report.tokens - report.response_tokens)
    metrics.tokens.labels("response").inc(report.response_tokens)
    metrics.steps_skipped.inc(report.metrics.get("skipped", 0.0))
    metrics.wait_seconds.observe(report.seconds.wait)
    for name, gauge in (("loss", metrics.loss), ("grad_norm", metrics.grad_norm), ("approx_kl", metrics.approx_kl)):
        if name in report.metrics:
            gauge.set(report.metrics[name])
    await membership.driver.call("driver.report", report, Reported, timeout=REPORT_S)


def _group(post: JobPost, membership: Membership) -> Group:
    world = post.job.spec.trainer.ranks
    if world == 1:
        return Alone()

    def leader() -> str | None:
        member = membership.peer("trainer", 0)
        return member.address if member is not None and member.attempt == post.options.attempt else None

    return HostGroup(
        rank=post.options.index,
        world=world,
        attempt=post.options.attempt,
        leader=leader,
        loop=asyncio.get_running_loop(),
        keys=post.keys,
        patience_s=post.job.spec.limits.stall_seconds,
    )


def _settings(post: JobPost) -> TrainerSettings:
    spec = post.job.spec
    return TrainerSettings(
        schedule=Schedule.of(spec),
        partition=TRAIN,
        attempt=post.options.attempt,
        whole=spec.schedule.whole_steps,
        epochs=spec.algorithm.epochs,
        mini_batches=spec.algorithm.mini_batches,
        published=spec.published_dtype if spec.trainer.lora is None else "float32",
        checkpoint_every=spec.storage.checkpoints.every,
        checkpoint_evaluated=spec.storage.checkpoints.keep_best is not None,
        leave_s=spec.limits.stop_seconds / 4,
    )
