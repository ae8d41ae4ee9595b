"""One process of the reference model: log-probs under θ_0, computed by ``tasks.worker``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from asyncflow.api.graph import REF_LOGPROBS, REFERENCE
from asyncflow.api.names import TRAIN
from asyncflow.api.placement import PROFILES
from asyncflow.errors import ManifestError
from asyncflow.models.source import materialize_config, materialize_weights
from asyncflow.queue.protocol.messages import LeasedRow
from asyncflow.roles.backend import backend_settings
from asyncflow.roles.context import JobContext, RoleOptions, run_role
from asyncflow.roles.task import work
from asyncflow.rpc.columns import Jagged
from asyncflow.tasks.rows import OutputColumn, Result
from asyncflow.tasks.worker import TaskSettings
from asyncflow.telemetry.metrics import ReferenceMetrics
from asyncflow.training.torch.reference import ReferenceModel


def main(options: RoleOptions) -> int:
    """Run one process of the reference model."""
    return run_role(serve, options)


async def serve(context: JobContext) -> None:
    """Compute rows until this process is to stop or to drain. Raises ManifestError if the model cannot be opened."""
    spec = context.job.spec
    role = spec.reference
    if role is None:
        raise ManifestError("the job has no reference of its own", where="spec.reference", hint="Add it")
    folder = materialize_config(spec.model.source, context.options.workdir)
    accelerator = role.accelerator
    settings = replace(
        backend_settings(spec, host=context.host),
        device=PROFILES[accelerator.profile].device,
        share=accelerator.share,
        threads=role.threads,
        options=spec.trainer.backend.options if spec.trainer.backend.name == "torch" else {},
    )
    threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
    loop = asyncio.get_running_loop()

    def open_model() -> ReferenceModel:
        materialize_weights(spec.model.source, folder)
        return ReferenceModel(folder, settings)

    model = await loop.run_in_executor(threads, open_model)

    async def compute(rows: Sequence[LeasedRow], columns: Mapping[str, Jagged]) -> Sequence[Result]:
        return await loop.run_in_executor(threads, model.compute, rows, columns)

    task = TaskSettings(
        partitions=(TRAIN,),
        task=REFERENCE,
        reads=("prompt_ids", "response_ids"),
        writes=(OutputColumn(name=REF_LOGPROBS, dtype="float32", most=spec.sampling.max_tokens),),
        batch=role.batch,
        lease_s=role.lease_seconds,
        drain_s=role.drain_seconds,
    )
    try:
        await work(context, task, compute, metrics=ReferenceMetrics())
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
