"""Simulated runs: ``asyncflow sim FILE``, and the models that ``asyncflow sim fit DIR`` makes of a recorded one.

Invariant: nothing of the job is started; what is printed is a function of the manifest, the models and the seed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import click
import msgspec
from rich.console import Console
from rich.table import Table

from asyncflow.commands.preflight import runnable_job
from asyncflow.sim import Colocation, Models, Simulated, scenario_of, simulate

_WIDTH = 120
"""Columns where there is no terminal whose width could be asked for."""
_WITHOUT = 2
"""Steps at the beginning that do not count for the mean, where there are more."""


def sim(
    file: Path,
    overrides: Sequence[str],
    *,
    seed: int | None,
    models: Path | None,
    colocated: tuple[float, float] | None,
    as_json: bool,
) -> None:
    """Print what a run of a manifest would be. seed: None for ``algorithm.seed``.

    Raises ManifestError where it is not known how long something takes.
    """
    job = runnable_job(file, overrides)
    turns = None if colocated is None else Colocation(to_train_s=colocated[0], to_generate_s=colocated[1])
    scenario = scenario_of(job, models=None if models is None else Models.read(models), colocated=turns)
    began = time.process_time()
    made = simulate(scenario, seed=job.spec.algorithm.seed if seed is None else seed)
    took_s = time.process_time() - began
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(_figures(made))).decode())
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    click.echo(f"{job.name}: {len(made.steps)} steps of {made.wall_s:.4g} s, simulated in {took_s:.2g} s")
    console.print(_steps(made))
    console.print(_spent(made))


def _figures(made: Simulated) -> dict[str, object]:
    return {
        "wall_s": made.wall_s,
        "step_s": _step_s(made),
        "tokens_per_second": made.tokens_per_second,
        "idle_share": made.idle,
        "steps": made.steps,
    }


def _step_s(made: Simulated) -> float:
    return made.step_s(without=_WITHOUT if len(made.steps) > _WITHOUT else 0)


def _steps(made: Simulated) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("step s", "of which wait", "compute", "tokens/s", "staleness start", "end", "most"):
        table.add_column(name, header_style="dim", justify="right")
    counted = made.steps[_WITHOUT:] or made.steps
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


def _spent(made: Simulated) -> Table:
    """Return what the processes of each role did, as shares of their time."""
    table = Table(box=None, pad_edge=False)
    table.add_column("role", header_style="dim")
    table.add_column("idle", header_style="dim", justify="right")
    table.add_column("what it did", header_style="dim")
    for role, spent in made.spent.items():
        total = sum(spent.values())
        if total <= 0:
            continue
        parts = sorted(spent.items(), key=lambda part: -part[1])
        did = (f"{kind} {waits}".strip() + f" {seconds / total:.1%}" for (kind, waits), seconds in parts if seconds > 0)
        table.add_row(role, f"{made.idle[role]:.1%}", ", ".join(did))
    return table
