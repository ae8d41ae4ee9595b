"""One follower: an engine that serves with the newest weights of a job, or of a published model.

A follower is not part of the job. It has the same engine as the job's rollouts; if no job trains the model, the
WeightSync sets the engine. The engine's inference service (for vLLM: OpenAI-compatible) uses plain HTTP without
authentication, so the network must restrict access to its port. A follower registers in the job's directory under a
random index, so any number of followers may share one certificate. It does not end with the job.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from aiohttp import web

from asyncflow.api.load import load_sync
from asyncflow.api.placement import AcceleratorSpec
from asyncflow.api.weights import FollowerSpec, WeightSync
from asyncflow.models.source import ModelSource, materialize_config, positions
from asyncflow.models.stored import newest_config
from asyncflow.models.tokenizer import Tokenizer
from asyncflow.roles.context import JobContext, ProcessContext, RoleOptions, SyncContext, run_role
from asyncflow.roles.rollout import engine_for, engine_of, loaded, merge_of, probe_gap_of, received
from asyncflow.rollout.engines.base import RolloutEngine
from asyncflow.rollout.following import FollowingEngine
from asyncflow.rollout.loading import ROUNDED, Merge, WeightLoader
from asyncflow.rpc.membership import Status
from asyncflow.telemetry.metrics import FollowerMetrics
from asyncflow.weights.follower import JOIN_S, Follower
from asyncflow.weights.holder import node_name

log = logging.getLogger(__name__)

_CLOSE_S = 1.0
_USUAL_LENGTH = 4096
_MOST_BODY = 16 << 20


def main(options: RoleOptions) -> int:
    """Run a follower."""
    return run_role(serve, options, published=serve_published)


async def serve(context: JobContext) -> None:
    """Follow a job until a signal ends this process."""
    spec = context.job.spec
    folder = materialize_config(spec.model.source, context.options.workdir)
    engine = engine_of(spec, folder, Tokenizer.load(folder))
    merge = await asyncio.to_thread(merge_of, spec, folder)
    sync = None if context.options.sync is None else load_sync(context.options.sync, job=context.job.name)
    await _follow(context, engine, spec.rollout.accelerator, probe_gap=probe_gap_of(spec), merge=merge, sync=sync)


async def serve_published(context: SyncContext) -> None:
    """Follow the publisher of a model until a signal ends this process; versions are verified by digests only."""
    spec, source, options = context.resource.spec.follower or FollowerSpec(), context.source, context.options
    assert source.model is not None
    if source.watch:
        folder = newest_config(ModelSource.resolve(source.model, options.workdir).folder)
    else:
        folder = materialize_config(source.model, options.workdir)
    longest = spec.max_length
    if longest is None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        longest = min(_USUAL_LENGTH, positions(config) or _USUAL_LENGTH)
    engine = engine_for(spec, folder, Tokenizer.load(folder), max_length=longest)
    await _follow(context, engine, spec.accelerator, probe_gap=ROUNDED, sync=context.resource)


async def _follow(context: ProcessContext, engine: RolloutEngine, *args: Any, **kwargs: Any) -> None:
    """Start ``engine`` and call ``serve_newest`` with the other arguments."""
    engine.spans = context.spans
    try:
        if await context.run_until_stopped(engine.start()):
            await serve_newest(context, engine, *args, **kwargs)
    finally:
        await engine.close()


async def serve_newest(
    context: ProcessContext,
    engine: RolloutEngine,
    accelerator: AcceleratorSpec,
    *,
    probe_gap: float,
    merge: Merge | None = None,
    sync: WeightSync | None = None,
) -> None:
    """Serve with a started engine and the newest weights, until this process is to end.

    merge, probe_gap: see ``WeightLoader``; sync: WeightSync that sets how the followers of a fleet update weights, None
    to load each version as soon as it is available.
    """
    options, metrics = context.options, FollowerMetrics()
    metrics.relay(engine.metrics)

    async with AsyncExitStack() as stack:
        http = context.http(metrics, ready=partial(loaded, engine))
        url = await http.start(context.host, options.http_port)
        stack.push_async_callback(http.close)
        context.spans.serve(waits="calls")
        if routes := list(engine.routes()):
            runner = await serve_routes(routes, host=context.host, port=options.serve_port)
            stack.push_async_callback(runner.cleanup)
            log.info("serves %s", ", ".join(f"http://{host}:{port}/v1" for host, port, *_ in runner.addresses))
        else:
            log.warning("this engine has no inference service, unlike the engine vllm; it only loads the weights")

        def join(status: Callable[[], Status]) -> tuple[Follower, WeightLoader]:
            follower = Follower(
                driver=options.driver,
                transport=context.transport(accelerator),
                credentials=context.credentials,
                node=node_name(),
                http=url,
                status=status,
                on_transfer=partial(received, context, metrics),
                sync=sync,
            )
            loader = WeightLoader(
                follower.receiver, engine, metrics=metrics, probe_gap=probe_gap, merge=merge, spans=context.spans
            )
            return follower, loader

        await context.run_until_stopped(FollowingEngine(engine, join=join, join_s=JOIN_S).run())


async def serve_routes(routes: Iterable[web.RouteDef], *, host: str, port: int) -> web.AppRunner:
    """Serve an engine's routes in plain HTTP; a request is cancelled when its caller disconnects."""
    app = web.Application(client_max_size=_MOST_BODY)
    app.add_routes(routes)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CLOSE_S, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner
