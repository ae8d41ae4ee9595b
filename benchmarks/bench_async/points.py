"""The points of ``make bench-async``: modes, ratios and lengths as settings of one manifest, and their closed forms.

An *iteration* trains 256 groups: in one step, or in verl's modes in a cycle of four steps with a quarter each. The work
of engines and trainer is the same in every mode: T_gen = ``generation_s``, the mean over the iterations of list
scheduling on 32 slots, and T_train = ``ratio`` * T_gen. In ``colocated``, generation and training use all devices in
turn, so it has twice the rollouts and half of T_train.

Invariant: the lengths are those that the simulated engine draws for each sample, so a closed form has the same load.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from asyncflow.api.job import RLJob
from asyncflow.api.load import load_job
from asyncflow.identity import SampleKey
from asyncflow.rollout.lengths import Lengths
from asyncflow.sim import scenario_of, simulate

MANIFEST = Path(__file__).parent / "load.yaml"
VERL = (
    "schedule={{mode: async, swapAt: {swap_at}, syncEvery: 4, requireBatches: 1, fill: completion, "
    "stalenessThreshold: {threshold}, maxStaleness: 1000}}"
)
MODES: dict[str, tuple[str, ...]] = {
    "sync": ("schedule={mode: sync}",),
    "colocated": ("schedule={mode: sync}", "rollout.replicas=16"),
    "periodic": ("schedule={mode: periodic}",),
    "delayed": ("schedule={mode: async, update: delayed, swapAt: quota}",),
    "staggered": ("schedule={mode: async, update: staggered, swapAt: sequence, stalenessThreshold: 0.5}",),
    "verl stream": (VERL.format(swap_at="sequence", threshold=0),),
    "verl stale": (VERL.format(swap_at="sequence", threshold=0.5),),
    "verl partial": (VERL.format(swap_at="token", threshold=0.5),),
}
"""The settings of each mode. ``verl``: modes 2, 3 and 4 of its fully asynchronous trainer; its mode 1 is ``sync`` with
engines that continue immediately.
"""
RATIOS = (0.5, 0.8, 1.0, 1.25, 2.0)
SIGMAS = (0.5, 1.0)
GROUPS, SIZE, SLOTS = 256, 2, 32
CYCLE = 4
"""The number of steps in an iteration in verl's modes."""
WITHOUT = 2
"""The number of iterations at the start that are not counted."""
TOKENS = 40.0
MOST = 4096


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run. ratio: T_train / T_gen; sigma: of the log of the length; generation_s: T_gen."""

    mode: str
    sigma: float
    ratio: float
    seed: int
    iterations: int = 20
    generation_s: float = 5.0

    @property
    def name(self) -> str:
        """The name of its folder, which contains all fields."""
        mode = self.mode.replace(" ", "-")
        return f"{mode}-{self.sigma:g}-{self.ratio:g}-{self.seed}-{self.iterations}x{self.generation_s:g}"

    @property
    def steps_each(self) -> int:
        """The number of steps in an iteration."""
        return CYCLE if self.mode.startswith("verl") else 1

    @property
    def token_s(self) -> float:
        """Seconds per token."""
        return self.generation_s / _tokens(self.sigma, self.seed, self.iterations)

    @property
    def train_s(self) -> float:
        """T_train of this mode."""
        return self.ratio * self.generation_s / (2 if self.mode == "colocated" else 1)

    @property
    def lengths(self) -> tuple[tuple[int, ...], ...]:
        """The tokens of all samples of each iteration, in the order of the prompts."""
        return _lengths(self.sigma, self.seed, self.iterations)

    @property
    def settings(self) -> list[str]:
        """Fields of the manifest, as for ``--set``."""
        return [
            *MODES[self.mode],
            f"algorithm.seed={self.seed}",
            f"algorithm.steps={self.iterations * self.steps_each}",
            f"algorithm.promptsPerStep={GROUPS // self.steps_each}",
            f"rollout.engine.options={{tokens: {TOKENS}, sigma: {self.sigma}, token_s: {self.token_s!r}}}",
            f"trainer.backend.options.sample_s={self.train_s / (GROUPS * SIZE)!r}",
        ]

    @property
    def job(self) -> RLJob:
        """The manifest."""
        return load_job(MANIFEST, self.settings)

    def iterations_of(self, walls: Sequence[float]) -> list[float]:
        """Return the sum of ``walls``, one value per step, for each counted iteration."""
        each = self.steps_each
        return [sum(walls[first : first + each]) for first in range(WITHOUT * each, len(walls), each)]


@functools.cache
def _lengths(sigma: float, seed: int, iterations: int) -> tuple[tuple[int, ...], ...]:
    lengths = Lengths(tokens=TOKENS, sigma=sigma)
    return tuple(
        tuple(
            lengths.of(SampleKey(serial, sample), seed=seed, most=MOST)
            for serial in range(GROUPS * iteration, GROUPS * (iteration + 1))
            for sample in range(SIZE)
        )
        for iteration in range(iterations)
    )


@functools.cache
def _tokens(sigma: float, seed: int, iterations: int) -> float:
    """Return T_gen in tokens."""
    return fmean(makespan(each, slots=SLOTS) for each in _lengths(sigma, seed, iterations))


def ends(lengths: Sequence[int], *, slots: int) -> Iterator[float]:
    """Yield the end of each response, in tokens; a response starts in the slot that becomes free first."""
    free = [0.0] * slots
    for tokens in lengths:
        end = free[0] + tokens
        heapq.heapreplace(free, end)
        yield end


def makespan(lengths: Sequence[int], *, slots: int) -> float:
    """Return the tokens from the start to the end of the last response."""
    return max(ends(lengths, slots=slots))


def closed_form(point: Point) -> float | None:
    """Return the mean seconds of an iteration without overheads, None for a mode without a closed form.

    sync: T_gen + T_train of each iteration. periodic: groups are trained in the order of completion, each as soon as
    the trainer is free (Periodic Asynchrony §4).
    """
    counted = point.lengths[WITHOUT:]
    if point.mode in ("sync", "colocated"):
        slots = SLOTS * (2 if point.mode == "colocated" else 1)
        return point.train_s + point.token_s * fmean(makespan(each, slots=slots) for each in counted)
    if point.mode == "periodic":
        return fmean(_streamed(point, each) for each in counted)
    return None


def _streamed(point: Point, lengths: Sequence[int]) -> float:
    every, token_s, group_s = list(ends(lengths, slots=SLOTS)), point.token_s, point.train_s / GROUPS
    now = 0.0
    for end in sorted(max(every[first : first + SIZE]) for first in range(0, len(every), SIZE)):
        now = max(now, end * token_s) + group_s
    return now


def predicted(point: Point) -> float:
    """Return the mean seconds of an iteration in the simulator, without fitted parameters or overheads."""
    run = simulate(scenario_of(point.job), seed=point.seed, spans=False)
    return fmean(point.iterations_of([step.wall_s for step in run.steps]))


def matrix(
    *, modes: Sequence[str], sigmas: Sequence[float], ratios: Sequence[float], seeds: Sequence[int], **options: float
) -> list[Point]:
    """Return the points, ordered by seed, so that a prefix is a matrix of fewer seeds.

    options: other fields of each ``Point``.
    """
    return [
        Point(mode=mode, sigma=sigma, ratio=ratio, seed=seed, **options)  # type: ignore[arg-type]
        for seed in seeds
        for sigma in sigmas
        for ratio in ratios
        for mode in modes
    ]
