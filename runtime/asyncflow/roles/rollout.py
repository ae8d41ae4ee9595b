"""One rollout instance: it connects ``rollout.worker`` with its engine, rewards and weights."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from asyncflow.api.job import RLJobSpec
from asyncflow.api.names import HANDED_ON
from asyncflow.api.placement import PROFILES
from asyncflow.api.weights import FollowerSpec
from asyncflow.api.workers import RolloutSpec
from asyncflow.environments.pool import open_environment
from asyncflow.environments.transcripts import stop_ids_of
from asyncflow.flow.instance import Instance
from asyncflow.models.lora import MergedWeights
from asyncflow.models.source import materialize_config, materialize_weights
from asyncflow.models.tokenizer import Tokenizer
from asyncflow.queue.client import QueueClient
from asyncflow.rewards.service import open_rewards
from asyncflow.roles.context import JobContext, ProcessContext, RoleOptions, run_role
from asyncflow.rollout.engines import open_engine
from asyncflow.rollout.engines.base import Devices, RolloutEngine
from asyncflow.rollout.job import RolloutSettings
from asyncflow.rollout.loading import EXACT, ROUNDED
from asyncflow.rollout.worker import RolloutWorker, next_version_of
from asyncflow.rpc.membership import Status
from asyncflow.telemetry.metrics import LoadingMetrics, RolloutMetrics
from asyncflow.weights.holder import node_name
from asyncflow.weights.permits import SwapPermits
from asyncflow.weights.receiver import WeightReceiver
from asyncflow.weights.transfer import TransferRecord

MakeEngine: TypeAlias = Callable[..., RolloutEngine]
"""Factory of an engine; it takes the settings of ``RolloutEngine``."""


def main(options: RoleOptions) -> int:
    """Run a rollout instance."""
    return run_role(serve, options)


async def serve(context: JobContext, *, make_engine: MakeEngine | None = None) -> None:
    """Generate until this process is to stop or to drain. make_engine: engine factory, by default the manifest's."""
    spec, options = context.job.spec, context.options
    metrics = RolloutMetrics()
    folder = materialize_config(spec.model.source, options.workdir)
    tokenizer = Tokenizer.load(folder)
    engine = engine_of(spec, folder, tokenizer, make=make_engine)
    engine.spans = context.spans
    metrics.relay(engine.metrics)
    rewards = None
    if spec.reward.role is None:
        rewards = open_rewards(spec.reward, workdir=context.folder, run=options.workdir, within_s=context.start_s)
    environment = None
    if spec.environment is not None:
        environment = open_environment(
            spec.environment,
            spec.reward,
            workdir=context.folder,
            run=options.workdir,
            within_s=context.start_s,
        )
    staggered = spec.schedule.update == "staggered"
    instance = Instance(
        swap_at=spec.schedule.swap_at,
        slots=spec.rollout.engine.slots,
        staggered=staggered,
    )
    worker: RolloutWorker | None = None

    def status() -> Status:
        return {} if worker is None else worker.status()

    async with contextlib.AsyncExitStack() as stack:
        merge = await asyncio.to_thread(merge_of, spec, folder)
        stack.push_async_callback(engine.close)
        if not await context.run_until_stopped(engine.start()):
            return
        membership = await context.join(metrics=metrics, status=status, ready=partial(loaded, engine))

        async def leave(error: type[BaseException] | None, *_: object) -> None:
            await membership.close("left" if error else HANDED_ON)

        stack.push_async_exit(leave)
        queue = QueueClient.of(membership, credentials=context.credentials)
        stack.push_async_callback(queue.close)
        receiver = WeightReceiver(
            membership=membership,
            worker=context.worker,
            transport=context.transport(spec.rollout.accelerator),
            node=node_name(),
            want=next_version_of(instance),
            on_transfer=partial(received, context, metrics),
        )
        await receiver.start()
        stack.push_async_callback(receiver.close)
        if rewards is not None:
            await rewards.start()
            stack.push_async_callback(rewards.close)
        if environment is not None:
            await environment.start()
            stack.push_async_callback(environment.close)
        worker = RolloutWorker(
            queue=queue,
            receiver=receiver,
            engine=engine,
            rewards=rewards,
            tokenizer=tokenizer,
            instance=instance,
            settings=settings_of(spec, tokenizer),
            metrics=metrics,
            merge=merge,
            environment=environment,
            permits=SwapPermits(membership=membership, worker=context.worker) if staggered else None,
            spans=context.spans,
        )
        metrics.watch_busy(worker.meter.busy)
        metrics.watch_busy(worker.meter.occupied, what="occupied")
        draining = asyncio.create_task(context.call_when_leaving(worker.drain))
        try:
            await worker.run()
        finally:
            draining.cancel()


def loaded(engine: RolloutEngine) -> tuple[bool, str]:
    """Return whether an engine has loaded weights, and the reason as text."""
    is_loaded = engine.version is not None
    return is_loaded, "ready" if is_loaded else "no weights are loaded yet"


def received(context: ProcessContext, metrics: LoadingMetrics, record: TransferRecord) -> None:
    """Count and record a received version."""
    metrics.count_pull(record)
    context.spans.note("receive", begin=record.started, end=record.finished, version=record.version.step)


def settings_of(spec: RLJobSpec, tokenizer: Tokenizer) -> RolloutSettings:
    """Return the settings that all instances of a job share."""
    return RolloutSettings(
        temperature=spec.sampling.temperature,
        max_tokens=spec.sampling.max_tokens,
        stop_ids=stop_ids_of(tokenizer, spec.sampling.stop),
        stop_texts=tuple(text for text in spec.sampling.stop if tokenizer.special_id(text) is None),
        seed=spec.algorithm.seed,
        group_sizes=spec.group_sizes,
        lease_s=spec.rollout.lease_seconds,
        drain_s=spec.rollout.drain_seconds,
        mixes=spec.schedule.swap_at == "token",
        max_turns=1 if spec.environment is None else spec.environment.max_turns,
        scores_here=spec.reward.role is None,
        probe_gap=probe_gap_of(spec),
    )


def engine_of(spec: RLJobSpec, folder: Path, tokenizer: Tokenizer, *, make: MakeEngine | None = None) -> RolloutEngine:
    """Return the engine of the job's rollouts for the model in ``folder``, not started. make: another factory."""
    return engine_for(
        spec.rollout,
        folder,
        tokenizer,
        make=make,
        max_length=spec.longest,
        seed=spec.algorithm.seed,
        deterministic=spec.schedule.deterministic,
        keeps_prefix=spec.schedule.prefix == "keep",
    )


def engine_for(
    worker: RolloutSpec | FollowerSpec,
    folder: Path,
    tokenizer: Tokenizer,
    *,
    max_length: int,
    make: MakeEngine | None = None,
    **options: Any,
) -> RolloutEngine:
    """Return the engine of ``worker`` for the model in ``folder``, not started.

    make: factory of another engine than ``worker`` names; options: see ``open_engine``.
    """
    return (make or partial(open_engine, worker.engine.name))(
        folder=folder,
        slots=worker.engine.slots,
        max_length=max_length,
        threads=worker.threads,
        dtype=worker.engine.dtype,
        options=worker.engine.options,
        decode=partial(tokenizer.decode, skip_special_tokens=False),
        devices=Devices(
            kind=PROFILES[worker.accelerator.profile].device,
            count=max(1, worker.accelerator.count),
            share=worker.accelerator.share,
        ),
        **options,
    )


def probe_gap_of(spec: RLJobSpec) -> float:
    """Return the tolerance between an engine's and the trainer's log-probs under the same weights."""
    exact = spec.rollout.engine.dtype == spec.published_dtype == spec.trainer.backend.precision == "float32"
    return EXACT if exact else ROUNDED


def merge_of(spec: RLJobSpec, folder: Path) -> MergedWeights | None:
    """Read the base model of published adapters; return None if whole weights are published. Blocks."""
    if spec.trainer.lora is None:
        return None
    materialize_weights(spec.model.source, folder)
    return MergedWeights(folder, scale=spec.trainer.lora.scale, dtype=spec.published_dtype)
