"""A job, or a standalone queue, on this machine: ``asyncflow run FILE``, ``asyncflow queue serve``, ``train``.

A job runs from its manifest to its summary. A queue is served until a signal ends it. Its folder keeps the ledger: a
queue that is served from the folder again continues the ledger, but has lost the rows in the memory of its units.

Invariant: nothing is created or started until the manifest, the model, the data, the plug-ins and the folder have been
checked; a refused start leaves no folder behind.
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

from asyncflow.api.document import check_overrides, latest
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
from asyncflow.local.changes import check_queue, differences
from asyncflow.local.folder import QUEUE, RunFolder, saved_overrides
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
"""Base of the exit code of a run that a signal ended; the signal number is added."""
_REPLICAS = ("spec", "rollout", "replicas")
"""Path of the number of rollouts; a change of it cancels an earlier request of ``asyncflow scale``."""
RUNS = Path("runs")
"""Parent of the default folder of a run, which has the run's name."""


def run(file: Path, *, output: Path | None, overrides: Sequence[str], resume: bool, fresh: bool) -> int:
    """Run the job to its end, and return the exit status.

    Raises ManifestError before anything has started, and another AsyncFlowError if the job failed.
    """
    saved = saved_overrides(output or RUNS / name_of(file, overrides)) if resume else []
    if saved:
        click.echo(f"as the run was started: {_sets(saved)}")
    overrides = latest([*saved, *overrides])
    job, notes = resolve(runnable_job(file, overrides))
    for note in notes + preflight(job, source=str(file)):
        click.echo(f"note: {note}")
    outcome, view, folder = _run_in_folder(
        job,
        output,
        overrides=overrides,
        resume=resume,
        fresh=fresh,
        make_view=partial(RunView, console=make_console()),
        notify=click.echo,
    )
    if not view.closed:
        exit_now(outcome)
    if outcome.exit_code and folder.job.exists():
        if outcome.refused and (kept := load_job(folder.job)) != job:
            click.echo("the changes are not kept: --resume uses the previous settings")
            job, overrides = kept, saved_overrides(folder.path)
        _print_progress(job, folder.path, file=file, overrides=overrides)
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

    job: path of a manifest, or a job that was returned by ``asyncflow.load`` or made in Python; overrides:
    ``path=value`` strings, as for ``--set``; output: folder of the run, ``runs/NAME`` if None; resume: whether to
    continue the run in that folder; fresh: whether to move that run aside and start from scratch; progress: called with
    each new status of the driver, about twice a second, in a separate thread. An exception that it raises ends the run
    in order, and is raised here.

    Call this function in the main thread and outside of event loops: until it returns, SIGINT, SIGTERM and SIGHUP of
    this process end the run, and log records of this process go to ``logs/supervisor.log`` of the run. Raises
    ManifestError if nothing was started, KeyboardInterrupt after SIGINT, SystemExit after the other signals, and
    another AsyncFlowError if the job failed.
    """
    _check_thread()
    if resume and fresh:
        raise ManifestError("resume and fresh exclude each other", where="asyncflow.train", hint="Pass one of them")
    check_overrides(overrides)
    path = None if output is None else Path(output)
    if resume and isinstance(job, (str, Path)):
        overrides = [*saved_overrides(path or RUNS / name_of(Path(job), overrides)), *overrides]
    overrides = latest(overrides)
    resolved, notes = resolve(runnable_job(job, overrides))
    for note in notes + preflight(resolved, source=source_name(job)):
        _log.info("note: %s", note)
    with _restored_signals_and_logging():
        outcome, view, folder = _run_in_folder(
            resolved,
            path,
            overrides=overrides,
            resume=resume,
            fresh=fresh,
            make_view=partial(ProgressView, progress=progress),
            notify=_log.info,
        )
    if failure := view.failure or outcome.failure:
        raise failure
    if outcome.exit_code == _SIGNALLED + signal.SIGINT:
        raise KeyboardInterrupt
    if outcome.exit_code:
        raise SystemExit(outcome.exit_code)
    summary = read_summary(folder.summary)
    if summary is None:
        raise AsyncFlowError("the run has succeeded, but its summary cannot be read", where=str(folder.summary))
    return summary


def _check_thread() -> None:
    """Raise AsyncFlowError if this is not the main thread, which handles signals, or if an event loop runs."""
    where = "asyncflow.train"
    if threading.current_thread() is not threading.main_thread():
        raise AsyncFlowError("called in a thread", where=where, hint="Call it in the main thread of a process")
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        hint = "Call it outside; in a notebook use !asyncflow run or init_engines"
        raise AsyncFlowError("called in an event loop", where=where, hint=hint)


@contextlib.contextmanager
def _restored_signals_and_logging() -> Iterator[None]:
    """Restore the caller's logging and signal handlers at the end of the context; the supervisor replaces them."""
    root, own = logging.getLogger(), logging.getLogger("asyncflow")
    handlers, levels, showwarning = root.handlers[:], (root.level, own.level), warnings.showwarning
    on_signal = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in on_signal.items():
            if handler is not None:  # None: installed by C code
                signal.signal(number, handler)
        root.handlers[:] = handlers
        root.setLevel(levels[0])
        own.setLevel(levels[1])
        if warnings.showwarning is not showwarning:
            logging.captureWarnings(capture=False)


def _run_in_folder(
    job: RLJob,
    path: Path | None,
    *,
    overrides: Sequence[str],
    resume: bool,
    fresh: bool,
    make_view: Callable[..., V],
    notify: Callable[[str], None],
) -> tuple[RunOutcome, V, RunFolder]:
    """Run a checked job from the folder ``path``; if a role refuses the job, the folder is restored.

    overrides: the ``--set`` values of the job, saved for ``--resume``; make_view: creates the display of the run;
    notify: called with notes for the user. Returns the outcome, the display and the folder.
    """
    folder = RunFolder.claim(path or RUNS / job.name, resume=resume, fresh=fresh)
    refused = True
    try:
        if resume:
            for difference in differences(load_job(folder.job), job):
                notify(f"changed: {difference}")
                if difference.place == _REPLICAS:
                    write_request(folder.requests, "rollout", None)
        if folder.moved_to:
            notify(f"the previous run is now in {folder.moved_to}")
        outcome, view = _supervise(job, folder, overrides, make_view=make_view, notify=notify)
        refused = outcome.refused
    finally:
        folder.release(undo=refused)
    return outcome, view, folder


def _sets(overrides: Sequence[str]) -> str:
    return shlex.join(word for override in overrides for word in ("--set", override))


def _print_progress(job: RLJob, folder: Path, *, file: Path, overrides: Sequence[str]) -> None:
    """Print how many steps an unsuccessful run made, how many of them are kept, and the command to continue."""
    steps, kept = job.spec.algorithm.steps, _kept_step(folder)
    made = last_step(folder / METRICS, steps=steps)
    run = f"asyncflow run {shlex.quote(str(file))}"
    if not made:
        where = _where(folder, usual=RUNS / job.name)
        sets = f" {_sets(overrides)}" if overrides else ""
        click.echo(f"no step was made, so nothing is kept; start again with\n  {run}{where}{sets}")
        return
    where = _where(folder, usual=_bare_folder(file))
    if kept >= made:
        text = "and all of them are kept"
    elif kept:
        text = f"of which 1 to {kept} are kept; the others will be made again"
    else:
        text = "and none is in a checkpoint; they will be made again"
    go_on = "Continue with"
    if job.spec.trainer.external:
        go_on = "To continue, start your trainer again. If it joins an active run, first start the run with"
    click.echo(f"{made} of {steps} steps were made, {text}. {go_on}\n  {run}{where} --resume")


def _bare_folder(file: Path) -> Path | None:
    """Return the default folder of ``asyncflow run FILE``, None if the file cannot be read without overrides."""
    try:
        return RUNS / name_of(file)
    except ManifestError:
        return None


def _where(folder: Path, *, usual: Path | None) -> str:
    """Return the option that selects ``folder`` in a command whose default is ``usual``; "" if they are the same."""
    if usual is not None and folder == usual.absolute():
        return ""
    cwd = Path.cwd()
    return f" --output {shlex.quote(str(folder.relative_to(cwd) if folder.is_relative_to(cwd) else folder))}"


class _Step(msgspec.Struct):
    step: int


def last_step(metrics: Path, *, steps: int) -> int:
    """Return the step of the last line of ``metrics.jsonl`` that is between 1 and ``steps``, 0 if there is none."""
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
    """Return the step of the newest checkpoint, 0 if there is none or it cannot be read."""
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
    notify: Callable[[str], None],
) -> tuple[RunOutcome, V]:
    folder.save_overrides(overrides)
    write_whole(folder.job, to_yaml(job).encode())
    folder.write_token()
    limits = Limits(active_s=job.spec.limits.active_deadline_seconds, end_s=job.spec.limits.stop_seconds)
    elastic = Elastic(policy=job.spec.elasticity.acts, drain_s=job.spec.rollout.drain_seconds)
    with local_site(plan(job).roles, folder=folder, limits=limits, elastic=elastic) as site:
        if job.spec.scheduling.gang != "none":
            notify("spec.scheduling.gang has no effect on one machine")
        view = make_view(
            name=job.name, folder=folder.path, placed=lambda: site.supervisor.placed, http_port=site.http_port
        )
        return _run_with_view(site, view), view


def _run_with_view(site: LocalSite, view: LiveView) -> RunOutcome:
    """Run a supervisor to its end while ``view`` displays it; the view may also end it."""

    async def supervise() -> RunOutcome:
        loop = asyncio.get_running_loop()
        view.stop = lambda: loop.call_soon_threadsafe(site.supervisor.stop, signal.SIGINT)
        return await site.supervisor.run()

    site.supervisor.observe = view.event
    view.start()
    try:
        return asyncio.run(supervise())
    finally:
        view.close()


def exit_now(outcome: RunOutcome) -> None:
    """Exit although a thread is blocked in a write to a full pipe: interpreter shutdown would wait for its lock."""
    if outcome.failure:
        os.write(sys.stderr.fileno(), f"error: {outcome.failure}\n".encode())
    os._exit(outcome.exit_code)


SMALLEST_QUEUE = "{apiVersion: asyncflow.dev/v1alpha1, kind: TransferQueue, metadata: {name: queue}}"
"""The manifest of a queue with default values."""


def serve(source: Path | TextIO, overrides: Sequence[str], *, output: Path | None, fresh: bool, port: int) -> int:
    """Serve the queue of a manifest from the folder ``output`` until a signal ends it; return the exit status.

    overrides: ``path=value`` strings; fresh: whether to move an existing queue aside instead of continuing it; port:
    port to which clients connect, 0 for any. Raises ManifestError before anything has started, and another
    AsyncFlowError on failure.
    """
    queue = load(source, overrides)
    assert isinstance(queue, TransferQueue)
    path = output or RUNS / queue.metadata.name
    load_plugin(BACKENDS, queue.spec.backend, kind=Backend, where="spec.backend").check(
        servers=queue.spec.store is None
    )
    file = path / QUEUE
    resume = file.is_file() and not fresh
    if resume:
        before = load(file)
        if not isinstance(before, TransferQueue):
            raise ManifestError(f"kind = {before.kind!r}: not a queue", where=str(file), hint="Pass another --output")
        check_queue(before, queue, where=str(file))
    view = partial(QueueView, units=queue.spec.storage_units)
    outcome, folder = serve_alone(
        queue, queue_roles(queue), path=path, name=QUEUE, resume=resume, fresh=fresh, port=port, make_view=view
    )
    lost = "the rows in memory are lost; " if queue.spec.store is None else ""
    click.echo(f"{lost}the ledger stays in {folder.path}: asyncflow audit {folder.path}")
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
    """Run a standalone queue or publisher from the folder ``path`` until a signal ends it.

    name: name of the manifest file; resume: whether to continue an existing one; port: port to which all processes
    connect, 0 for any. Raises AsyncFlowError on failure; a refused start leaves nothing behind.
    """
    folder = RunFolder.claim(path, resume=resume, fresh=fresh, name=name)
    started = False
    try:
        if folder.moved_to:
            click.echo(f"the previous files are now in {folder.moved_to}")
        write_whole(folder.job, to_yaml(manifest).encode())
        folder.write_token()
        with local_site(roles, folder=folder, limits=Limits(), port=port) as site:
            started = True
            view = make_view(
                address=site.address,
                name=manifest.metadata.name,
                folder=folder.path,
                placed=lambda: site.supervisor.placed,
                console=make_console(),
                http_port=site.http_port,
            )
            users = "clients" if isinstance(manifest, TransferQueue) else "followers"
            users += " on other hosts or of other users"
            click.echo(f"{users} need the certificate in {site.certificate}: export {TLS_ENV}={site.certificate}")
            outcome = _run_with_view(site, view)
    finally:
        folder.release(undo=not started)
    if not view.closed:
        exit_now(outcome)
    if outcome.failure:
        raise outcome.failure
    return outcome, folder
