"""verl's table of ``staleness_threshold``, and its colocated, streamed and stale modes, in the simulator.

Two parameters, the median length and the cost of an additional sequence, were fitted to the rows 0 and 0.1 in
``verl_rows``, which also has real runs of the four rows. The trainer's time comes from the table. In the colocated
mode, 128 devices generate with twice as many of the same engines, and then do the other work of the table
(356.30 - 177.85 s).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

import msgspec
from reproduction.figures import Figure
from verl_rows import HERE, ROWS, WITHOUT, predicted

from asyncflow.api.load import load_job
from asyncflow.sim import Colocation, TrainerModel, engine_model, scenario_of, simulate

MANIFEST = HERE / "verl_rows.yaml"
COLOCATED_S, COLOCATED_GEN_S = 356.30, 177.85
"""The published seconds of a colocated step on 128 devices, and of the generation in it."""
MEASURED = {0.0: 225.5, 0.1: 170.4, 0.3: 144.2, 0.5: 134.5}
"""Seconds of the rows in the latest real runs (docs/internals/emulation.md)."""
MODE_BAR = 0.07
STEPS = 6


def colocated_s() -> float:
    """Return the seconds of a colocated step: generation of a cycle's prompts on twice the engines, then training."""
    job = load_job(MANIFEST, ["schedule={mode: sync}"])
    spec, scenario = job.spec, scenario_of(job)
    engine = engine_model({**spec.rollout.engine.options, "time_scale": 1.0}, slots=spec.rollout.engine.slots)
    trainer = TrainerModel(optimizer_s=COLOCATED_S - COLOCATED_GEN_S)
    cycle = load_job(MANIFEST).spec.schedule.sync_every
    made = replace(
        scenario,
        models=msgspec.structs.replace(scenario.models, engine=engine, trainer=trainer),
        steps=STEPS,
        rollouts=2 * scenario.rollouts,
        prompts_per_step=cycle * scenario.prompts_per_step,
        colocated=Colocation(),
    )
    steps = simulate(made, seed=spec.algorithm.seed, spans=False).steps
    return fmean(step.wall_s for step in steps[WITHOUT:])


def figures() -> Iterator[Figure]:
    """Yield the rows, then the modes."""
    rows = {row.threshold: predicted(MANIFEST, row).seconds for row in ROWS}
    for row in ROWS:
        yield Figure(
            what=f"a step, staleness_threshold {row.threshold:g}",
            paper=row.step,
            unit=" s",
            measured=MEASURED[row.threshold],
            simulated=rows[row.threshold],
            how="fitted" if row.bar is None else "predicted",
            bar=row.bar,
        )
    colocated = colocated_s()
    yield Figure(what="a step, colocated", paper=COLOCATED_S, unit=" s", simulated=colocated)
    for name, row in (("mode 2, streamed", ROWS[0]), ("mode 4, stale and partial", ROWS[3])):
        yield Figure(
            what=f"colocated over {name}",
            paper=COLOCATED_S / row.step,
            simulated=colocated / rows[row.threshold],
            bar=MODE_BAR,
        )
