"""The page of a run: ``asyncflow ui DIR`` serves it on this machine, or writes it into one file.

Invariants: only the file of ``--export`` is written. The page is served on loopback only, and requires the key in the
printed address: another user of this machine may reach the port, but receives no data of the run.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from pathlib import Path
from typing import Any, Final

import click

from asyncflow.api.load import load_job
from asyncflow.api.status import DriverStatus
from asyncflow.driver.journal import EVENTS, METRICS
from asyncflow.driver.sample_files import kept_steps
from asyncflow.durable import write_whole
from asyncflow.errors import ManifestError
from asyncflow.local.folder import JOB, check_run
from asyncflow.local.http_client import ask
from asyncflow.local.record import load_record
from asyncflow.rpc.http import HttpServer
from asyncflow.view.page.changes import changes, facts
from asyncflow.view.page.document import document
from asyncflow.view.page.routes import CHANGES, SAMPLES, TIMELINE, page_routes
from asyncflow.view.page.spans import MOST_COLUMNS, Timelines
from asyncflow.view.page.texts import samples

LOOPBACK: Final = "127.0.0.1"
_MOST_STEPS: Final = 40
"""Most steps, and most evaluations, whose samples are exported into a file."""


def serve(run: Path, *, port: int) -> None:
    """Serve the page until Ctrl-C. Raises ManifestError if there is no run, and Refused if the port is taken."""
    check_run(run, JOB, METRICS, EVENTS)
    asyncio.run(_serve(run, port=port))


def export(run: Path, file: Path, *, texts: bool) -> None:
    """Write the page and the run into a file. texts: whether to include texts of samples.

    Raises ManifestError if there is no run or the file cannot be written.
    """
    check_run(run, JOB, METRICS, EVENTS)
    steps = {purpose: _spread(steps) for purpose, steps in kept_steps(run).items()}
    extra = {"job": _facts(run), "status": None, "now": time.time(), "texts": texts, "samples": steps}
    answers: dict[str, Any] = {CHANGES: {**changes(run, ""), **extra}, TIMELINE: _whole_timeline(run)}
    for purpose, chosen in steps.items():
        for step in chosen:
            answers[f"{SAMPLES}/{purpose}/{step}"] = samples(run, purpose=purpose, step=step, texts=texts)
    try:
        write_whole(file, document(answers).html.encode())
    except OSError as error:
        raise ManifestError(f"cannot be written: {error.strerror}", where=str(file), hint="Use another path") from error
    click.echo(f"{file}: {file.stat().st_size / 1e6:.1f} MB, {'with' if texts else 'without'} texts of samples")


def _whole_timeline(run: Path) -> dict[str, Any]:
    timelines = Timelines(run)
    whole = timelines.shown()
    return timelines.shown(width=(whole["end"] - whole["begin"]) / MOST_COLUMNS)  # with causes


async def _serve(run: Path, *, port: int) -> None:
    key = secrets.token_urlsafe(16)
    jobs, timelines = _Jobs(run), Timelines(run)

    async def status() -> DriverStatus | None:
        driver_port = _driver_port(run)
        return await asyncio.to_thread(ask, driver_port, DriverStatus) if driver_port else None

    routes = page_routes(run, job=jobs.facts, status=status, timelines=timelines, texts=True, key=key)
    server = HttpServer(routes)
    url = await server.start(LOOPBACK, port)
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    click.echo(f"{run}: open {url}/#key={key}\nPress Ctrl-C to end")
    try:
        for _ in ("spans", "causes"):  # the slowest answers are prepared while the user opens the address
            await asyncio.to_thread(timelines.shown)
        await ended.wait()
    finally:
        await server.close()


class _Jobs:
    """Facts about a run's job, which are read again when its manifest has changed."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._seen = -1
        self._facts: dict[str, Any] = {}

    def facts(self) -> dict[str, Any]:
        try:
            changed = (self._run / JOB).stat().st_mtime_ns
        except FileNotFoundError:
            changed = 0
        if changed != self._seen:
            self._seen, self._facts = changed, _facts(self._run)
        return self._facts


def _facts(run: Path) -> dict[str, Any]:
    try:
        return facts(load_job(run / JOB))
    except ManifestError:
        return {"name": run.resolve().name}


def _driver_port(run: Path) -> int:
    """Return the port of the run's driver on this machine, 0 if the record of processes has none."""
    try:
        record = load_record(run)
        return 0 if record is None else int(record.http.rpartition(":")[2])
    except (ManifestError, ValueError):
        return 0


def _spread(steps: list[int]) -> list[int]:
    """Return at most ``_MOST_STEPS`` of ``steps``, evenly spread, including the first and the last."""
    if len(steps) <= _MOST_STEPS:
        return steps
    return [steps[round(i * (len(steps) - 1) / (_MOST_STEPS - 1))] for i in range(_MOST_STEPS)]
