"""Schedule of a job: when samples are generated, with which weights, and when they are trained.

If verl has another name for a field, the description of the field contains it.

Invariant: under ``swapAt: quota``, and in the modes sync and periodic, the version that generates D_k is a function of
k alone; the rules below refuse schedules that violate this.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from asyncflow.api.base import Rule, Spec

Mode = Literal["sync", "periodic", "async"]
Update = Literal["sync", "delayed", "staggered"]
SwapAt = Literal["quota", "sequence", "token"]
Prefix = Literal["recompute", "keep"]

_SYNC = "(has(self.schedule.update) ? self.schedule.update == 'sync' : self.schedule.mode != 'async')"
_LEAST = f"(self.schedule.syncEvery - ({_SYNC} ? 1 : 0))"
_STALENESS = f"(has(self.schedule.maxStaleness) ? self.schedule.maxStaleness : {_LEAST})"
_CYCLE = "(1.0 + self.schedule.stalenessThreshold) * double(self.schedule.syncEvery)"
LAG_CEL = f"(self.schedule.swapAt == 'quota' ? ({_SYNC} ? 0 : 1) : {_STALENESS})"
"""``ScheduleSpec.lag`` of a job in CEL."""
AHEAD_CEL = f"(self.schedule.swapAt == 'quota' ? ({_SYNC} ? 1.0 : 2.0) : [double({_STALENESS}) + 1.0, {_CYCLE}].min())"
"""``ScheduleSpec.ahead`` of a job in CEL. The API server does not fill in defaults that depend on other fields."""

STEPS_OUT_CEL = (
    "(self.schedule.syncEvery % self.schedule.requireBatches == 0 ? self.schedule.syncEvery"
    " : self.schedule.requireBatches % self.schedule.syncEvery == 0 ? self.schedule.requireBatches"
    " : self.schedule.requireBatches + self.schedule.syncEvery - 1)"
)
"""``ScheduleSpec.required_lead`` of a job in CEL, if requireBatches is not 0."""


def _default_update(fields: dict[str, Any]) -> Update:
    return "delayed" if fields["mode"] == "async" else "sync"


def _default_staleness(fields: dict[str, Any]) -> int:
    return _least_staleness(update=fields["update"], sync_every=fields["sync_every"])


def _least_staleness(*, update: Update, sync_every: int) -> int:
    """Return the lag of the last step before a publication, which the last published version generates."""
    return sync_every - 1 if update == "sync" else sync_every


class ScheduleSpec(Spec):
    """Overlap of generation and training. θ_0 is the initial model; step k trains D_k and makes θ_k."""

    mode: Mode = "async"
    """``sync``: generate D_k with θ_{k-1}, then train. ``periodic``: the same samples, trained as they arrive.
    ``async``: generation never waits for training."""
    update: Update = Field(default_factory=_default_update)
    """Way that rollouts get new weights. ``sync``: all wait for them. ``delayed``: they receive them while generating,
    one step behind. ``staggered``: the same, but only so many instances swap at the same time as the supply of samples
    allows. Absent: delayed in mode async, otherwise sync."""
    swap_at: SwapAt = "quota"
    """Point at which an instance swaps weights: when its share of the step is done, between sequences, or between
    tokens (verl: ``partial_rollout``)."""
    prefix: Prefix = "recompute"
    """Treatment of the tokens of a running response when weights change between tokens. ``recompute``: the new weights
    recompute their keys and values. ``keep``: the old keys and values stay: cheaper, but biased, as the following
    tokens then come from no version's distribution."""
    sync_every: Annotated[int, Field(ge=1, le=1000)] = 1
    """Optimizer steps between publications of weights (verl: ``trigger_parameter_sync_step``). With 4, rollouts get
    every fourth version: fewer transfers, but samples up to 4 steps stale."""
    max_staleness: Annotated[int, Field(ge=0, le=1000)] = Field(default_factory=_default_staleness)
    """Most versions between a sample's oldest token and the gradient: (k-1) - v. It is enforced by limiting how far
    generation runs ahead, never by discarding samples. Absent: the least value: syncEvery, minus 1 with update sync."""
    staleness_threshold: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """Lead of generation, as a fraction of a cycle (the ``syncEvery`` steps between two publications): with 0 the
    prompts of one cycle are issued, with 0.5 half a cycle more (verl: ``staleness_threshold``). Used with swapAt
    sequence and token; quota admits whole steps."""
    require_batches: Annotated[int, Field(ge=0, le=1000)] = 0
    """Batches that must be complete before training starts (verl: ``require_batches``). 0: micro-batches are trained as
    they arrive. 1: the whole D_k must be complete. n: n steps, which are then trained one after another."""
    fill: Literal["order", "completion"] = "order"
    """Groups that make up D_k. ``order``: of the prompts that were issued for it, so the trainer waits for the longest.
    ``completion``: the groups that complete first, as in verl; an early group replaces a late one if the same versions
    may start both, so that ``maxStaleness`` still holds."""
    max_inflight: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Most prompts in flight, over all rollouts (AReaL: ``max_concurrent``). Absent: only staleness limits them."""
    deterministic: bool = False
    """Accumulate gradients in the order of keys, so that a run is a function of seed and manifest."""

    @property
    def lag(self) -> int:
        """η: D_k may start under θ_{k-1-η} or newer. 0 for update sync, 1 for delayed quotas, else maxStaleness."""
        if self.swap_at != "quota":
            return self.max_staleness
        return 0 if self.update == "sync" else 1

    @property
    def ahead(self) -> float:
        """Most optimizer steps beyond the newest published version whose prompts are issued."""
        steps = self.lag + 1
        return steps if self.swap_at == "quota" else min(steps, (1 + self.staleness_threshold) * self.sync_every)

    @property
    def required_lead(self) -> int:
        """Optimizer steps beyond the newest published version whose prompts must be issued before training starts."""
        batches, cycle = max(1, self.require_batches), self.sync_every
        if cycle % batches == 0:
            return cycle
        return batches if batches % cycle == 0 else batches + cycle - 1

    @property
    def whole_steps(self) -> bool:
        """True if training waits for all of D_k, in the order of keys, instead of streaming."""
        return self.mode == "sync" or self.require_batches > 0 or self.deterministic

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("max_staleness", "update", "mode", "sync_every"),
            ok=lambda schedule: (
                schedule.max_staleness >= _least_staleness(update=schedule.update, sync_every=schedule.sync_every)
            ),
            cel="!has(self.maxStaleness) || self.maxStaleness >= self.syncEvery"
            " - ((has(self.update) ? self.update == 'sync' : self.mode != 'async') ? 1 : 0)",
            why="samples are up to syncEvery steps stale, with update: sync up to syncEvery - 1",
            fix="Set at least syncEvery, or syncEvery - 1 with update: sync",
        ),
        Rule(
            reads=("update", "mode"),
            ok=lambda schedule: schedule.mode == "async" or schedule.update == "sync",
            cel="self.mode == 'async' || !has(self.update) || self.update == 'sync'",
            why="the modes sync and periodic train on samples of the newest weights",
            fix="Set update: sync, or mode: async",
        ),
        Rule(
            reads=("update", "mode"),
            ok=lambda schedule: schedule.mode != "async" or schedule.update != "sync",
            cel="self.mode != 'async' || !has(self.update) || self.update != 'sync'",
            why="with update: sync all rollouts wait for new weights, which is not asynchronous",
            fix="Set update: delayed, or mode: sync or periodic",
        ),
        Rule(
            reads=("swap_at", "mode"),
            ok=lambda schedule: schedule.mode == "async" or schedule.swap_at == "quota",
            cel="self.mode == 'async' || self.swapAt == 'quota'",
            why="in the modes sync and periodic one version generates a whole step",
            fix="Set swapAt: quota, or mode: async",
        ),
        Rule(
            reads=("sync_every", "swap_at"),
            ok=lambda schedule: schedule.swap_at != "quota" or schedule.sync_every == 1,
            cel="self.swapAt != 'quota' || self.syncEvery == 1",
            why="with swapAt: quota every step needs a new version, so each step must publish one",
            fix="Set syncEvery: 1, or mode: async with swapAt: sequence",
        ),
        Rule(
            reads=("prefix", "swap_at"),
            ok=lambda schedule: schedule.prefix == "recompute" or schedule.swap_at == "token",
            cel="self.prefix == 'recompute' || self.swapAt == 'token'",
            why="without swapAt: token no response is running while weights change",
            fix="Set swapAt: token, or prefix: recompute",
        ),
        Rule(
            reads=("deterministic", "swap_at"),
            ok=lambda schedule: not schedule.deterministic or schedule.swap_at == "quota",
            cel="!self.deterministic || self.swapAt == 'quota'",
            why="without swapAt: quota the version that generates a sample depends on arrival times",
            fix="Set swapAt: quota, or deterministic: false",
        ),
        Rule(
            reads=("fill", "swap_at", "deterministic"),
            ok=lambda schedule: (
                schedule.fill == "order" or (schedule.swap_at != "quota" and not schedule.deterministic)
            ),
            cel="self.fill == 'order' || (self.swapAt != 'quota' && !self.deterministic)",
            why="with fill: completion samples of a step depend on arrival times; quota and deterministic forbid it",
            fix="Set swapAt: sequence or token and deterministic: false, or fill: order",
        ),
        Rule(
            reads=("require_batches", "mode"),
            ok=lambda schedule: schedule.mode != "periodic" or schedule.require_batches == 0,
            cel="self.mode != 'periodic' || self.requireBatches == 0",
            why="the mode periodic trains samples as they arrive and cannot wait for whole batches",
            fix="Set requireBatches: 0, or mode: sync",
        ),
        Rule(
            reads=("update", "swap_at"),
            ok=lambda schedule: schedule.update != "staggered" or schedule.swap_at != "quota",
            cel="!has(self.update) || self.update != 'staggered' || self.swapAt != 'quota'",
            why="with swapAt: quota one version generates a whole step, so all instances swap together",
            fix="Set swapAt: sequence or token, or update: delayed",
        ),
    )
