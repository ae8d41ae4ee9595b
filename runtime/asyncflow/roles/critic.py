"""The critic as a separate process: a value model, served to the trainer's ranks by ``training.critic``."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Final

from asyncflow.api.placement import PROFILES
from asyncflow.errors import ManifestError
from asyncflow.models.source import materialize_config, materialize_weights
from asyncflow.plan.job import critic_role
from asyncflow.roles.backend import backend_settings, kind_of_backend
from asyncflow.roles.context import JobContext, RoleOptions, run_role
from asyncflow.rpc.membership import Membership, Status
from asyncflow.rpc.server import RpcServer
from asyncflow.telemetry.metrics import CriticMetrics
from asyncflow.training.critic import CriticModel, CriticService

_POLL_S: Final = 0.2


def main(options: RoleOptions) -> int:
    """Run the critic."""
    return run_role(serve, options)


async def serve(context: JobContext) -> None:
    """Serve the trainer until this process is to stop, and then until the trainer has left.

    The trainer may still write a checkpoint at the end, which includes the critic. Raises ManifestError if the job has
    no such role.
    """
    spec, options = context.job.spec, context.options
    role = critic_role(spec)
    settings = backend_settings(spec, host=context.host)
    if role is None or settings.critic is None:
        raise ManifestError("the job has no critic of its own", where="spec.critic.role", hint="Add it")
    device = PROFILES[role.accelerator.profile].device
    settings = replace(settings, device=device, share=role.accelerator.share, threads=role.threads)
    backend = kind_of_backend(spec, device=device)
    folder = await asyncio.to_thread(materialize_config, spec.model.source, options.workdir)

    def make() -> CriticModel:
        if backend.of_model:
            materialize_weights(spec.model.source, folder)
        return backend.separate_critic(settings, folder=folder)

    service = CriticService(
        make, checkpoints=options.workdir / "checkpoints", rank=options.index, host=context.host, spans=context.spans
    )
    metrics = CriticMetrics()
    metrics.watch_busy(service.busy)

    def status() -> Status:
        return {"busy_s": service.busy.total(), "step": service.step}

    async with contextlib.AsyncExitStack() as stack:
        stack.callback(service.close)
        server = RpcServer(
            name=f"critic-{options.index}", bind=context.bind, credentials=context.credentials, access=context.access
        )
        service.attach(server)
        address = await server.start()
        stack.push_async_callback(server.close)
        membership = await context.join(metrics=metrics, address=address, status=status)
        context.spans.enter("idle", waits="calls")
        stack.push_async_callback(membership.close)
        await context.stopping.wait()
        await _outlive_trainer(membership, within_s=spec.limits.stop_seconds)


async def _outlive_trainer(membership: Membership, *, within_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while membership.peer("trainer") is not None:
                await asyncio.sleep(_POLL_S)
