"""A queue that stands alone, on this machine: ``asyncflow queue serve``, and ``asyncflow run`` of a TransferQueue.

It is served until it is told to end. Its folder keeps the ledger: who serves from it again goes on with it, at the same
address, though what lay in the memory of units is gone.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console

from asyncflow.api.load import load, to_yaml
from asyncflow.api.queue import TransferQueue
from asyncflow.commands.run import RUNS, attended, leave
from asyncflow.durable import write_whole
from asyncflow.errors import ManifestError
from asyncflow.plan.queue import queue_roles
from asyncflow.plugins import load_plugin
from asyncflow.queue.backends.base import BACKENDS, Backend
from asyncflow.substrates.local.folder import QUEUE, RunFolder
from asyncflow.substrates.local.site import site
from asyncflow.substrates.local.terms import Limits
from asyncflow.view.queue import QueueWatch

_SMALLEST = "{apiVersion: asyncflow.dev/v1alpha1, kind: TransferQueue, metadata: {name: queue}}"


def described(settings: Sequence[str]) -> TransferQueue:
    """Return the queue of these ``path=value`` settings. Raises ManifestError."""
    queue = load(io.StringIO(_SMALLEST), settings)
    assert isinstance(queue, TransferQueue)
    return queue


def serve_file(file: Path, *, output: Path | None, overrides: Sequence[str], fresh: bool, port: int) -> int:
    """Serve the queue of a manifest; see ``serve``."""
    queue = load(file, overrides)
    assert isinstance(queue, TransferQueue)
    return serve(queue, output=output, fresh=fresh, port=port)


def serve(queue: TransferQueue, *, output: Path | None, fresh: bool, port: int) -> int:
    """Serve ``queue`` from ``output`` until told to end, and return the exit status.

    fresh: move aside what is there instead of going on with it; port: that clients dial, 0: any. Raises ManifestError
    before anything was started, another AsyncFlowError where it failed.
    """
    path = output or RUNS / queue.metadata.name
    load_plugin(BACKENDS, queue.spec.backend, kind=Backend, where="spec.backend").check(
        servers=queue.spec.store is None
    )
    resume = (path / QUEUE).is_file() and not fresh
    if resume:
        _check_same(path / QUEUE, queue)
    folder = RunFolder.claim(path, resume=resume, fresh=fresh, name=QUEUE)
    begun = False
    try:
        if folder.moved_to:
            click.echo(f"the queue that was there is now in {folder.moved_to}")
        write_whole(folder.job, to_yaml(queue).encode())
        folder.write_token()
        with site(queue_roles(queue), folder=folder, limits=Limits(), port=port) as here:
            begun = True
            watch = QueueWatch(
                address=here.address,
                units=queue.spec.storage_units,
                name=queue.metadata.name,
                folder=folder.path,
                placed=lambda: here.supervisor.placed,
                console=Console(highlight=False),
                http_port=here.http_port,
            )
            outcome, seen = attended(here, watch)
    finally:
        folder.release(undo=not (begun or resume))
    if not seen:
        leave(outcome)
    if outcome.failure:
        raise outcome.failure
    gone = "what lay in memory is gone; " if queue.spec.store is None else ""
    click.echo(f"{gone}the ledger stays in {folder.path}: asyncflow audit {folder.path}")
    return outcome.exit_code


def _check_same(file: Path, queue: TransferQueue) -> None:
    """Refuse to go on with the ledger of a queue whose rows are kept otherwise. Raises ManifestError."""
    before = load(file)
    if not isinstance(before, TransferQueue):
        raise ManifestError(f"kind = {before.kind!r}: not a queue", where=str(file), hint="Give another --output")
    for frozen in queue.spec.frozen_fields:
        old, new = getattr(before.spec, frozen.reads), getattr(queue.spec, frozen.reads)
        if old != new:
            hint = "Keep it, or begin anew with --fresh or another --output"
            raise ManifestError(f"{frozen.reads} was {old!r}, and is {new!r}: {frozen.why}", where=str(file), hint=hint)
