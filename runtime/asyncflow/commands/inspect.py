"""The commands that look and tell: validate, plan, audit, crds, and models as files.

Invariant: none of them starts a process, but that ``validate`` has one load the reward function; only ``crds``,
``plan --svg``, ``model import`` and ``model export`` write, and only where they are told to.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from asyncflow.errors import ManifestError

_SAMPLES = ("dispatched", "trained", "filtered", "dropped", "unfinished", "lost", "duplicated", "skipped")
_OPEN_ROWS = ("put", "cleared", "remaining", "without_bytes")
_BOTH = ("redeliveries", "resets", "peeked")
_TRAINING = ("attempts", "last_committed_step")


def validate(file: Path, overrides: Sequence[str]) -> None:
    """Print what is worth knowing about a manifest, and that it is valid. Raises ManifestError where it is not."""
    from asyncflow.api.job import RLJob
    from asyncflow.commands.preflight import load, preflight

    manifest = load(file, overrides)
    if isinstance(manifest, RLJob):
        from asyncflow.local.placement import resolve

        job, notes = resolve(manifest)
        for note in notes + preflight(job, source=str(file), elsewhere=True):
            click.echo(f"note: {note}")
    click.echo(f"{file}: {manifest.kind} {manifest.metadata.name} is valid")


def plan(file: Path, overrides: Sequence[str], *, svg: Path | None = None) -> None:
    """Print a job's plan: its tasks as a tree, and tables. svg: where to draw the flow of a training sample."""
    from asyncflow.algorithms.base import algorithm_of
    from asyncflow.api.names import EVAL, TRAIN
    from asyncflow.commands.preflight import runnable_job
    from asyncflow.local.placement import resolve
    from asyncflow.plan import drawing
    from asyncflow.plan.describe import tables
    from asyncflow.plan.job import plan as make_plan
    from asyncflow.view.console import print_table

    job, notes = resolve(runnable_job(file, overrides))
    for note in notes:
        click.echo(f"note: {note}")
    algorithm = algorithm_of(job.spec)
    planned = make_plan(job, decided=algorithm.writes, critic=algorithm.critic)
    if svg is not None:
        try:
            svg.write_text(drawing.svg(planned, TRAIN), encoding="utf-8")
        except OSError as error:
            raise ManifestError(f"cannot be written: {error.strerror}", where=str(svg)) from error
        click.echo(f"{svg}: the flow of a training sample")
        return
    for partition in (TRAIN, EVAL) if job.spec.evaluation is not None else (TRAIN,):
        click.echo("\n".join(drawing.text(planned, partition)))
    click.echo()
    for described in tables(job, planned):
        print_table(described)


def audit(directory: Path) -> int:
    """Print the account of all samples, and of the open rows of a queue; 1 where one was lost or counted twice."""
    from asyncflow.queue.ledger.audit import audit_ledgers
    from asyncflow.view.render import plain

    ledger = directory / "ledger"
    if not ledger.is_dir():
        raise ManifestError("there is no ledger", where=str(ledger), hint="Give the folder of a run or of a queue")
    report = audit_ledgers(ledger)
    opened = report.put > 0 or (directory / "queue.yaml").is_file()
    trained = report.dispatched > 0 or not opened
    for name in (
        *(_SAMPLES if trained else ()),
        *(_OPEN_ROWS if opened else ()),
        *_BOTH,
        *(_TRAINING if trained else ()),
    ):
        click.echo(f"{name.replace('_', ' '):<20}{getattr(report, name):>12}")
        for reason, count in report.reasons.items() if name == "redeliveries" else ():
            click.echo(f"  {plain(reason):<30}{count}")
    for problem in report.problems:
        click.echo(problem, err=True)
    return 0 if report.ok else 1


def crds(directory: Path, *, check: bool) -> int:
    """Write the CRDs, or say which files are not what they should be."""
    from asyncflow.api import crd

    if not check:
        for path in crd.write(directory):
            click.echo(str(path))
        return 0
    problems = crd.check(directory)
    for problem in problems:
        click.echo(problem, err=True)
    if problems:
        click.echo("Run asyncflow crds", err=True)
    return 1 if problems else 0


def export_model(run: Path, directory: Path, *, step: str, job: Path | None) -> None:
    """Make a Hugging Face folder of a checkpoint of a run. Raises ManifestError, CheckpointError."""
    from asyncflow.api.load import load_job
    from asyncflow.local.folder import JOB, check_run
    from asyncflow.roles.backend import export_checkpoint

    if step not in ("newest", "best") and not step.isdecimal():
        raise ManifestError(f"--step {step} is none", where=str(run), hint="Give newest, best, or the number of a step")
    if job is None:
        check_run(run)
    spec = load_job(job or run / JOB).spec
    chosen = export_checkpoint(spec, run=run.absolute(), step=step, target=directory)
    click.echo(f"{directory}: the weights of step {chosen}")


def import_model(package: str, directory: Path) -> None:
    """Make a Hugging Face folder of a model file."""
    from asyncflow.models.folder import import_gguf

    import_gguf(package, directory)
    click.echo(f"{directory}: ready; give it as model.source")


def merge_model(adapters: Path, directory: Path) -> None:
    """Make a Hugging Face folder of adapters and the model that they belong to."""
    from asyncflow.models.lora import merge_folder

    base = merge_folder(adapters, directory)
    click.echo(f"{directory}: {base} with the adapters of {adapters}")
