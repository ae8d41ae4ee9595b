"""One rank of the trainer: queue, weights, backend and checkpoints around ``train.trainer``.

A replica of several ranks starts them as processes of their own (``ranks``), and is none itself.
A rank that has made the last step stays, and serves its versions, until the driver says stop.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import msgspec

from asyncflow.algorithms.aggregation import Aggregation
from asyncflow.algorithms.grpo import GrpoLoss
from asyncflow.algorithms.losses import Clip
from asyncflow.api.accelerators import PROFILES
from asyncflow.api.job import RLJobSpec
from asyncflow.driver.tasks import TRAIN
from asyncflow.errors import ManifestError
from asyncflow.flow.schedule import Schedule
from asyncflow.models.export import export_folder
from asyncflow.models.lora import export_adapters
from asyncflow.models.source import ModelSource, materialize_config, materialize_weights
from asyncflow.net.membership import Membership
from asyncflow.net.roster import Directives
from asyncflow.net.rpc import RpcServer
from asyncflow.plugins import load_plugin
from asyncflow.queue.client.client import QueueClient
from asyncflow.roles.base import run_role
from asyncflow.roles.post import JobPost, RoleOptions
from asyncflow.roles.ranks import serve_ranks
from asyncflow.telemetry.metrics import TrainerMetrics
from asyncflow.train.backends.base import TrainerBackend
from asyncflow.train.best import BestKeeper, find_checkpoint
from asyncflow.train.checkpoint import Checkpoints
from asyncflow.train.ranks import Alone, GatherService, Group, HostGroup
from asyncflow.train.report import Reported, TrainReport
from asyncflow.train.settings import BackendSettings, OptimizerSettings, TrainerSettings
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
    kind, metrics = _kind_of_backend(spec, device=PROFILES[spec.trainer.accelerator.profile].device), TrainerMetrics()
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
        materialise=lambda: materialize_weights(spec.model.source, folder) if backend.of_model else None,
    )
    metrics.watch_busy(trainer.busy)
    leaving = asyncio.create_task(_leave_when_told(post, trainer))
    step = await trainer.run()
    if step >= spec.algorithm.steps:
        if backend.of_model:
            await asyncio.to_thread(
                _export, spec, backend, folder, run=options.workdir, target=options.workdir / "export"
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
    if report.seconds.checkpoint:
        metrics.checkpoint_seconds.observe(report.seconds.checkpoint)
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


def _kind_of_backend(spec: RLJobSpec, *, device: str) -> type[TrainerBackend]:
    """Import the backend: seconds in which no heartbeat leaves, so before there is any.

    On an NPU torch_npu comes first, because transformers imports it too, and would not say what it lacks.
    """
    if device == "npu":
        import_module("asyncflow.train.backends.torch_npu").load_npu()
    where = "spec.trainer.backend.name"
    return load_plugin("asyncflow.trainer_backends", spec.trainer.backend.name, kind=TrainerBackend, where=where)


def backend_settings(spec: RLJobSpec, *, host: str, local_rank: int = 0) -> BackendSettings:
    """Return what the backend of a rank that others reach at ``host`` has to know of the job."""
    algorithm, backend = spec.algorithm, spec.trainer.backend
    return BackendSettings(
        optimizer=OptimizerSettings(
            learning_rate=algorithm.learning_rate,
            steps=algorithm.steps,
            warmup_steps=algorithm.warmup_steps,
            curve=algorithm.learning_rate_curve,
            final_fraction=algorithm.final_learning_rate / algorithm.learning_rate,
            betas=(algorithm.betas[0], algorithm.betas[1]),
            epsilon=algorithm.epsilon,
            weight_decay=algorithm.weight_decay,
            max_grad_norm=algorithm.max_grad_norm,
        ),
        loss=GrpoLoss(
            clip=Clip(low=algorithm.clip.low, high=algorithm.clip.high, dual=algorithm.clip.dual),
            aggregation=Aggregation(name=algorithm.aggregation, horizon=spec.sampling.max_tokens),
            old="recompute" if algorithm.old == "recompute" else "behaviour",
            kl=algorithm.kl.coefficient,
            kl_name=algorithm.kl.estimator,
            entropy=algorithm.entropy,
        ),
        lora=spec.trainer.lora,
        temperature=spec.sampling.temperature,
        compute="bfloat16" if backend.precision == "bf16" else "float32",
        layout=backend.packing,
        pack_tokens=backend.tokens_per_micro_batch,
        longest=spec.longest,
        threads=spec.trainer.threads,
        group_size=algorithm.group_size,
        seed=algorithm.seed,
        device=PROFILES[spec.trainer.accelerator.profile].device,
        share=spec.trainer.accelerator.share,
        local_rank=local_rank,
        host=host,
        deterministic=spec.schedule.deterministic,
        options=backend.options,
    )


def export_checkpoint(spec: RLJobSpec, *, run: Path, step: str, target: Path) -> int:
    """Write the weights of a checkpoint in the folder ``run`` as a Hugging Face folder; return its step.

    step: ``newest``, ``best``, or a number; 0 is the model that the run began with. All is done on the CPU, by one
    rank. Raises CheckpointError where there is no such checkpoint or it is damaged, ManifestError where ``target``
    exists or the back end trains no model.
    """
    if target.exists():
        raise ManifestError("is there already", where=str(target), hint="Give a folder that does not exist")
    kind = _kind_of_backend(spec, device="cpu")
    checkpoints = Checkpoints(run / "checkpoints")
    chosen, checkpoint = find_checkpoint(checkpoints, step)
    if checkpoint is not None:
        checkpoint.verify()
    settings = backend_settings(spec, host="127.0.0.1")
    options = {name: value for name, value in settings.options.items() if name != "compile"}
    without_reference = replace(settings.loss, kl=0.0)
    settings = replace(settings, loss=without_reference, device="cpu", share=1.0, options=options)
    backend = kind(settings, group=Alone())
    if not backend.of_model:
        name = spec.trainer.backend.name
        raise ManifestError(f"the back end {name} trains no model", where=str(run), hint="There is nothing to export")
    model = materialize_config(spec.model.source, run)
    if checkpoint is None or backend.settings.needs_initial_weights:
        materialize_weights(spec.model.source, model)
    backend.load(model, checkpoint=checkpoint.folder if checkpoint is not None else None)
    _export(spec, backend, model, run=run, target=target)
    backend.close()
    return chosen


def _export(spec: RLJobSpec, backend: TrainerBackend, model: Path, *, run: Path, target: Path) -> None:
    """Have rank 0 write what all ranks hold: a whole model, or the adapters beside the name of theirs."""
    first, whole = backend.group.rank == 0, backend.whole(dict(backend.tensors()))
    weights = {name: array for name, array in whole if first}
    if not first:
        return
    if spec.trainer.lora is None:
        export_folder(weights, model, target)
        return
    source = ModelSource.resolve(spec.model.source, run)
    base = source.name if source.kind == "hf" else str(model.absolute())
    export_adapters(weights, spec.trainer.lora, base=base, target=target)
