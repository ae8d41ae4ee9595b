"""AsyncFlow's Table 1: speedup 1 with sequential tasks, 2.01 with TransferQueue, 2.74 with the asynchronous workflow.

The paper publishes no stage times. An iteration of the base consists of generation g, reference r, update u and weight
sync s in sequence, with g + r + u + s = 1. With TransferQueue the stages stream (here ``periodic``): the reference runs
on its own devices, in parallel; the update runs as samples arrive; generation still pauses while new weights are
loaded. The asynchronous workflow (here ``delayed`` with ``swapAt: quota``) receives weights during generation. Lengths
are lognormal (sigma 0.5), and the number of slots gives 2.7 waves per iteration.

Invariant: the three runs of a choice of shares have the same lengths and the same speed of each device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from bench_async.points import MANIFEST, makespan
from emulation import emulate
from reproduction.figures import Figure

from asyncflow.api.load import load_job
from asyncflow.identity import SampleKey
from asyncflow.rollout.lengths import Lengths
from asyncflow.sim import scenario_of, simulate

PAPER = {"streaming": 2.01, "asynchronous": 2.74}
BARS = {"streaming": 0.05, "asynchronous": 0.07}
ROLLOUTS, SLOTS, GROUPS, SIZE, STEPS = 6, 16, 128, 2, 8
TOKENS, SIGMA, MOST, SEED = 40.0, 0.5, 4096, 1
COUNTED = slice(2, STEPS - 1)
SCHEDULES = {
    "base": "{mode: sync}",
    "streaming": "{mode: periodic}",
    "asynchronous": "{mode: async, update: delayed, swapAt: quota}",
}


@dataclass(frozen=True, kw_only=True)
class Shares:
    """The shares of the stages in an iteration of the base; the update has the remainder."""

    generation: float = 0.45
    reference: float = 0.18
    sync: float = 0.03

    @property
    def update(self) -> float:
        """The share of the update."""
        return round(1 - self.generation - self.reference - self.sync, 6)

    @property
    def words(self) -> str:
        """The shares, for a table."""
        return f"g {self.generation:.2f}, r {self.reference:.2f}, u {self.update:.2f}, s {self.sync:.2f}"


SWEEP = [Shares(generation=g, reference=r) for g in (0.42, 0.45, 0.48) for r in (0.12, 0.15, 0.18)]


def settings(kind: str, shares: Shares, *, iteration_s: float) -> list[str]:
    """Return the fields of a run, as for ``--set``. iteration_s: seconds of an iteration of the base."""
    train = shares.update + (shares.reference if kind == "base" else 0.0)
    load = 0.0 if kind == "asynchronous" else shares.sync
    token_s = shares.generation * iteration_s / _generation_tokens()
    engine = f"tokens: {TOKENS}, sigma: {SIGMA}, token_s: {token_s!r}, load_s: {load * iteration_s!r}"
    return [
        f"schedule={SCHEDULES[kind]}",
        f"algorithm.seed={SEED}",
        f"algorithm.steps={STEPS}",
        f"algorithm.promptsPerStep={GROUPS}",
        f"rollout.replicas={ROLLOUTS}",
        f"rollout.engine.slots={SLOTS}",
        f"rollout.engine.options={{{engine}}}",
        f"trainer.backend.options.sample_s={train * iteration_s / (GROUPS * SIZE)!r}",
    ]


def _generation_tokens() -> float:
    lengths = Lengths(tokens=TOKENS, sigma=SIGMA)
    return fmean(
        makespan(
            [
                lengths.of(SampleKey(serial, sample), seed=SEED, most=MOST)
                for serial in range(GROUPS * step, GROUPS * (step + 1))
                for sample in range(SIZE)
            ],
            slots=ROLLOUTS * SLOTS,
        )
        for step in range(STEPS)[COUNTED]
    )


def simulated(shares: Shares) -> dict[str, float]:
    """Return the speedup of each kind in the simulator."""
    times = {}
    for kind in SCHEDULES:
        run = simulate(
            scenario_of(load_job(MANIFEST, settings(kind, shares, iteration_s=10.0))), seed=SEED, spans=False
        )
        times[kind] = fmean(step.wall_s for step in run.steps[COUNTED])
    return {kind: times["base"] / times[kind] for kind in PAPER}


def real(shares: Shares, folder: Path, *, iteration_s: float) -> dict[str, float]:
    """Return the speedup of each kind in real runs. iteration_s: seconds of an iteration of the base."""
    times = {}
    for kind in SCHEDULES:
        run = emulate(MANIFEST, folder / kind, settings(kind, shares, iteration_s=iteration_s))
        times[kind] = fmean(line["wall_s"] for line in run.steps[COUNTED])
    return {kind: times["base"] / times[kind] for kind in PAPER}


def figures(folder: Path | None) -> Iterator[Figure]:
    """Yield the figures for the default shares, then the sweep. folder: for real runs; None for no real runs."""
    usual, measured = Shares(), real(Shares(), folder, iteration_s=20.0) if folder is not None else {}
    for shares in (usual, *SWEEP):
        gains = simulated(shares)
        for kind, paper in PAPER.items():
            yield Figure(
                what=f"{kind} over one after another, {shares.words}",
                paper=paper,
                measured=measured.get(kind) if shares is usual else None,
                simulated=gains[kind],
                how="fitted",
                why="the paper gives no shares",
                bar=BARS[kind] if shares is usual else None,
            )
