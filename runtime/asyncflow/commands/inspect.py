"""The commands validate, plan, audit, crds, and model.

Invariants: none of them starts a process, except that ``validate`` loads reward and environment functions in one. Only
``crds``, ``plan --svg`` and the ``model`` commands write, and only to the path in their arguments.
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
    """Print notes about a manifest, and that it is valid. Raises ManifestError if it is not."""
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
    """Print a job's plan: its tasks as a tree, and tables. svg: file to draw the flow of a training sample into."""
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
            raise ManifestError(
                f"cannot be written: {error.strerror}", where=str(svg), hint="Use another path"
            ) from error
        click.echo(f"{svg}: the flow of a training sample")
        return
    for partition in (TRAIN, EVAL) if job.spec.evaluation is not None else (TRAIN,):
        click.echo("\n".join(drawing.text(planned, partition)))
    click.echo()
    for described in tables(job, planned):
        print_table(described)


def audit(directory: Path) -> int:
    """Print counts of all samples, and of the open rows of a queue; return 1 if one was lost or counted twice.

    Raises ManifestError if there is no ledger, or if it has no samples of a run that has checkpoints.
    """
    from asyncflow.queue.ledger.audit import audit_ledgers
    from asyncflow.view.render import plain

    ledger = directory / "ledger"
    if not ledger.is_dir():
        raise ManifestError("there is no ledger", where=str(ledger), hint="Pass the folder of a run or of a queue")
    report = audit_ledgers(ledger)
    has_open_rows = report.put > 0 or (directory / "queue.yaml").is_file()
    has_samples = report.dispatched > 0 or not has_open_rows
    if report.dispatched == 0 and any((directory / "checkpoints").glob("step-*")):
        hint = "Its file was lost or emptied: restore it from a copy"
        raise ManifestError("the ledger has no samples, but there are checkpoints", where=str(ledger), hint=hint)
    for name in (
        *(_SAMPLES if has_samples else ()),
        *(_OPEN_ROWS if has_open_rows else ()),
        *_BOTH,
        *(_TRAINING if has_samples else ()),
    ):
        click.echo(f"{name.replace('_', ' '):<20}{getattr(report, name):>12}")
        for reason, count in report.reasons.items() if name == "redeliveries" else ():
            click.echo(f"  {plain(reason):<30}{count}")
    for problem in report.problems:
        click.echo(problem, err=True)
    return 0 if report.ok else 1


def crds(directory: Path, *, check: bool) -> int:
    """Write the CRDs, or with ``check`` print the files that are out of date and return 1 if there are any."""
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
    """Convert a checkpoint of a run into a Hugging Face folder. Raises ManifestError, CheckpointError."""
    from asyncflow.api.load import load_job
    from asyncflow.local.folder import JOB, check_run
    from asyncflow.roles.backend import export_checkpoint

    if step not in ("newest", "best") and not step.isdecimal():
        hint = "Pass newest, best, or the number of a step"
        raise ManifestError(f"--step {step} is not a step", where=str(run), hint=hint)
    if job is None:
        check_run(run)
    spec = load_job(job or run / JOB).spec
    chosen = export_checkpoint(spec, run=run.absolute(), step=step, target=directory)
    click.echo(f"{directory}: the weights of step {chosen}")


def import_model(package: str, directory: Path) -> None:
    """Convert a model file into a Hugging Face folder."""
    from asyncflow.models.folder import import_gguf

    import_gguf(package, directory)
    click.echo(f"{directory}: ready to be used as model.source")


def merge_model(adapters: Path, directory: Path) -> None:
    """Merge adapters into the model that they belong to, as a Hugging Face folder."""
    from asyncflow.models.lora import merge_folder

    base = merge_folder(adapters, directory)
    click.echo(f"{directory}: {base} merged with the adapters of {adapters}")
