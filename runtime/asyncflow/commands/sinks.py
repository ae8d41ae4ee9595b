"""Feeding of sinks: ``asyncflow sinks DIR``, which the driver also runs during a job, once for each sink."""

from __future__ import annotations

import inspect
from pathlib import Path

import click

from asyncflow.api.load import load_job
from asyncflow.errors import AsyncFlowError, ManifestError, in_one_line
from asyncflow.local.folder import JOB, check_run
from asyncflow.telemetry.sinks.base import check_sink, sink_class
from asyncflow.telemetry.sinks.feed import feed

_MOST = 400
"""Most characters of a library's error that are shown: MLflow's begin with the reason, and quote all data after it."""


def sinks(run: Path, *, kind: str | None, job: Path | None, follow: bool) -> None:
    """Write the missing figures of the run in this folder to the sinks of its job, or to one of them.

    Raises ManifestError if there is no such sink, and AsyncFlowError if a sink fails.
    """
    if job is None:
        check_run(run)
    manifest = load_job(job or run / JOB)
    every = enumerate(manifest.spec.telemetry.sinks)
    chosen = {number: sink for number, sink in every if kind in (None, sink.kind)}
    if not chosen:
        what = "the job has no sinks" if kind is None else f"the job has no sink {kind}"
        raise ManifestError(what, where=str(job or run / JOB), hint="Name some in spec.telemetry.sinks")
    for number, sink in chosen.items():
        check_sink(sink, number=number)
    for sink in chosen.values():
        try:
            written = feed(manifest, kind=sink.kind, folder=run, follow=follow)
        except AsyncFlowError:
            raise
        except Exception as error:
            where = f"sink {sink.kind}"
            folder = Path(inspect.getfile(sink_class(sink.kind, where=where))).parent
            raise AsyncFlowError(" ".join(in_one_line(error, folder=folder).split())[:_MOST], where=where) from error
        click.echo(f"{sink.kind}: {written} lines written")
