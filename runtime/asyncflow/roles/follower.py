"""One follower: an engine as rollouts have it, outside of the job, that serves under the job's newest weights.

The engine's own inference service (of vLLM: OpenAI-compatible) is served in plain HTTP, without asking who calls: who
may reach the port is for the network around it to say. It takes a place of its own in the job's directory, so that any
number of followers may share one certificate. It does not end with the job.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack

from aiohttp import web

from asyncflow.models.source import materialize_config
from asyncflow.models.tokenizer import Tokenizer
from asyncflow.roles.context import JobContext, RoleOptions, run_role
from asyncflow.roles.rollout import engine_of, merge_of, probe_gap_of
from asyncflow.rollout.following import FollowingEngine
from asyncflow.rollout.loading import WeightLoader
from asyncflow.rpc.membership import Status
from asyncflow.telemetry.metrics import FollowerMetrics
from asyncflow.weights.follower import Follower

log = logging.getLogger(__name__)

_CLOSE_S = 1.0
_MOST_BODY = 16 << 20


def main(options: RoleOptions) -> int:
    """Run a follower."""
    return run_role(serve, options)


async def serve(context: JobContext) -> None:
    """Follow the job until told to end by a signal."""
    spec, options, metrics = context.job.spec, context.options, FollowerMetrics()
    folder = materialize_config(spec.model.source, options.workdir)
    engine = engine_of(spec, folder, Tokenizer.load(folder))
    metrics.relay(engine.metrics)

    def ready() -> tuple[bool, str]:
        return engine.version is not None, "ready" if engine.version is not None else "no weights are loaded yet"

    async with AsyncExitStack() as stack:
        merge = await asyncio.to_thread(merge_of, spec, folder)
        stack.push_async_callback(engine.close)
        if not await context.unless_stopped(engine.start()):
            return
        http = context.http(metrics, ready=ready)
        url = await http.start(context.host, options.http_port)
        stack.push_async_callback(http.close)
        if routes := list(engine.routes()):
            runner = await serve_routes(routes, host=context.host, port=options.serve_port)
            stack.push_async_callback(runner.cleanup)
            log.info("serves %s", ", ".join(f"http://{host}:{port}/v1" for host, port, *_ in runner.addresses))

        def join(status: Callable[[], Status]) -> tuple[Follower, WeightLoader]:
            follower = Follower(
                driver=options.driver,
                transport=context.transport(spec.rollout.accelerator),
                credentials=context.credentials,
                http=url,
                status=status,
                on_transfer=metrics.count_pull,
            )
            gap = probe_gap_of(spec)
            return follower, WeightLoader(follower.receiver, engine, metrics=metrics, probe_gap=gap, merge=merge)

        await context.unless_stopped(FollowingEngine(engine, join=join, join_s=context.start_s).run())


async def serve_routes(routes: Iterable[web.RouteDef], *, host: str, port: int) -> web.AppRunner:
    """Serve an engine's routes in plain HTTP; what a caller asked for is cancelled when the caller goes."""
    app = web.Application(client_max_size=_MOST_BODY)
    app.add_routes(routes)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CLOSE_S, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner
