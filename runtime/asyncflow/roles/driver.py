"""The driver's process: directory, catalogue and driver at one address, and the HTTP and control services."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from asyncflow.api.names import LAST_WORDS_ENV
from asyncflow.api.status import DriverStatus
from asyncflow.data.put import PutSource
from asyncflow.data.sources import CACHE, open_held_out, open_training
from asyncflow.driver.driver import Driver
from asyncflow.driver.journal import PROMPTS
from asyncflow.driver.sinks import Sinks
from asyncflow.driver.status import control_routes, last_words, status_route, view_routes
from asyncflow.models.source import materialize_config
from asyncflow.models.tokenizer import Tokenizer
from asyncflow.queue.client import QueueClient
from asyncflow.roles.context import JobContext, RoleOptions, run_role
from asyncflow.rpc.access import worker_name
from asyncflow.rpc.directory import Directory
from asyncflow.rpc.server import RpcServer
from asyncflow.telemetry.metrics import DriverMetrics
from asyncflow.view.page.changes import facts
from asyncflow.view.page.routes import page_routes
from asyncflow.view.page.spans import Timelines

log = logging.getLogger(__name__)

WORKER = worker_name("driver", 0, "driver")
"""Worker name of the driver's leases; all incarnations share it, so each one can end its predecessor's leases."""


def main(options: RoleOptions) -> int:
    """Run the driver."""
    return run_role(serve, options)


async def serve(context: JobContext) -> None:
    """Drive the job to its end, or until this process is to stop."""
    spec, options, metrics = context.job.spec, context.options, DriverMetrics()
    tokenizer = Tokenizer.load(materialize_config(spec.model.source, options.workdir))
    cache = options.workdir / CACHE
    train = open_training(spec.data, tokenizer, folder=context.folder, cache=cache)
    if isinstance(train.source, PutSource):
        train.source.keep(options.workdir / PROMPTS)
    held_out = {}
    if spec.evaluation is not None:
        held_out = open_held_out(spec.data, tokenizer, train=train.source, folder=context.folder, cache=cache)
    server = RpcServer(
        name="driver",
        bind=options.driver,
        credentials=context.credentials,
        access=context.access,
        advertise=context.host,
    )
    directory = Directory()
    directory.attach(server)
    queue = QueueClient(
        find=partial(_address, directory),
        units=lambda: [member.index for member in directory.members("storage")],
        worker=WORKER,
        attempt=options.attempt,
        credentials=context.credentials,
    )
    sinks = Sinks(
        [sink.kind for sink in spec.telemetry.sinks],
        job=options.job,
        folder=options.workdir,
        failed=lambda kind: metrics.sink_failures.labels(kind).inc(),
    )
    driver = Driver(
        context.job,
        folder=options.workdir,
        server=server,
        directory=directory,
        queue=queue,
        train_prompts=train,
        eval_prompts=held_out,
        decode=partial(tokenizer.decode, skip_special_tokens=False),
        sinks=sinks,
        metrics=metrics,
        spans=context.spans,
    )
    metrics.watch_rpc(server.counters)
    described = facts(context.job)

    def status() -> DriverStatus:
        return driver.status().model_copy(update={"insecure": context.insecure})

    views = view_routes(live=driver.live, evidence=driver.evidence)
    page = page_routes(
        options.workdir,
        job=lambda: described,
        status=_as_coroutine(status),
        timelines=Timelines(options.workdir),
        texts=False,
    )
    http = context.http(metrics, routes=[status_route(status), *views, *page])
    control = context.control(control_routes(driver), refused=server.note_refusal)
    await server.start()
    await http.start(context.host, options.http_port)
    if control is None:
        log.warning("this driver has no certificate, so it serves no control service")
    else:
        await control.start(context.host, options.control_port)
    try:
        if await context.run_until_stopped(driver.run()):
            await driver.conclude()
            message = last_words(status())
            await driver.dismiss()
            _write_termination_message(message)
        else:
            await sinks.close(within_s=spec.limits.stop_seconds / 4)
    finally:
        await sinks.abandon()
        await directory.close()
        await queue.close()
        await http.close()
        if control is not None:
            await control.close()
        await server.close()


def _as_coroutine(status: Callable[[], DriverStatus]) -> Callable[[], Awaitable[DriverStatus]]:
    async def answer() -> DriverStatus:
        return status()

    return answer


def _write_termination_message(message: str) -> None:
    """Write ``message`` to the file that the kubelet reads: the operator may not have polled since the last step."""
    if path := os.environ.get(LAST_WORDS_ENV):
        Path(path).write_text(message)


def _address(directory: Directory, role: str, index: int) -> str | None:
    return next((member.address for member in directory.members(role) if member.index == index), None)
