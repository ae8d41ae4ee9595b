"""Division of devices between generation and training: ``asyncflow plan FILE --devices N``.

Invariant: the command starts no process of the job and writes no output file. A model need not be on this machine if
its shape is known.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import yaml

from asyncflow.api.job import RLJob
from asyncflow.api.load import load_job
from asyncflow.commands.sim import MODELS
from asyncflow.errors import ManifestError
from asyncflow.local.folder import JOB
from asyncflow.local.placement import resolve
from asyncflow.models.source import materialize_config
from asyncflow.planner.advice import advice, seconds_text
from asyncflow.planner.devices import DEVICES, Device, read_device, usual_device
from asyncflow.planner.measured import factors
from asyncflow.planner.report import basis, plain, schedules_table, settings, splits_table, summary, unmet
from asyncflow.planner.schedules import alternatives, described
from asyncflow.planner.search import Candidate, Ranked, Simulate, SplitProblem, choice, search, split_of
from asyncflow.planner.shapes import PUBLISHED_CONFIGS, Shape, shape_of
from asyncflow.planner.simulated import simulator_of
from asyncflow.planner.work import assumed_lengths, work_of
from asyncflow.plugins import read_options
from asyncflow.rollout.engines.base import OPTIONS as ENGINE_OPTIONS
from asyncflow.rollout.engines.simulated import SimulatedOptions
from asyncflow.rollout.lengths import Lengths
from asyncflow.sim import Models
from asyncflow.view.console import print_table

_print = partial(print_table, width=180)
_ROWS = 8
"""Most rows of the table of divisions."""
_FEW = 4
"""Most simulations for each schedule other than the job's own."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of a plan.

    devices: number of devices to divide; device: name or file of their kind, None for the usual one of the job's
    profile; probe: folder of a run, or a file of models; tokens, sigma: median and log standard deviation of response
    lengths, None if unknown; prompt_tokens: mean length of prompts, None if unknown; simulations: most simulations.
    """

    devices: int
    device: str | None = None
    probe: Path | None = None
    tokens: float | None = None
    sigma: float | None = None
    prompt_tokens: float | None = None
    simulations: int = 12


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """A job, its split problem, and the search result.

    own: the manifest's split, None if it does not fit; misfit: the reason, if so; lengths: source of response lengths.
    """

    job: RLJob
    problem: SplitProblem
    simulate: Simulate
    found: Ranked
    own: Candidate | None
    misfit: str
    lengths: str


def divide(
    file: Path,
    overrides: Sequence[str],
    *,
    options: PlanOptions,
    what_if: Sequence[str] = (),
    schedules: bool = False,
    as_json: bool = False,
) -> None:
    """Print the best divisions of the devices for a job.

    what_if: changes of the manifest, each planned separately and compared with the job; schedules: whether to find the
    best division under every other schedule, too. Raises ManifestError, with the arithmetic, if the model does not fit.
    """
    plan = plan_of(file, overrides, options)
    others = [(change, plan_of(file, [*overrides, change], options)) for change in what_if]
    by_schedule = _best_by_schedule(plan) if schedules else []
    if as_json:
        click.echo(json.dumps(_values(plan, others, by_schedule), indent=2))
        return
    for line in basis(plan.problem, measured=str(options.probe or ""), lengths=plan.lengths):
        click.echo(line)
    click.echo()
    best, spec = plan.found.best, plan.job.spec
    title = f"Best divisions of {options.devices} devices, {described(spec.schedule)}"
    _print(splits_table(plan.problem, plan.found.choices[:_ROWS], title=title))
    click.echo(f"{summary(plan.found)}.\n")
    if plan.own is not None:
        _print(splits_table(plan.problem, [plan.own], title="The manifest's own"))
    elif plan.misfit:
        click.echo(f"note: the manifest's own division does not fit: {plan.misfit}")
    click.echo(advice(plan.problem, now=plan.own, best=best))
    if warning := unmet(best):
        click.echo(f"note: {warning}")
    click.echo(f"  {' '.join(f'--set {value}' for value in settings(plan.problem, best, spec=spec))}")
    if by_schedule:
        click.echo()
        _print(schedules_table(plan.problem, by_schedule, own=best))
    for change, other in others:
        click.echo(f"\nWith {change}: {_compared(best, other.found.best)}")
        _print(splits_table(other.problem, other.found.choices[:1], title=described(other.job.spec.schedule)))


def plan_of(file: Path, overrides: Sequence[str], options: PlanOptions) -> DevicePlan:
    """Return the plan of a job. Raises ManifestError, with the arithmetic, if its model does not fit."""
    job, _ = resolve(load_job(file, overrides))
    engine = job.spec.rollout.engine
    if engine.name == "simulated":  # its options set the lengths of responses
        read_options(engine.options, SimulatedOptions, where=ENGINE_OPTIONS)
    device = _device(options.device, profile=job.spec.rollout.accelerator.profile)
    shape = _shape(job.spec.model.source)
    models = probed = None
    if options.probe is not None:
        models, probed = _measured(options.probe, otherwise=job)
    lengths, source = _lengths(job, options, models)
    prompt = options.prompt_tokens or (models.prompt_tokens if models is not None and models.prompt_tokens else None)
    work = work_of(job.spec, lengths=lengths, prompt=prompt)
    problem = SplitProblem(shape=shape, device=device, work=work, devices=options.devices)
    if models is not None and probed is not None:
        probe_work = work_of(probed.spec, lengths=lengths, prompt=prompt)
        split = split_of(replace(problem, work=probe_work), probed.spec)
        measured = factors(models, work=probe_work, engine=split.engine, trainer=split.trainer)
        problem = replace(problem, factors=measured)
    simulate = simulator_of(job, work, like=models)
    own, misfit = None, ""
    try:
        own = choice(problem, job.spec.schedule, split_of(problem, job.spec), simulate=simulate)
    except ManifestError as error:
        misfit = error.what
    found = search(problem, job.spec.schedule, simulate=simulate, most=options.simulations, known=[own] if own else [])
    return DevicePlan(job=job, problem=problem, simulate=simulate, found=found, own=own, misfit=misfit, lengths=source)


def _best_by_schedule(plan: DevicePlan) -> list[Candidate]:
    """Return the best division under each schedule that the job could have, fastest first."""
    spec = plan.job.spec
    found = [plan.found.best]
    for schedule in alternatives(spec):
        if schedule != spec.schedule:
            found.append(search(plan.problem, schedule, simulate=plan.simulate, most=_FEW).best)
    return sorted(found, key=lambda each: each.step_s)


def _measured(probe: Path, *, otherwise: RLJob) -> tuple[Models, RLJob]:
    """Return the measured models of a probe, and the job that was measured; for a file of models, ``otherwise``."""
    if probe.is_file():
        return Models.read(probe), otherwise
    if not (probe / MODELS).is_file():
        hint = f"Fit them to the run: asyncflow sim fit {probe}"
        raise ManifestError("there are no measured models", where=str(probe / MODELS), hint=hint)
    return Models.read(probe / MODELS), load_job(probe / JOB)


def _lengths(job: RLJob, options: PlanOptions, models: Models | None) -> tuple[Lengths | None, str]:
    """Return the lengths of responses (None: assumed ones), and a text that names their source."""
    most = job.spec.sampling.max_tokens
    if options.tokens is not None and options.tokens > most:
        hint = f"Pass --tokens of at most {most}, or set sampling.maxTokens higher"
        raise ManifestError(f"responses of {options.tokens:g} tokens are cut at {most}", where="--tokens", hint=hint)
    if options.tokens is not None or options.sigma is not None:
        tokens, sigma, source, usual = options.tokens, options.sigma, "as given", assumed_lengths(job.spec)
        if tokens is None:
            tokens, source = usual.tokens, f"as given, their median of {usual.tokens:g} assumed"
        if sigma is None:
            sigma, source = usual.sigma, f"as given, their sigma of {usual.sigma:g} assumed"
        return Lengths(tokens=tokens, sigma=sigma), source
    if models is not None:
        return models.engine.lengths, "measured"
    if job.spec.rollout.engine.name == "simulated":
        return None, "of the simulated engine"
    return None, "assumed: pass --tokens, or --probe"


def _device(name: str | None, *, profile: str) -> Device:
    if name is None:
        return usual_device(profile)
    if name in DEVICES:
        return DEVICES[name]
    try:
        figures = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ManifestError(
            f"no device and no file with one: {error}", where=name, hint=f"Pass one of {', '.join(DEVICES)}, or a file"
        ) from error
    if not isinstance(figures, Mapping):
        raise ManifestError("no mapping of figures", where=name, hint="Write one field a line, such as memory: 96e9")
    return read_device({"name": Path(name).stem, **figures}, where=name)


def _shape(source: str) -> Shape:
    """Return the shape of a model, from its config.json if available, otherwise from the table of published ones.

    Raises ManifestError if neither is available.
    """
    name = source.rstrip("/").rpartition("/")[2]
    with tempfile.TemporaryDirectory(prefix="asyncflow-plan-") as folder:
        try:
            config = json.loads((materialize_config(source, Path(folder)) / "config.json").read_text(encoding="utf-8"))
        except ManifestError:
            if name not in PUBLISHED_CONFIGS:
                raise
            config = PUBLISHED_CONFIGS[name]
    return shape_of(config, name=name)


def _compared(own: Candidate, other: Candidate) -> str:
    speedup = own.step_s / other.step_s
    times = f"{seconds_text(other.step_s)} a step instead of {seconds_text(own.step_s)}"
    return f"{times}, {speedup:.2f}x as fast" if speedup >= 1 else f"{times}, {1 / speedup:.2f}x as slow"


def _values(
    plan: DevicePlan, others: Sequence[tuple[str, DevicePlan]], by_schedule: Sequence[Candidate]
) -> dict[str, Any]:
    problem = plan.problem
    return {
        "device": problem.device.name,
        "devices": problem.devices,
        "divisions": [plain(problem, each) for each in plan.found.choices],
        "simulated": plan.found.tried,
        "possible": plan.found.possible,
        "proven": plan.found.proven,
        "own": plain(problem, plan.own) if plan.own is not None else None,
        "advice": advice(problem, now=plan.own, best=plan.found.best),
        "unmet": unmet(plan.found.best),
        "set": settings(problem, plan.found.best, spec=plan.job.spec),
        "schedules": [plain(problem, each) for each in by_schedule],
        "what_if": {change: plain(other.problem, other.found.best) for change, other in others},
    }
