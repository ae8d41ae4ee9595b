"""A job, or a queue that stands alone, on this machine: ``asyncflow run FILE``, ``asyncflow queue serve``, ``train``.

A job runs from its manifest to its summary. A queue is served until it is told to end; its folder keeps the ledger: who
serves from it again goes on with it, at the same address, though what lay in the memory of units is gone.

Invariant: until manifest, model, data, plug-ins and folder have been found good, nothing is created and nothing is
started; a start that is refused leaves no folder behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO, TypeVar

import click
import msgspec

from asyncflow.api.document import latest
from asyncflow.api.job import RLJob
from asyncflow.api.load import Manifest, load, load_job, name_of, to_yaml
from asyncflow.api.names import TLS_ENV
from asyncflow.api.queue import TransferQueue
from asyncflow.api.status import DriverStatus
from asyncflow.api.weights import WeightSync
from asyncflow.commands.preflight import preflight, runnable_job, source_name
from asyncflow.driver.journal import METRICS, read_summary
from asyncflow.durable import write_whole
from asyncflow.errors import AsyncFlowError, CheckpointError, ManifestError
from asyncflow.local.folder import QUEUE, RunFolder, differences, saved_overrides
from asyncflow.local.placement import resolve
from asyncflow.local.scaling import write_request
from asyncflow.local.site import Elastic, LocalSite, local_site
from asyncflow.local.supervisor import Limits, RunOutcome
from asyncflow.plan.job import plan
from asyncflow.plan.queue import queue_roles
from asyncflow.plan.roles import Role
from asyncflow.plugins import load_plugin
from asyncflow.queue.storage.backend import BACKENDS, Backend
from asyncflow.training.checkpoint import Checkpoints
from asyncflow.view.console import make_console
from asyncflow.view.live import LiveView, ProgressView, QueueView, RunView

_log = logging.getLogger(__name__)
V = TypeVar("V", bound=LiveView)

_SIGNALLED = 128
"""Exit code of a run that a signal ended, less the number of the signal."""
_REPLICAS = ("spec", "rollout", "replicas")
"""A change of it is newer than what ``asyncflow scale`` has asked for."""
RUNS = Path("runs")
"""Folder of the runs that are given none, each under its name."""


def run(file: Path, *, output: Path | None, overrides: Sequence[str], resume: bool, fresh: bool) -> int:
    """Run the job to its end and give the exit status.

    Raises ManifestError before anything was started, another AsyncFlowError where the job failed.
    """
    begun_with = saved_overrides(output or RUNS / name_of(file, overrides)) if resume else []
    if begun_with:
        click.echo(f"as the run was begun: {_sets(begun_with)}")
    overrides = latest([*begun_with, *overrides])
    job, notes = resolve(runnable_job(file, overrides))
    for note in notes + preflight(job, source=str(file)):
        click.echo(f"note: {note}")
    outcome, view, folder = _carry_out(
        job,
        output,
        overrides=overrides,
        resume=resume,
        fresh=fresh,
        make_view=partial(RunView, console=make_console()),
        tell=click.echo,
    )
    if not view.closed:
        leave(outcome)
    if outcome.exit_code and folder.job.exists():
        if outcome.refused and (kept := load_job(folder.job)) != job:
            click.echo("what was changed is not kept: --resume goes on with the settings of before")
            job, overrides = kept, saved_overrides(folder.path)
        _say_what_was_kept(job, folder.path, file=file, overrides=overrides)
    elif outcome.exit_code:
        click.echo(f"no step was made, so nothing is left in {folder.path}")
    if outcome.failure:
        raise outcome.failure
    return outcome.exit_code


def train(
    job: Manifest | Path | str,
    *,
    output: Path | str | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    fresh: bool = False,
    progress: Callable[[DriverStatus], None] | None = None,
) -> dict[str, Any]:
    """Run a job on this machine to its end, as ``asyncflow run`` does, and return the figures of its ``summary.json``.

    job: a manifest, or a job, as ``asyncflow.load`` returns it or made in Python; overrides: ``path=value`` each, as
    ``--set`` takes them. output: folder of the run, ``runs/NAME`` where None; resume: continue the run that it holds;
    fresh: move that aside and begin anew. progress: called with each new status of the driver, about twice a second, in
    a thread of its own; what it raises ends the run in order, and is raised here.

    Call it in the main thread and in no event loop: until it returns, SIGINT, SIGTERM and SIGHUP of this process end
    the run, and log records of this process go to ``logs/supervisor.log`` of the run. Raises ManifestError where
    nothing was started, KeyboardInterrupt after SIGINT, SystemExit after the other signals, another AsyncFlowError
    where the job failed.
    """
    _check_thread()
    if resume and fresh:
        raise ManifestError("resume and fresh exclude each other", where="asyncflow.train", hint="Give one of them")
    path = None if output is None else Path(output)
    if resume and isinstance(job, (str, Path)):
        overrides = [*saved_overrides(path or RUNS / name_of(Path(job), overrides)), *overrides]
    overrides = latest(overrides)
    resolved, notes = resolve(runnable_job(job, overrides))
    for note in notes + preflight(resolved, source=source_name(job)):
        _log.info("note: %s", note)
    with _callers_own():
        outcome, view, folder = _carry_out(
            resolved,
            path,
            overrides=overrides,
            resume=resume,
            fresh=fresh,
            make_view=partial(ProgressView, progress=progress),
            tell=_log.info,
        )
    if failure := view.failure or outcome.failure:
        raise failure
    if outcome.exit_code == _SIGNALLED + signal.SIGINT:
        raise KeyboardInterrupt
    if outcome.exit_code:
        raise SystemExit(outcome.exit_code)
    summary = read_summary(folder.summary)
    if summary is None:
        raise AsyncFlowError("the run has ended well, and its summary cannot be read", where=str(folder.summary))
    return summary


def _check_thread() -> None:
    """Refuse to run where signals cannot be taken over, or an event loop runs. Raises AsyncFlowError."""
    where = "asyncflow.train"
    if threading.current_thread() is not threading.main_thread():
        raise AsyncFlowError("called in a thread", where=where, hint="Call it in the main thread of a process")
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        raise AsyncFlowError("called in an event loop", where=where, hint="Call it outside, or in a process of its own")


@contextlib.contextmanager
def _callers_own() -> Iterator[None]:
    """Restore the logging and the signal handlers of the caller at the end: the supervisor has its own meanwhile."""
    root, own = logging.getLogger(), logging.getLogger("asyncflow")
    handlers, levels, warned = root.handlers[:], (root.level, own.level), warnings.showwarning
    on_signal = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in on_signal.items():
            if handler is not None:  # not of C code
                signal.signal(number, handler)
        root.handlers[:] = handlers
        root.setLevel(levels[0])
        own.setLevel(levels[1])
        if warnings.showwarning is not warned:
            logging.captureWarnings(capture=False)


def _carry_out(
    job: RLJob,
    path: Path | None,
    *,
    overrides: Sequence[str],
    resume: bool,
    fresh: bool,
    make_view: Callable[..., V],
    tell: Callable[[str], None],
) -> tuple[RunOutcome, V, RunFolder]:
    """Run a job that was found good from the folder ``path``, which is as it was where a role refuses the job.

    overrides: with which the job was read, kept for a run that is resumed; make_view: makes the display of the run;
    tell: called with what is worth knowing. Returns the outcome, the display and the folder.
    """
    folder = RunFolder.claim(path or RUNS / job.name, resume=resume, fresh=fresh)
    refused = True
    try:
        if resume:
            for difference in differences(load_job(folder.job), job):
                tell(f"changed: {difference}")
                if difference.place == _REPLICAS:
                    write_request(folder.requests, "rollout", None)
        if folder.moved_to:
            tell(f"the run that was there is now in {folder.moved_to}")
        outcome, view = _supervise(job, folder, overrides, make_view=make_view, tell=tell)
        refused = outcome.refused
    finally:
        folder.release(undo=refused)
    return outcome, view, folder


def _sets(overrides: Sequence[str]) -> str:
    return shlex.join(word for override in overrides for word in ("--set", override))


def _say_what_was_kept(job: RLJob, folder: Path, *, file: Path, overrides: Sequence[str]) -> None:
    """Print how far a run that has not ended well came, what of it is kept, and how to go on."""
    steps, kept = job.spec.algorithm.steps, _kept_step(folder)
    made = last_step(folder / METRICS, steps=steps)
    run = f"asyncflow run {shlex.quote(str(file))}"
    if not made:
        where = _where(folder, usual=RUNS / job.name)
        sets = f" {_sets(overrides)}" if overrides else ""
        click.echo(f"no step was made, so nothing is kept; begin again with\n  {run}{where}{sets}")
        return
    where = _where(folder, usual=_bare_folder(file))
    if kept >= made:
        words = "and all of them are kept"
    elif kept:
        words = f"of which 1 to {kept} are kept; the others will be made again"
    else:
        words = "and none is in a checkpoint; they will be made again"
    click.echo(f"{made} of {steps} steps were made, {words}. Go on with\n  {run}{where} --resume")


def _bare_folder(file: Path) -> Path | None:
    """Return the folder that ``asyncflow run FILE`` uses, None where the file alone does not tell."""
    try:
        return RUNS / name_of(file)
    except ManifestError:
        return None


def _where(folder: Path, *, usual: Path | None) -> str:
    """Return the words that name ``folder`` in a command for which it would be ``usual``."""
    if usual is not None and folder == usual.absolute():
        return ""
    here = Path.cwd()
    return f" --output {shlex.quote(str(folder.relative_to(here) if folder.is_relative_to(here) else folder))}"


class _Step(msgspec.Struct):
    step: int


def last_step(metrics: Path, *, steps: int) -> int:
    """Return the step of the last line of ``metrics.jsonl`` that tells of one of ``steps``, 0 where none does."""
    try:
        lines = metrics.read_bytes().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            made = msgspec.json.decode(line, type=_Step).step
            if 1 <= made <= steps:
                return made
    return 0


def _kept_step(folder: Path) -> int:
    """Return the step of the newest checkpoint, 0 where there is none that can be read."""
    try:
        checkpoint = Checkpoints(folder / "checkpoints").latest()
    except CheckpointError:
        return 0
    return checkpoint.manifest.step if checkpoint is not None else 0


def _supervise(
    job: RLJob,
    folder: RunFolder,
    overrides: Sequence[str],
    *,
    make_view: Callable[..., V],
    tell: Callable[[str], None],
) -> tuple[RunOutcome, V]:
    folder.save_overrides(overrides)
    write_whole(folder.job, to_yaml(job).encode())
    folder.write_token()
    limits = Limits(active_s=job.spec.limits.active_deadline_seconds, end_s=job.spec.limits.stop_seconds)
    elastic = Elastic(policy=job.spec.elasticity.acts, drain_s=job.spec.rollout.drain_seconds)
    with local_site(plan(job).roles, folder=folder, limits=limits, elastic=elastic) as here:
        if job.spec.scheduling.gang != "none":
            tell("of no effect on one machine: spec.scheduling.gang")
        view = make_view(
            name=job.name, folder=folder.path, placed=lambda: here.supervisor.placed, http_port=here.http_port
        )
        return _attended(here, view), view


def _attended(here: LocalSite, view: LiveView) -> RunOutcome:
    """Run a supervisor to its end while ``view`` shows it, and may end it."""

    async def supervise() -> RunOutcome:
        loop = asyncio.get_running_loop()
        view.stop = lambda: loop.call_soon_threadsafe(here.supervisor.stop, signal.SIGINT)
        return await here.supervisor.run()

    here.supervisor.observe = view.event
    view.start()
    try:
        return asyncio.run(supervise())
    finally:
        view.close()


def leave(outcome: RunOutcome) -> None:
    """End although a thread hangs in a write that is not read: interpreter shutdown would wait for its lock."""
    if outcome.failure:
        os.write(sys.stderr.fileno(), f"error: {outcome.failure}\n".encode())
    os._exit(outcome.exit_code)


SMALLEST_QUEUE = "{apiVersion: asyncflow.dev/v1alpha1, kind: TransferQueue, metadata: {name: queue}}"
"""The manifest of a queue of which nothing is said."""


def serve(source: Path | TextIO, overrides: Sequence[str], *, output: Path | None, fresh: bool, port: int) -> int:
    """Serve the queue of a manifest from ``output`` until told to end, and return the exit status.

    overrides: ``path=value`` each; fresh: move aside what is there instead of going on with it; port: that clients
    dial, 0: any. Raises ManifestError before anything was started, another AsyncFlowError where it failed.
    """
    queue = load(source, overrides)
    assert isinstance(queue, TransferQueue)
    path = output or RUNS / queue.metadata.name
    load_plugin(BACKENDS, queue.spec.backend, kind=Backend, where="spec.backend").check(
        servers=queue.spec.store is None
    )
    resume = (path / QUEUE).is_file() and not fresh
    if resume:
        _check_same(path / QUEUE, queue)
    view = partial(QueueView, units=queue.spec.storage_units)
    outcome, folder = serve_alone(
        queue, queue_roles(queue), path=path, name=QUEUE, resume=resume, fresh=fresh, port=port, make_view=view
    )
    gone = "what lay in memory is gone; " if queue.spec.store is None else ""
    click.echo(f"{gone}the ledger stays in {folder.path}: asyncflow audit {folder.path}")
    return outcome.exit_code


def serve_alone(
    manifest: TransferQueue | WeightSync,
    roles: Sequence[Role],
    *,
    path: Path,
    name: str,
    resume: bool,
    fresh: bool,
    port: int,
    make_view: Callable[..., LiveView],
) -> tuple[RunOutcome, RunFolder]:
    """Run what stands alone from the folder ``path`` until told to end.

    name: of the file for the manifest; resume: go on with what is there; port: that all dial, 0: any. Raises
    AsyncFlowError where it failed, and leaves nothing behind where it was refused.
    """
    folder = RunFolder.claim(path, resume=resume, fresh=fresh, name=name)
    begun = False
    try:
        if folder.moved_to:
            click.echo(f"what was there is now in {folder.moved_to}")
        write_whole(folder.job, to_yaml(manifest).encode())
        folder.write_token()
        with local_site(roles, folder=folder, limits=Limits(), port=port) as here:
            begun = True
            view = make_view(
                address=here.address,
                name=manifest.metadata.name,
                folder=folder.path,
                placed=lambda: here.supervisor.placed,
                console=make_console(),
                http_port=here.http_port,
            )
            who = "clients" if isinstance(manifest, TransferQueue) else "followers"
            click.echo(f"{who} show the certificate in {here.certificate}: export {TLS_ENV}={here.certificate}")
            outcome = _attended(here, view)
    finally:
        folder.release(undo=not begun)
    if not view.closed:
        leave(outcome)
    if outcome.failure:
        raise outcome.failure
    return outcome, folder


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
