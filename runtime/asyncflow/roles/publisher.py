"""The publisher of a model that no job trains, at the address to which its followers connect.

The publisher is the first member of its own directory, serves the catalogue, and publishes like a trainer with one
rank. A fixed model is θ_0. In a watched folder each newer model becomes a version (``models.stored``), with the number
of its subfolder, or the next number.

Invariants:

* All versions have the same tensors, by name, dtype and shape, since an engine cannot change them. A model with other
  tensors, or with the same bytes as the previous version, is skipped.
* A fixed model that cannot be read is refused immediately. In a watched folder the publisher waits for a readable
  model, and its status says what it waits for.
* A restarted publisher publishes as a newer attempt, and followers pull the versions that they lack.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from functools import partial
from typing import Final

from asyncflow.api.names import PUBLISHER
from asyncflow.api.placement import AcceleratorSpec
from asyncflow.api.status import DriverStatus
from asyncflow.driver.instances import last_heartbeats, versions_state
from asyncflow.driver.status import status_route
from asyncflow.errors import DiskError
from asyncflow.identity import Version
from asyncflow.models.source import ModelSource, materialize_config, materialize_weights
from asyncflow.models.stored import ModelWatch, StoredModel
from asyncflow.roles.context import RoleOptions, SyncContext, run_role
from asyncflow.rpc.directory import Directory
from asyncflow.rpc.membership import Status
from asyncflow.rpc.retry import retry
from asyncflow.rpc.server import RpcServer
from asyncflow.telemetry.metrics import PublisherMetrics
from asyncflow.weights.catalogue import Catalogue
from asyncflow.weights.manifest import TensorEntry
from asyncflow.weights.permits import PermitService
from asyncflow.weights.sender import WeightSender
from asyncflow.weights.service import CatalogueService

log = logging.getLogger(__name__)

POLL_S: Final = 1.0
"""Interval in seconds at which a watched folder is checked."""
_CALL_S: Final = 30.0


def main(options: RoleOptions) -> int:
    """Run a publisher."""
    return run_role(None, options, published=serve)


async def serve(context: SyncContext) -> None:
    """Publish until a signal ends this process."""
    metrics = PublisherMetrics()
    front = RpcServer(
        name=PUBLISHER,
        bind=context.options.driver,
        credentials=context.credentials,
        access=context.access,
        advertise=context.host,
    )
    directory, catalogue = Directory(), Catalogue(keep=context.weights.keep)
    directory.attach(front)
    service = CatalogueService(front, directory=directory, catalogue=catalogue)
    service.require(())
    PermitService(front, directory=directory)
    publishing = Publishing(context, metrics=metrics)

    def status() -> DriverStatus:
        newest = catalogue.newest
        nbytes = catalogue.manifest(newest).nbytes if newest is not None and catalogue.available(newest) else None
        step = 0 if newest is None else newest.step
        return DriverStatus(
            attempt=context.options.attempt,
            phase="Starting" if newest is None else "Running",
            insecure=context.insecure,
            version=step,
            versions=versions_state(last_heartbeats(directory), nbytes=nbytes, newest=step, swap_at="token"),
            waiting_for=publishing.waits[:_MOST_WAITING_FOR],
        )

    def ready() -> tuple[bool, str]:
        return catalogue.newest is not None, publishing.waits or "ready"

    async with AsyncExitStack() as stack:
        stack.push_async_callback(front.close)
        stack.push_async_callback(directory.close)
        membership = await context.join(
            metrics=metrics,
            status=publishing.status,
            ready=ready,
            routes=[status_route(status)],
            directory=await front.start(),
        )
        stack.push_async_callback(membership.close)
        sender = WeightSender(
            membership=membership, worker=context.worker, transport=context.transport(AcceleratorSpec())
        )
        await sender.start()
        stack.push_async_callback(sender.close)
        context.spans.serve(waits="calls")
        if await context.run_until_stopped(publishing.run(sender)):
            await context.stopping.wait()


_MOST_WAITING_FOR: Final = 1024
"""Most characters of ``waitingFor`` in the status."""


class Publishing:
    """Publishes the model of a context, one version after another. waits: the reason why there is no newer version."""

    def __init__(self, context: SyncContext, *, metrics: PublisherMetrics) -> None:
        self.waits = "the model to be read"
        self._context = context
        self._metrics = metrics
        self._seconds: float | None = None
        self._entries: tuple[TensorEntry, ...] = ()
        self._shapes: object = None

    def status(self) -> Status:
        """Return the status for heartbeats: the seconds that the last publication took."""
        return {} if self._seconds is None else {"publish_s": self._seconds}

    async def run(self, sender: WeightSender) -> None:
        """Publish the model, and if its folder is watched, each newer one, until cancelled. Raises ManifestError."""
        is_watched = self._context.source.watch
        watch = await self._open()
        while True:
            found = await asyncio.to_thread(watch.look, time.monotonic())
            self.waits = watch.waits
            if found is not None:
                try:
                    with self._context.spans.background("publish", step=found[0], version=found[0]):
                        await self._publish(*found, sender=sender, watch=watch)
                except DiskError as error:
                    log.warning("θ_%d is not published: %s", found[0], error)
                    self.waits = str(error)
            if self._entries and not is_watched:
                return
            await asyncio.sleep(POLL_S)

    async def _open(self) -> ModelWatch:
        """Return the watch of the folder. Raises ManifestError if a fixed model is incomplete."""
        source, workdir, dtype = self._context.source, self._context.options.workdir, self._context.weights.dtype
        assert source.model is not None
        resolved = ModelSource.resolve(source.model, workdir)
        if source.watch:
            return ModelWatch(folder=resolved.folder, dtype=dtype)
        folder = await asyncio.to_thread(materialize_config, source.model, workdir)
        await asyncio.to_thread(materialize_weights, source.model, folder)
        await asyncio.to_thread(StoredModel, folder, dtype=dtype)
        if resolved.kind == "folder":
            return ModelWatch(folder=folder, dtype=dtype)
        return ModelWatch(folder=folder, dtype=dtype, settle_s=0.0)

    async def _publish(self, step: int, model: StoredModel, *, sender: WeightSender, watch: ModelWatch) -> None:
        """Publish a model as θ_step, or skip it. Raises DiskError if its files change meanwhile."""
        if self._shapes not in (None, dict(model.tensors)):
            why = f"{model.folder} has other tensors than the previous version: publish it with another WeightSync"
            log.warning("%s", why)
            watch.skip(model, why)
            return
        started = time.monotonic()
        version = Version(self._context.options.attempt, step)
        copied = await asyncio.to_thread(sender.fill, version, model.tensors, model.read)
        part = await asyncio.to_thread(sender.part, copied)
        if not await asyncio.to_thread(lambda: model.unchanged):
            raise DiskError("it changed while it was read", where=str(model.folder))
        if part.tensors == self._entries:
            log.info("%s has the same bytes as the previous version: it is skipped", model.folder)
            watch.skip(model)
            return
        await retry(
            partial(sender.announce, copied, part, timeout=_CALL_S),
            what=f"publishing {version}",
            timeout=self._context.start_s,
        )
        watch.take(step, model)
        self._entries, self._shapes = part.tensors, dict(model.tensors)
        self._seconds = time.monotonic() - started
        self._metrics.publish_seconds.observe(self._seconds)
        self._metrics.version_step.set(step)
        log.info("published %s: %s, %d bytes in %.2f s", version, model.folder, copied.arena.nbytes, self._seconds)
