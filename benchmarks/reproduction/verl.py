"""verl's table of ``staleness_threshold`` and its modes, colocated, streamed and stale, in the simulator.

Two numbers, the median length and the cost of a further sequence, were fitted to the rows of 0 and 0.1 (``verl_rows``,
where real runs of the four rows are too); the trainer takes what the table says of it. Colocated, 128 devices generate
with the same engines, twice as many, and then do what the table has beside generation (356.30 - 177.85 s).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

from reproduction.figures import Figure
from verl_rows import HERE, ROWS, WITHOUT, Row

from asyncflow.api.job import RLJob
from asyncflow.api.load import load_job
from asyncflow.sim import Scenario, scenario_of, simulate

MANIFEST = HERE / "verl_rows.yaml"
COLOCATED_S, COLOCATED_GEN_S = 356.30, 177.85
"""Published for 128 devices, colocated: a step, and generation in it."""
MEASURED = {0.0: 225.5, 0.1: 170.4, 0.3: 144.2, 0.5: 134.5}
"""Seconds that the real rows took when they were last run (docs/internals/emulation.md)."""
MODE_BAR = 0.07
CYCLE = 4


def _job(*settings: str, size: int) -> RLJob:
    spec = load_job(MANIFEST).spec
    options = {**spec.rollout.engine.options, "time_scale": 1.0}
    options["share_s"] = float(str(options["share_s"])) / size
    options["recompute_s"] = float(str(options["recompute_s"])) / size
    given = ", ".join(f"{name}: {value}" for name, value in options.items())
    sizes = (f"rollout.engine.slots={size * spec.rollout.engine.slots}", "transferQueue.bytesPerUnit=64Gi")
    return load_job(MANIFEST, [*settings, *sizes, f"rollout.engine.options={{{given}}}"])


def row_s(row: Row, *, size: int = 1, seed: int = 0) -> float:
    """Return the seconds of a cycle of four steps. size: times that of the manifest, which is a quarter of verl's."""
    spec = load_job(MANIFEST).spec
    job = _job(
        f"schedule.stalenessThreshold={row.threshold}",
        f"schedule.maxInflight={size * (spec.schedule.max_inflight or 1)}",
        f"algorithm.promptsPerStep={size * spec.algorithm.prompts_per_step}",
        f"trainer.backend.options.sleep_s={(row.step - row.gen) / CYCLE!r}",
        size=size,
    )
    walls = [step.wall_s for step in simulate(_whole(job), seed=seed, spans=False).steps]
    return CYCLE * fmean(walls[WITHOUT * CYCLE : -CYCLE])


def _whole(job: RLJob) -> Scenario:
    """Return the scenario in which a step is one micro-batch, as it is in the manifest."""
    return replace(scenario_of(job), slot_tokens=1 << 40)


def colocated_s(*, size: int = 1, seed: int = 0) -> float:
    """Return the seconds of a colocated step: all prompts of a cycle, on twice the engines."""
    spec = load_job(MANIFEST).spec
    job = _job(
        "schedule={mode: sync}",
        f"rollout.replicas={2 * spec.rollout.replicas}",
        f"algorithm.promptsPerStep={CYCLE * size * spec.algorithm.prompts_per_step}",
        "algorithm.steps=6",
        f"trainer.backend.options.sleep_s={COLOCATED_S - COLOCATED_GEN_S!r}",
        size=size,
    )
    return fmean(step.wall_s for step in simulate(_whole(job), seed=seed, spans=False).steps[WITHOUT:])


def figures() -> Iterator[Figure]:
    """Yield the rows, then the modes."""
    rows = {row.threshold: row_s(row) for row in ROWS}
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
