"""When samples are generated, with which weights, and when they are trained.

Invariant: under ``swapAt: quota``, and in the modes sync and periodic, the version that generates D_k is a function of
k alone; the rules below refuse what would break that. Where verl has another word for a field, its docstring names it.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from asyncflow.api.base import Rule, Spec

Mode = Literal["sync", "periodic", "async"]
Update = Literal["sync", "delayed", "staggered"]
SwapAt = Literal["quota", "sequence", "token"]


def _usual_update(fields: dict[str, Any]) -> Update:
    return "delayed" if fields["mode"] == "async" else "sync"


def _usual_staleness(fields: dict[str, Any]) -> int:
    return 0 if fields["update"] == "sync" else 1


class ScheduleSpec(Spec):
    """Overlap of generation and training. θ_0 is the initial model; step k consumes D_k and makes θ_k."""

    mode: Mode = "async"
    """``sync``: generate D_k with θ_{k-1}, then train. ``periodic``: the same samples, trained as they arrive.
    ``async``: generation never waits for training."""
    update: Update = Field(default_factory=_usual_update)
    """How new weights reach rollouts. ``sync``: all wait. ``delayed``: received while generating, one step behind.
    ``staggered``: some instances at a time. Absent: delayed in mode async, else sync."""
    swap_at: SwapAt = "quota"
    """Where an instance changes weights: when its share of the step is done, between sequences, or between tokens
    (verl: ``partial_rollout``)."""
    max_staleness: Annotated[int, Field(ge=0, le=1000)] = Field(default_factory=_usual_staleness)
    """Most versions between a sample's oldest token and the gradient: (k-1) - v. A promise, kept by holding back
    publication, never by throwing samples away. Absent: 0 with update sync, else 1."""
    staleness_threshold: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """Fraction by which prompts in flight may exceed what one cycle needs (verl: ``staleness_threshold``). Counts with
    swapAt sequence and token; quota admits whole steps."""
    sync_every: Annotated[int, Field(ge=1, le=1000)] = 1
    """Optimizer steps between publications (verl: ``trigger_parameter_sync_step``)."""
    require_batches: Annotated[int, Field(ge=0, le=1000)] = 0
    """Batches that must be complete before training begins (verl: ``require_batches``): 0 streams micro-batches,
    1 waits for the whole D_k."""
    max_inflight: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Most prompts in flight, over all rollouts (AReaL: ``max_concurrent``). Absent: no bound beside staleness."""
    deterministic: bool = False
    """Whether gradients accumulate in the order of keys, so that a run is a function of seed and manifest."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("max_staleness", "update", "mode"),
            ok=lambda schedule: schedule.update == "sync" or schedule.max_staleness >= 1,
            cel="!has(self.update) || self.update == 'sync' || !has(self.maxStaleness) || self.maxStaleness >= 1",
            why="a delayed update trains on samples that are one version behind",
            fix="Give maxStaleness: 1 or more, or update: sync",
        ),
        Rule(
            reads=("update", "mode"),
            ok=lambda schedule: schedule.mode == "async" or schedule.update == "sync",
            cel="self.mode == 'async' || !has(self.update) || self.update == 'sync'",
            why="the modes sync and periodic train on samples of the newest weights",
            fix="Give update: sync, or mode: async",
        ),
        Rule(
            reads=("update", "mode", "swap_at"),
            ok=lambda schedule: schedule.mode != "async" or schedule.swap_at != "quota" or schedule.update != "sync",
            cel="self.mode != 'async' || self.swapAt != 'quota' || !has(self.update) || self.update != 'sync'",
            why="if all wait for new weights after each step's share, nothing is asynchronous",
            fix="Give update: delayed, or mode: sync or periodic",
        ),
        Rule(
            reads=("swap_at", "mode"),
            ok=lambda schedule: schedule.mode == "async" or schedule.swap_at == "quota",
            cel="self.mode == 'async' || self.swapAt == 'quota'",
            why="in the modes sync and periodic a whole step is generated with one version",
            fix="Give swapAt: quota, or mode: async",
        ),
        Rule(
            reads=("sync_every", "mode"),
            ok=lambda schedule: schedule.mode == "async" or schedule.sync_every == 1,
            cel="self.mode == 'async' || self.syncEvery == 1",
            why="the modes sync and periodic publish after every step",
            fix="Give syncEvery: 1, or mode: async",
        ),
        Rule(
            reads=("deterministic", "swap_at"),
            ok=lambda schedule: not schedule.deterministic or schedule.swap_at == "quota",
            cel="!self.deterministic || self.swapAt == 'quota'",
            why="which version generates a sample then depends on arrival times",
            fix="Give swapAt: quota, or deterministic: false",
        ),
        Rule(
            reads=("require_batches", "mode"),
            ok=lambda schedule: schedule.mode != "periodic" or schedule.require_batches == 0,
            cel="self.mode != 'periodic' || self.requireBatches == 0",
            why="the mode periodic is to train samples as they arrive",
            fix="Give requireBatches: 0, or mode: sync",
        ),
    )
