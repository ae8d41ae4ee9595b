"""Simulated runs: ``asyncflow sim FILE``; and models fitted to a recorded run: ``asyncflow sim fit DIR``.

Invariant: no process of the job is started; the figures are a function of the manifest, the models and the seed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import click
import msgspec
from rich.table import Table

from asyncflow.api.load import load_job
from asyncflow.commands.preflight import check_options, runnable_job
from asyncflow.commands.timeline import PAGE, TRACE, write_pictures
from asyncflow.driver.journal import FIRST_DISPATCH, METRICS, SUMMARY
from asyncflow.driver.sample_files import read_samples, sample_files
from asyncflow.errors import ManifestError
from asyncflow.local.folder import JOB, check_run
from asyncflow.queue.ledger.events import SlotDecided
from asyncflow.queue.ledger.log import read_ledger
from asyncflow.sim import Colocation, Models, Simulated, not_simulated, scenario_of, simulate
from asyncflow.sim.fit import WITHOUT, Drawn, Recorded, fitted
from asyncflow.telemetry.spans import FOLDER as SPANS
from asyncflow.telemetry.spans import read_timeline
from asyncflow.timeline.causes import Shares, attribute, shares
from asyncflow.timeline.tracks import Timeline
from asyncflow.view.console import make_console, make_table, print_json

MODELS = "models.json"
"""File name, in a run's folder, of the models that were fitted to the run."""


def sim(
    file: Path,
    overrides: Sequence[str],
    *,
    seed: int | None,
    models: Path | None,
    colocated: tuple[float, float] | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Print the figures of a simulated run of a manifest.

    seed: None for ``algorithm.seed``; models: file of models; colocated: seconds to switch to training and back, if the
    same devices generate and train; output: folder for the timeline. Raises ManifestError if a duration is unknown.
    """
    job = runnable_job(file, overrides)
    check_options(job, source=str(file))
    colocation = None if colocated is None else Colocation(to_train_s=colocated[0], to_generate_s=colocated[1])
    scenario = scenario_of(job, models=None if models is None else Models.read(models), colocated=colocation)
    started = time.process_time()
    made = simulate(scenario, seed=job.spec.algorithm.seed if seed is None else seed)
    took_s = time.process_time() - started
    if as_json:
        print_json(_figures(made))
        return
    if missing := not_simulated(job):
        click.echo(f"note: not simulated: {'; '.join(missing)}")
    assert made.timeline is not None
    timeline, title = attribute(made.timeline), f"{job.name}: {len(made.steps)} steps in {made.wall_s:.4g} s"
    click.echo(f"{title}, simulated in {took_s:.2g} s")
    console = make_console()
    console.print(_steps(made))
    console.print(_shares_table(shares(timeline)))
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        write_pictures(output, timeline, title=title)
        click.echo(f"{output / PAGE}: the chart; {output / TRACE}: opens in https://ui.perfetto.dev")


def fit(directory: Path, *, output: Path | None) -> None:
    """Write models fitted to a recorded run, and print the errors of a simulation with these models.

    Raises ManifestError if too little is recorded.
    """
    check_run(directory)
    job = load_job(directory / JOB)
    recorded = _recorded(directory, rollouts=job.spec.rollout.replicas)
    models, made = fitted(job, recorded)
    file = directory / MODELS if output is None else output
    models.write(file)
    numbers = ("recorded", "simulated", "error")
    table = make_table("mean of a step", *numbers, right=numbers)
    real, simulated = recorded.steps[WITHOUT:], made.steps[WITHOUT:] or made.steps
    for name in ("wall_s", "wait_s", "compute_s", "response_tokens", "staleness_start_mean"):
        one, other = fmean(step[name] for step in real), fmean(getattr(step, name) for step in simulated)
        table.add_row(name, f"{one:.4g}", f"{other:.4g}", f"{other / one - 1:+.1%}" if one else "")
    make_console().print(table)
    click.echo(f"{file}: the models; asyncflow sim FILE --models {file}")


def _recorded(directory: Path, *, rollouts: int) -> Recorded:
    """Read the files of a run. Raises ManifestError if it has not ended, AsyncFlowError if a file cannot be read."""
    try:
        lines = [msgspec.json.decode(line) for line in (directory / METRICS).read_bytes().splitlines()]
        summary = msgspec.json.decode((directory / SUMMARY).read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        what, hint = f"is no finished run: {error}", "Pass the folder of a run that has ended"
        raise ManifestError(what, where=str(directory), hint=hint) from error
    steps = {line["step"]: line for line in lines}
    files = [file for file in sample_files(directory) if file.purpose == "train"]
    drawn = [sample for file in files for sample in read_samples(file.path) if sample.drawn]
    slots = Counter(event.step for event in read_ledger(directory / "ledger") if isinstance(event, SlotDecided))
    timeline = read_timeline(directory) if (directory / SPANS).is_dir() else None
    generating_s = (1 - summary["idle_share"].get("rollout", 0.0)) * summary["training_s"] * rollouts
    if timeline is not None and steps:
        generating_s = _generating_s(timeline, until=steps[max(steps)]["at"])
    return Recorded(
        steps=[steps[step] for step in sorted(steps)],
        samples=[Drawn(sample.serial, sample.prompt_tokens, sample.response_tokens) for sample in drawn],
        generating_s=generating_s,
        slots=slots,
        timeline=timeline,
    )


def _generating_s(timeline: Timeline, *, until: float) -> float:
    """Return the seconds that rollouts spent on generation for training, up to the time ``until``.

    If the beginning of the timeline is lost, it is extrapolated from the rest.
    """
    dispatched = timeline.first(FIRST_DISPATCH)
    first = timeline.begin if dispatched is None else dispatched
    begin = max(timeline.begin, first)
    spans = [span for track in timeline.tracks if track.role == "rollout" for span in track.main]
    parts = (min(span.end, until) - max(span.begin, begin) for span in spans if span.kind == "generate")
    return sum(part for part in parts if part > 0) * (until - first) / (until - begin)


def _figures(made: Simulated) -> dict[str, object]:
    return {
        "wall_s": made.wall_s,
        "step_s": _step_s(made),
        "tokens_per_second": made.tokens_per_second,
        "idle_share": made.idle,
        "steps": made.steps,
    }


def _step_s(made: Simulated) -> float:
    return made.step_s(without=WITHOUT if len(made.steps) > WITHOUT else 0)


def _steps(made: Simulated) -> Table:
    names = ("step s", "of which wait", "compute", "tokens/s", "staleness start", "end", "most")
    table = make_table(*names, right=names)
    counted = made.steps[WITHOUT:] or made.steps
    table.add_row(
        f"{_step_s(made):.4g}",
        f"{fmean(step.wait_s for step in counted):.4g}",
        f"{fmean(step.compute_s for step in counted):.4g}",
        f"{made.tokens_per_second:.4g}",
        f"{fmean(step.staleness_start_mean for step in counted):.2f}",
        f"{fmean(step.staleness_end_mean for step in counted):.2f}",
        str(max(step.staleness_start_max for step in made.steps)),
    )
    return table


def _shares_table(found: Mapping[str, Shares]) -> Table:
    """Return a table of activities and causes of idleness of each role's processes, as shares of their time."""
    table = make_table("role", "idle", "what it did", "because of", right=("idle",))
    for role in ("trainer", "rollout"):
        selected = [share for share in found.values() if share.role == role]
        total = sum(share.seconds for share in selected)
        kinds, causes = Counter[str](), Counter[str]()
        for share in selected:
            kinds.update(share.kinds)
            causes.update(share.idle)
        if total > 0:
            table.add_row(role, f"{causes.total() / total:.1%}", _parts(kinds, total), _parts(causes, total))
    return table


def _parts(seconds: Counter[str], total: float) -> str:
    return ", ".join(f"{what} {spent / total:.1%}" for what, spent in seconds.most_common() if spent >= 5e-4 * total)
