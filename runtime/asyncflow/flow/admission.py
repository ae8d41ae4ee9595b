"""Admission of prompts: how many more may be dispatched now.

One policy, one formula. They are combined by taking the smallest allowance (``admit``), so each can only make a run
more cautious, never less.

Invariant: ``BoundedLag`` never lets a prompt of step k out before θ_{k-1-η} is published.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from asyncflow.api.job import RLJobSpec
    from asyncflow.api.schedule import ScheduleSpec


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """Counts by which an admission policy decides; all in prompts but ``published``.

    published: step of the newest published version. dispatched: prompts given out that were not filtered or dropped.
    running: dispatched whose responses are not complete.
    """

    published: int
    dispatched: int
    running: int


class Admission(Protocol):
    """A rule for dispatching prompts."""

    def allowance(self, flow: InFlight) -> int:
        """Return how many more prompts may be dispatched; negative counts as none."""


@dataclass(frozen=True, kw_only=True)
class BoundedLag:
    """AReaL's capacity, (η + v + 1)·B - (accepted + running), without its concurrency term.

    With a publication each K steps nothing stands still as long as η >= K - 1, which ``validate`` demands.
    Source: inclusionAI/AReaL ``staleness_manager``. Counting accepted prompts by the ledger, and not by a counter that
    a restart forgets, is what keeps a recovered run from dispatching a burst (AReaL #1388).
    """

    prompts_per_step: int
    lag: int
    steps: int

    def allowance(self, flow: InFlight) -> int:
        """Return the prompts that may still go out under the newest published version."""
        last_step = min(self.lag + flow.published + 1, self.steps)
        return last_step * self.prompts_per_step - flow.dispatched


@dataclass(frozen=True, kw_only=True)
class Concurrency:
    """At most so many prompts generating at once."""

    limit: int

    def allowance(self, flow: InFlight) -> int:
        """Return the free places."""
        return self.limit - flow.running


@dataclass(frozen=True, kw_only=True)
class StalenessThreshold:
    """verl fully_async: between two publications at most (1+τ)·R·K prompts, those in flight at the first counted in.

    prompts_per_step: R. sync_every: K, ``trigger_parameter_sync_step``. threshold: τ, ``staleness_threshold``.
    verl resets its counter ``staleness_samples`` at a publication to what is in flight then; here everything consumed
    before the publication is p·R with p the published step, which gives the same sum without a counter.
    """

    prompts_per_step: int
    sync_every: int
    threshold: float

    def allowance(self, flow: InFlight) -> int:
        """Return max_required_samples - staleness_samples."""
        limit = int(self.prompts_per_step * (1 + self.threshold) * self.sync_every)
        return limit - (flow.dispatched - flow.published * self.prompts_per_step)


def admission_of(spec: RLJobSpec) -> list[Admission]:
    """Return the rules that a manifest asks for."""
    algorithm = spec.algorithm
    return admission_by(spec.schedule, prompts_per_step=algorithm.prompts_per_step, steps=algorithm.steps)


def admission_by(schedule: ScheduleSpec, *, prompts_per_step: int, steps: int) -> list[Admission]:
    """Return the rules of a job of so many steps; quotas admit whole steps, so verl's fraction is not theirs."""
    policies: list[Admission] = [BoundedLag(prompts_per_step=prompts_per_step, lag=schedule.lag, steps=steps)]
    if schedule.swap_at != "quota":
        threshold = StalenessThreshold(
            prompts_per_step=prompts_per_step,
            sync_every=schedule.sync_every,
            threshold=schedule.staleness_threshold,
        )
        policies.append(threshold)
    if schedule.max_inflight is not None:
        policies.append(Concurrency(limit=schedule.max_inflight))
    return policies


def admit(policies: Iterable[Admission], flow: InFlight) -> int:
    """Return how many prompts may be dispatched now under all policies, at least 0."""
    return max(0, min(policy.allowance(flow) for policy in policies))
