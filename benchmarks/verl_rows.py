"""Emulate verl's table of ``staleness_threshold`` with real driver, queue, weights and 17 processes; simulated engines.

    python benchmarks/verl_rows.py            # the four rows; exit status 1 if a limit is missed
    python benchmarks/verl_rows.py --fit      # fit the manifest to the rows 0 and 0.1 with the simulator
    python benchmarks/verl_rows.py --model    # only simulate, also with other sizes and parameters

The manifest, ``verl_rows.yaml``, states which parameters are given and which are fitted. The time of the trainer comes
from the table, ``step`` minus ``gen`` of each row; its waiting time is the result of the emulation. No parameter is
fitted to the rows 0.3 and 0.5.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import emulation
import msgspec

from asyncflow.api.load import load_job
from asyncflow.sim import TrainerModel, engine_model, scenario_of, simulate

HERE = Path(__file__).parent
WITHOUT = 2
"""The number of cycles at the start that are not counted. The last cycle, which no other overlaps, is not counted."""
FITTED = {"tokens": 100.0, "share_s": 0.0015}
"""The fitted options, with the start values of the search."""

CHOSEN = (("sigma", 0.8), ("sigma", 1.2), ("token_s", 0.048), ("token_s", 0.08), ("rho", 0.2))
"""Other values of parameters that were chosen before the fit."""


class Row(NamedTuple):
    """A row of verl's table, in seconds of a cycle. bar: the largest accepted relative error, None for a fitted row."""

    threshold: float
    step: float
    gen: float
    bar: float | None = None


ROWS = (Row(0.0, 231.34, 128.47), Row(0.1, 171.30, 58.17), Row(0.3, 146.11, 38.88, 0.05), Row(0.5, 150.63, 33.14, 0.12))
"""verl's documentation of its fully asynchronous trainer, "128-card Stale Ablation Experiment"; means of 400 steps."""


class Cycle(NamedTuple):
    """The mean seconds between publications, and the seconds of them in which the trainer waited."""

    seconds: float
    waited: float


def predicted(manifest: Path, row: Row, *, size: int = 1, **options: float) -> Cycle:
    """Return the simulated cycle of a row, in verl's seconds.

    size: a factor of the manifest's size; options: engine options that replace the manifest's.
    """
    job = load_job(manifest, [f"schedule.stalenessThreshold={row.threshold}"])
    spec, scenario = job.spec, scenario_of(job)
    merged = {**spec.rollout.engine.options, **options, "time_scale": 1.0}
    shared = {name: float(str(merged[name])) / size for name in ("share_s", "recompute_s")}
    models = msgspec.structs.replace(
        scenario.models,
        engine=engine_model(merged | shared, slots=size * spec.rollout.engine.slots),
        trainer=TrainerModel(slot_s=(row.step - row.gen) / spec.schedule.sync_every),
    )
    inflight = size * (spec.schedule.max_inflight or 1)
    larger = replace(
        scenario,
        models=models,
        schedule=scenario.schedule.model_copy(update={"max_inflight": inflight}),
        prompts_per_step=size * scenario.prompts_per_step,
    )
    steps = simulate(larger, seed=spec.algorithm.seed, spans=False).steps
    made = steps[WITHOUT * spec.schedule.sync_every : -spec.schedule.sync_every]
    cycles = len(made) / spec.schedule.sync_every
    return Cycle(sum(step.wall_s for step in made) / cycles, sum(step.wait_s for step in made) / cycles)


def usual(manifest: Path, row: Row, *, size: int = 1, **options: float) -> float:
    """Return the expected seconds of a cycle in an emulation, which has the same responses."""
    return predicted(manifest, row, size=size, **options).seconds


def fit(miss: Callable[[dict[str, float]], float], start: dict[str, float]) -> dict[str, float]:
    """Return values for which ``miss`` is small, by a search that scales one value at a time by decreasing factors."""
    best, least, factor = dict(start), miss(start), 1.3
    while factor > 1.01:
        tried = [best | {name: best[name] * by} for name in best for by in (factor, 1 / factor)]
        missed = [miss(each) for each in tried]
        if min(missed) < least:
            best, least = tried[missed.index(min(missed))], min(missed)
        else:
            factor **= 0.5
    return best


def fitted(manifest: Path, **fixed: float) -> dict[str, float]:
    """Return the options with the least squared relative errors of the first two rows. fixed: other options."""

    def miss(options: dict[str, float]) -> float:
        found = [(row.step, usual(manifest, row, **fixed, **options)) for row in ROWS if row.bar is None]
        return sum((seconds / step - 1) ** 2 for step, seconds in found)

    return fit(miss, FITTED)


def fit_manifest(manifest: Path) -> None:
    """Write the fitted options into the manifest."""
    text = manifest.read_text()
    for name, value in fitted(manifest).items():
        text, count = re.subn(rf"\b{name}: [0-9.e-]+", f"{name}: {value:.4g}", text)
        assert count == 1, f"{name} is {count} times in {manifest}"
    manifest.write_text(text)


def say(what: str, seconds: list[float]) -> None:
    """Print the predictions of all rows with their errors."""
    errors = "  ".join(f"{found:6.1f} {found / row.step - 1:+6.1%}" for row, found in zip(ROWS, seconds, strict=True))
    print(f"{what:44} {errors}", flush=True)


def show_model(manifest: Path) -> None:
    """Print the simulated rows, also with other sizes and parameters."""
    say("published", [row.step for row in ROWS])
    say("the manifest", [usual(manifest, row) for row in ROWS])
    say("four times its size, which is verl's", [usual(manifest, row, size=4) for row in ROWS])
    say("caches are not computed again", [usual(manifest, row, recompute_s=0.0) for row in ROWS])
    order = manifest.with_name("order.yaml")
    order.write_text(manifest.read_text().replace("fill: completion", "fill: order"))
    try:
        say("fill: order", [usual(order, row) for row in ROWS])
    finally:
        order.unlink()
    mean = sum(row.step - row.gen for row in ROWS[:2]) / 2
    same = [row._replace(gen=row.step - mean) for row in ROWS]
    say("the trainer of the first two rows in all", [usual(manifest, row) for row in same])
    for name, value in CHOSEN:
        again = fitted(manifest, **{name: value})
        say(f"{name} {value:g}, fitted again", [usual(manifest, row, **{name: value}, **again) for row in ROWS])


@dataclass(frozen=True, kw_only=True)
class Emulated:
    """A run. seconds, waited: of a cycle, in verl's time; lag: mean, in steps; cores: used cores of this machine; lost:
    samples that were not trained exactly once.
    """

    seconds: float
    waited: float
    lag: float
    cores: float
    lost: int


def emulate(manifest: Path, row: Row, folder: Path, settings: list[str], *, beside_s: float) -> Emulated:
    """Carry out a run of a row. beside_s: the time of a step of the real trainer in addition to its sleep."""
    spec = load_job(manifest, settings).spec
    scale = float(str(spec.rollout.engine.options["time_scale"]))
    step_s = scale * (row.step - row.gen) / spec.schedule.sync_every - beside_s
    fields = [*settings, f"schedule.stalenessThreshold={row.threshold}", f"trainer.backend.options.sleep_s={step_s}"]
    run = emulation.emulate(manifest, folder, fields)
    made = run.steps[WITHOUT * spec.schedule.sync_every : -spec.schedule.sync_every]
    cycles = len(made) / spec.schedule.sync_every
    return Emulated(
        seconds=sum(line["wall_s"] for line in made) / cycles / scale,
        waited=sum(line["wait_s"] for line in made) / cycles / scale,
        lag=sum(line["staleness_start_mean"] for line in made) / len(made),
        cores=run.cores,
        lost=run.lost,
    )


def main() -> int:
    """Fit the manifest, or print the simulation, or carry out the runs and check their limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--manifest", type=Path, default=HERE / "verl_rows.yaml")
    parser.add_argument("--output", type=Path, default=Path("runs/verl-rows"))
    parser.add_argument("--set", action="append", default=[], help="as for asyncflow run, for all rows")
    parser.add_argument("--thresholds", nargs="+", type=float, default=[row.threshold for row in ROWS], metavar="TAU")
    parser.add_argument("--beside", type=float, default=0.08, help="seconds of a step that the trainer does not sleep")
    parser.add_argument("--fit", action="store_true", help="only fit the manifest to the first two rows")
    parser.add_argument("--model", action="store_true", help="only print the simulator's predictions")
    options = parser.parse_args()
    if options.fit:
        fit_manifest(options.manifest)
    if options.fit or options.model:
        show_model(options.manifest)
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    good = True
    print(
        "threshold |    published    idle trainer | simulat. |  emulated   error    idle trainer | lag lost cores load"
    )
    for row in [row for row in ROWS if row.threshold in options.thresholds]:
        found = emulate(
            options.manifest, row, options.output / f"{row.threshold:g}", options.set, beside_s=options.beside
        )
        error = found.seconds / row.step - 1
        met = found.lost == 0 and (row.bar is None or abs(error) <= row.bar)
        good = good and met
        print(
            f"{row.threshold:9g} | {row.step:12.1f} s {row.gen / row.step:7.1%} {row.step - row.gen:5.1f} s",
            f"{usual(options.manifest, row):6.1f} s",
            f"{found.seconds:9.1f} s {error:+7.1%} {found.waited / found.seconds:7.1%}"
            f" {found.seconds - found.waited:5.1f} s",
            f"{found.lag:3.1f} {found.lost:5} {found.cores:6.2f} {os.getloadavg()[0]:4.1f}",
            "fitted to" if row.bar is None else f"within {row.bar:.0%}: {'yes' if met else 'NO'}",
            sep=" | ",
            flush=True,
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
