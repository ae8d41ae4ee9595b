"""Admission of prompts: policies that say how many more prompts may be dispatched now.

Each policy is one formula. ``admit`` takes the smallest allowance of all policies, so a further policy can only reduce
the number of admitted prompts.

Invariant: ``BoundedLag`` never admits a prompt of step k before θ_{k-1-η} is published.
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
    """Input of the admission policies; all fields except ``published`` count prompts.

    published: step of the newest published version. dispatched: issued prompts that were not filtered or dropped.
    running: issued prompts whose groups are not decided yet.
    """

    published: int
    dispatched: int
    running: int


class Admission(Protocol):
    """An admission policy."""

    def allowance(self, flow: InFlight) -> int:
        """Return the number of further prompts that may be dispatched; a negative number means none."""


@dataclass(frozen=True, kw_only=True)
class BoundedLag:
    """AReaL's capacity, (η + v + 1)·B - (accepted + running), without its concurrency term.

    With a publication every K steps the run never blocks if η >= K - 1, which ``validate`` requires.
    Source: inclusionAI/AReaL ``staleness_manager``. Accepted prompts are counted from the ledger, not by a counter in
    memory that a restart resets, so a recovered run does not dispatch a burst of prompts (AReaL #1388).
    """

    prompts_per_step: int
    lag: int
    steps: int

    def allowance(self, flow: InFlight) -> int:
        """Return the number of further prompts that the newest published version allows."""
        last_step = min(self.lag + flow.published + 1, self.steps)
        return last_step * self.prompts_per_step - flow.dispatched


@dataclass(frozen=True, kw_only=True)
class Concurrency:
    """A limit on the number of prompts that are generated at the same time."""

    limit: int

    def allowance(self, flow: InFlight) -> int:
        """Return the limit less the running prompts."""
        return self.limit - flow.running


@dataclass(frozen=True, kw_only=True)
class StalenessThreshold:
    """verl's fully_async limit: at most (1+τ)·R·K prompts per publication, including those in flight at the last one.

    prompts_per_step: R. sync_every: K, ``trigger_parameter_sync_step``. threshold: τ, ``staleness_threshold``.
    At a publication verl resets its counter ``staleness_samples`` to the number of samples in flight. Here, p·R prompts
    were consumed before the publication of step p, which gives the same result without a counter.
    """

    prompts_per_step: int
    sync_every: int
    threshold: float

    def allowance(self, flow: InFlight) -> int:
        """Return max_required_samples - staleness_samples."""
        limit = int(self.prompts_per_step * (1 + self.threshold) * self.sync_every)
        return limit - (flow.dispatched - flow.published * self.prompts_per_step)


def admission_of(spec: RLJobSpec) -> list[Admission]:
    """Return the policies of a manifest."""
    algorithm = spec.algorithm
    return admission_by(spec.schedule, prompts_per_step=algorithm.prompts_per_step, steps=algorithm.steps)


def admission_by(schedule: ScheduleSpec, *, prompts_per_step: int, steps: int) -> list[Admission]:
    """Return the policies of a job; ``swapAt: quota`` admits whole steps, so verl's threshold does not apply to it."""
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
    """Return the number of prompts that all policies allow now, at least 0."""
    return max(0, min(policy.allowance(flow) for policy in policies))
