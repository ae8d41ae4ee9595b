"""One process of a user's task: the user's function, run by ``tasks.worker``."""

from __future__ import annotations

import asyncio
import contextlib

from asyncflow.api.job import RLJobSpec
from asyncflow.api.names import TRAIN
from asyncflow.api.tasks import UserTaskSpec
from asyncflow.errors import ManifestError
from asyncflow.models.source import materialize_config
from asyncflow.models.tokenizer import Tokenizer
from asyncflow.queue.client import QueueClient
from asyncflow.roles.context import JobContext, RoleOptions, run_role
from asyncflow.rpc.membership import Status
from asyncflow.tasks.functions import TaskFunction
from asyncflow.tasks.rows import OutputColumn
from asyncflow.tasks.worker import Compute, TaskSettings, TaskWorker
from asyncflow.telemetry.metrics import TaskMetrics, WorkerMetrics


def main(options: RoleOptions) -> int:
    """Run one process of a task."""
    return run_role(serve, options)


async def serve(context: JobContext) -> None:
    """Compute rows until this process is to stop or to drain. Raises ManifestError if the function cannot be loaded."""
    spec = context.job.spec
    task = task_of(spec, context.options.role)
    assert task.function is not None
    decode = None
    if "response_ids" in task.reads:
        folder = await asyncio.to_thread(materialize_config, spec.model.source, context.options.workdir)
        decode = Tokenizer.load(folder).decode
    outputs = outputs_of(task, default=spec.sampling.max_tokens)
    function = TaskFunction(
        task.function,
        workdir=context.folder,
        outputs=outputs,
        config=task.config,
        parallel=task.parallel,
        timeout_s=task.timeout_seconds,
        groups=task.groups,
        decode=decode,
    )
    settings = TaskSettings(
        partitions=(TRAIN,),
        task=task.name,
        reads=task.reads,
        writes=outputs,
        batch=task.batch,
        parallel=task.parallel,
        retries=task.retries,
        lease_s=task.lease_seconds,
        drain_s=task.drain_seconds,
    )
    try:
        if await context.run_until_stopped(function.start()):
            await work(context, settings, function.compute, metrics=TaskMetrics())
    finally:
        await function.close()


async def work(context: JobContext, settings: TaskSettings, compute: Compute, *, metrics: WorkerMetrics) -> None:
    """Join the job, and work on the rows of a task until this process is to stop or to drain."""
    worker: TaskWorker | None = None

    def status() -> Status:
        return {} if worker is None else worker.status()

    async with contextlib.AsyncExitStack() as stack:
        membership = await context.join(metrics=metrics, status=status)
        stack.push_async_callback(membership.close)
        queue = QueueClient.of(membership, credentials=context.credentials)
        stack.push_async_callback(queue.close)
        worker = TaskWorker(queue=queue, settings=settings, compute=compute, metrics=metrics, spans=context.spans)
        metrics.watch_busy(worker.busy)
        leaving = asyncio.create_task(context.call_when_leaving(worker.leave))
        try:
            await worker.run()
        finally:
            leaving.cancel()


def task_of(spec: RLJobSpec, role: str) -> UserTaskSpec:
    """Return the user's task that a role runs. Raises ManifestError if the manifest has no such task."""
    found = spec.task_roles
    if role not in found:
        hint = f"It has {', '.join(found) or 'none'}"
        raise ManifestError(f"there is no task for the role {role!r}", where="spec.tasks", hint=hint)
    return found[role]


def outputs_of(task: UserTaskSpec, *, default: int) -> tuple[OutputColumn, ...]:
    """Return the columns that a task writes. default: most entries of a row, if the manifest sets no number."""
    return tuple(OutputColumn(name=one.name, dtype=one.dtype, most=one.most or default) for one in task.writes)
