"""The driver's Prometheus metrics, drawn from what ``/v1/status`` says.

Invariant: no figure has two definitions: what Prometheus scrapes is what a person reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncflow.api.status import DriverStatus
from asyncflow.queue.protocol.messages import QueueStats
from asyncflow.telemetry.metrics import DriverMetrics


def show(metrics: DriverMetrics, status: DriverStatus, *, stats: QueueStats, members: Mapping[str, int]) -> None:
    """Set the gauges."""
    metrics.step.set(status.step)
    metrics.target_step.set(status.steps)
    if status.reward is not None:
        metrics.reward_mean.set(status.reward)
    if status.eval is not None:
        metrics.eval_accuracy.set(status.eval)
    if status.eval_reward is not None:
        metrics.eval_reward.set(status.eval_reward)
    for k, passing in status.eval_pass_at.items():
        metrics.eval_pass.labels(k).set(passing)
    for name, each in status.eval_sets.items():
        metrics.set_accuracy.labels(name).set(each.accuracy)
        if each.reward is not None:
            metrics.set_reward.labels(name).set(each.reward)
        for k, passing in each.pass_at.items():
            metrics.set_pass.labels(name, k).set(passing)
    for task, count in stats.ready.items():
        metrics.queue_rows.labels(f"ready {task}").set(count)
    for state, count in (("staged", stats.staged), ("live", stats.live), ("wanted", stats.wanted)):
        metrics.queue_rows.labels(state).set(count)
    metrics.queue_bytes.set(stats.bytes)
    for role, share in status.idle_share.items():
        metrics.idle_share.labels(role).set(share)
    for role, count in members.items():
        metrics.members.labels(role).set(count)


def count_step(metrics: DriverMetrics, line: Mapping[str, Any]) -> None:
    """Count one optimizer step, a line of ``metrics.jsonl``."""
    metrics.step_seconds.observe(line["wall_s"])
    metrics.staleness.labels("oldest").observe(line["staleness_start_max"])
    metrics.staleness.labels("newest").observe(line["staleness_end_max"])
    metrics.tokens.labels("prompt").inc(line["tokens"] - line["response_tokens"])
    metrics.tokens.labels("response").inc(line["response_tokens"])
    metrics.samples.labels("trained").inc(line["samples"])
