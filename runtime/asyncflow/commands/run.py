"""``asyncflow run FILE``: a job on this machine, from its manifest to its summary.

Invariant: until manifest, model, data, plug-ins and folder have been found good, nothing is created and nothing is
started; a start that is refused leaves no folder behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
from rich.console import Console

from asyncflow.api.job import RLJob, RLJobSpec
from asyncflow.api.load import load_job, name_of, to_yaml
from asyncflow.api.overrides import latest
from asyncflow.commands.manifest import folder_of, resolved_job
from asyncflow.commands.preflight import preflight
from asyncflow.driver.journal import METRICS
from asyncflow.durable import write_whole
from asyncflow.errors import CheckpointError, ManifestError
from asyncflow.plan.job import plan
from asyncflow.substrates.local.devices import resolve
from asyncflow.substrates.local.folder import RunFolder, remembered
from asyncflow.substrates.local.resume import differences
from asyncflow.substrates.local.site import Site, site
from asyncflow.substrates.local.terms import Limits, Outcome
from asyncflow.train.checkpoint import Checkpoints
from asyncflow.view.teller import Teller
from asyncflow.view.watch import Watch

RUNS = Path("runs")
"""Folder of the runs that are given none, each under its name."""


def run(file: Path, *, output: Path | None, overrides: Sequence[str], resume: bool, fresh: bool) -> int:
    """Run the job to its end and give the exit status.

    Raises ManifestError before anything was started, another AsyncFlowError where the job failed.
    """
    begun_with = remembered(output or RUNS / name_of(file, overrides)) if resume else []
    if begun_with:
        click.echo(f"as the run was begun: {_sets(begun_with)}")
    overrides = latest([*begun_with, *overrides])
    job, notes = resolve(resolved_job(file, overrides))
    for note in notes + preflight(job, folder_of(job, file), source=str(file)):
        click.echo(f"note: {note}")
    folder = RunFolder.claim(output or RUNS / job.name, resume=resume, fresh=fresh)
    refused = True
    try:
        if resume:
            for difference in differences(load_job(folder.job), job):
                click.echo(f"changed: {difference}")
        if folder.moved_to:
            click.echo(f"the run that was there is now in {folder.moved_to}")
        outcome, seen = _supervise(job, folder, overrides)
        refused = outcome.refused
    finally:
        folder.release(undo=refused and not resume)
    if not seen:
        leave(outcome)
    if outcome.exit_code and folder.job.exists():
        _say_what_was_kept(job, folder.path, file=file, overrides=overrides)
    elif outcome.exit_code:
        click.echo(f"no step was made, so nothing is left in {folder.path}")
    if outcome.failure:
        raise outcome.failure
    return outcome.exit_code


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


def _supervise(job: RLJob, folder: RunFolder, overrides: Sequence[str]) -> tuple[Outcome, bool]:
    """Run everything; return the outcome, and whether all of the view could be written."""
    folder.remember(overrides)
    write_whole(folder.job, to_yaml(job).encode())
    folder.write_token()
    limits = Limits(active_s=job.spec.limits.active_deadline_seconds, end_s=job.spec.limits.stop_seconds)
    with site(plan(job).roles, folder=folder, limits=limits) as here:
        if ignored := _only_on_a_cluster(job.spec):
            click.echo(f"of no effect on one machine: {', '.join(ignored)}")
        watch = Watch(
            name=job.name,
            folder=folder.path,
            placed=lambda: here.supervisor.placed,
            console=Console(highlight=False),
            http_port=here.http_port,
        )
        return attended(here, watch)


def attended(here: Site, watch: Teller) -> tuple[Outcome, bool]:
    """Run a crew to its end while ``watch`` shows it; return the outcome, and whether all of that could be written."""
    here.supervisor.observe = watch.event
    watch.start()
    try:
        outcome = asyncio.run(here.supervisor.run())
    finally:
        seen = watch.close()
    return outcome, seen


def _only_on_a_cluster(spec: RLJobSpec) -> list[str]:
    asked = {
        "spec.elasticity": spec.elasticity.enabled or spec.elasticity.dry_run,
        "spec.scheduling.gang": spec.scheduling.gang != "none",
    }
    return [place for place, given in asked.items() if given]


def leave(outcome: Outcome) -> None:
    """End although a thread hangs in a write that nobody reads: interpreter shutdown would wait for its lock."""
    if outcome.failure:
        os.write(sys.stderr.fileno(), f"error: {outcome.failure}\n".encode())
    os._exit(outcome.exit_code)
