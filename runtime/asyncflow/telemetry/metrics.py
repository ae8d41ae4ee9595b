"""The metrics of each role, declared in one class per role.

Names are ``asyncflow_<role>_<what>``, with a unit if there is one (``_seconds``, ``_bytes``, ``_steps``, ``_ratio`` for
shares of one), and ``_total`` for counters. The instance is not a label, since the scraper adds its name. Every object
has its own registry, which ``rpc.http`` exports.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import ClassVar, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from asyncflow.rpc.server import RpcCounters
from asyncflow.telemetry.busy import BusyClock
from asyncflow.telemetry.collectors import Figure, LabelledTotal, Relayed, Total

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
_STEPS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
_SERIES = ("_total", "_sum", "_count")
"""Suffixes of the series of counters, and of the sums of histograms."""


class RoleMetrics:
    """Metrics that all roles have: metrics of the process, and methods to declare those of a role.

    reported: names of the metrics that the driver receives with each heartbeat, and stores with its other data about
    the process (``lives.json``), so that they remain known after the process has ended.
    """

    role = "role"
    reported: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.refreshed: list[Callable[[], Awaitable[None]]] = []
        ProcessCollector(registry=self.registry)
        self.insecure = self.gauge("insecure", "1 if the process serves other hosts without a certificate")
        self.certificate_errors = self.total(
            "certificate_errors", "failed attempts to read changed certificate files; the last valid ones stay in use"
        )

    def figures(self) -> dict[str, float]:
        """Return the ``reported`` metrics and ``insecure``, by name without ``asyncflow_<role>_``.

        Labels are appended to the name: ``sequences_total{length}``.
        """
        prefix = f"asyncflow_{self.role}_"
        names = {f"{prefix}{what}{end}" for what in (*self.reported, "insecure") for end in ("", *_SERIES)}
        found: dict[str, float] = {}
        for family in self.registry.restricted_registry(names).collect():
            for sample in family.samples:
                if sample.name in names:
                    label = f"{{{','.join(sample.labels.values())}}}" if sample.labels else ""
                    found[sample.name.removeprefix(prefix) + label] = sample.value
        return found

    def watch_busy(self, busy: BusyClock, *, what: str = "busy") -> None:
        """Export ``busy`` as ``asyncflow_<role>_<what>_seconds_total{cause}``; the cause "any" is the union of all."""
        words = f"time in which the process was {what}, by cause; the cause any is the union of all causes"
        self._count(f"{what}_seconds", words, "cause", lambda: {**busy.seconds(), "any": busy.total()})

    def relay(self, source: Callable[[], Awaitable[str]]) -> None:
        """Export the metrics that ``source`` returns in Prometheus' text format; it is called for each request."""
        relayed = Relayed(source)
        self.registry.register(relayed)
        self.refreshed.append(relayed.refresh)

    def watch_rpc(self, counters: RpcCounters) -> None:
        """Export the counters of this role's RPC server as ``asyncflow_<role>_rpc_*_total``."""
        for what, words, label, counts in (
            ("calls", "calls started", "method", counters.calls),
            ("errors", "calls answered with an error", "code", counters.errors),
            (
                "refused",
                "connections refused or closed, and calls that the caller may not make",
                "reason",
                counters.refused,
            ),
            ("dropped", "messages dropped, for example because they cannot be decoded", "reason", counters.dropped),
        ):
            self._count(f"rpc_{what}", words, label, partial(dict, counts))
        words = "calls whose caller no longer waited"
        self._count("rpc_cancelled", words, "reason", lambda: {"deadline or cancel": counters.cancelled})

    def _count(self, what: str, words: str, label: str, counts: Callable[[], Mapping[str, float]]) -> None:
        self.registry.register(LabelledTotal(f"asyncflow_{self.role}_{what}", words, label, counts))

    def gauge(self, what: str, words: str, *labels: str) -> Gauge:
        """Declare a gauge ``asyncflow_<role>_<what>``."""
        return Gauge(f"asyncflow_{self.role}_{what}", words, labels, registry=self.registry)

    def counter(self, what: str, words: str, *labels: str) -> Counter:
        """Declare a counter ``asyncflow_<role>_<what>_total``."""
        return Counter(f"asyncflow_{self.role}_{what}", words, labels, registry=self.registry)

    def total(self, what: str, words: str) -> Total:
        """Declare a counter ``asyncflow_<role>_<what>_total`` whose value is set as a whole."""
        metric = Total(f"asyncflow_{self.role}_{what}", words, value=0.0)
        self.registry.register(metric)
        return metric

    def figure(self, what: str, words: str) -> Figure:
        """Declare a gauge ``asyncflow_<role>_<what>`` that has no sample until it is set."""
        metric = Figure(f"asyncflow_{self.role}_{what}", words)
        self.registry.register(metric)
        return metric

    def histogram(self, what: str, words: str, *labels: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        """Declare a histogram ``asyncflow_<role>_<what>``."""
        return Histogram(f"asyncflow_{self.role}_{what}", words, labels, registry=self.registry, buckets=buckets)


class DriverMetrics(RoleMetrics):
    """The driver: the progress of the training."""

    role = "driver"
    reported = ("prompts_skipped", "sink_failures")

    def __init__(self) -> None:
        super().__init__()
        self.step = self.gauge("step", "completed optimizer steps")
        self.target_step = self.gauge("target_step", "optimizer steps of the whole job")
        self.step_seconds = self.histogram("step_seconds", "time from one optimizer step to the next")
        self.quiet = self.gauge("quiet_seconds", "time since the last step, 0 after the final step")
        self.stall_limit = self.gauge(
            "stall_limit_seconds", "longest time without a step that the job allows (limits.stallSeconds)"
        )
        self.reward_mean = self.figure("reward_mean", "mean reward of the last step's samples")
        self.reward_component = self.gauge(
            "reward_component_mean", "mean of a component of the reward over the last step's samples", "component"
        )
        self.eval_accuracy = self.figure("eval_accuracy_ratio", "accuracy of the last evaluation")
        self.eval_reward = self.figure("eval_reward", "mean reward of the last evaluation's samples")
        self.eval_pass = self.gauge("eval_pass_ratio", "pass@k of the last evaluation", "k")
        self.set_accuracy = self.gauge(
            "eval_set_accuracy_ratio", "accuracy on a named set of held-out prompts, last evaluation", "set"
        )
        self.set_reward = self.gauge(
            "eval_set_reward", "mean reward on a named set of held-out prompts, last evaluation", "set"
        )
        self.set_pass = self.gauge(
            "eval_set_pass_ratio", "pass@k on a named set of held-out prompts, last evaluation", "set", "k"
        )
        self.staleness = self.histogram(
            "staleness_steps",
            "largest staleness in a step, of the oldest and of the newest token of a sample",
            "token",
            buckets=_STEPS,
        )
        self.tokens = self.counter("tokens_trained", "tokens trained: prompt, response, observation", "kind")
        self.samples = self.counter("samples", "samples that were trained (outcome trained)", "outcome")
        self.prompts_skipped = self.counter(
            "prompts_skipped", "training prompts that were skipped because they are too long"
        )
        self.queue_rows = self.gauge(
            "queue_rows",
            "rows: ready for each task (ready TASK), staged for a checkpoint, live, or lost and wanted again",
            "state",
        )
        self.queue_bytes = self.gauge("queue_bytes", "bytes stored in the queue")
        self.idle_share = self.gauge("idle_share_ratio", "share of time in which a role had no work", "of")
        self.members = self.gauge("members", "processes of the job, by role", "of")
        self.sink_failures = self.counter("sink_failures", "failures of a sink's process", "sink")
        self.desired_rollouts = self.gauge(
            "desired_rollouts",
            "rollouts that the built-in policy recommends, before any limits; at first the current number",
        )

    def watch_rewards(self, outcomes: Callable[[], Mapping[str, int]]) -> None:
        """Export the number of judged samples by outcome as ``asyncflow_driver_rewards_total{outcome}``."""
        self._count("rewards", "samples that were scored; samples without a reward, by failure", "outcome", outcomes)

    def watch_groups(self, alike: Callable[[], Mapping[str, int]]) -> None:
        """Export groups with equal rewards as ``asyncflow_driver_equal_groups_total{all}``."""
        self._count(
            "equal_groups",
            "groups with equal rewards, dropped or not: right (at least evaluation.passReward) or wrong",
            "all",
            alike,
        )


class ControllerMetrics(RoleMetrics):
    """The controller: the state of the queue."""

    role = "controller"
    reported = ("lease_timeouts", "redeliveries", "ledger_syncs", "ledger_sync_seconds")

    def __init__(self) -> None:
        super().__init__()
        self.rows = self.gauge(
            "rows",
            "rows by task: ready, leased; in total: live, staged, committed; none for closed or cleared partitions "
            "without work",
            "task",
            "state",
        )
        self.parked = self.gauge("parked_claims", "claims that wait for rows", "task")
        self.lease_expiries = self.total("lease_expiries", "leases that ended without an acknowledgement")
        self.lease_timeouts = self.total(
            "lease_timeouts", "ended leases whose holder was connected but did not renew them in time"
        )
        self.redeliveries = self.total("redeliveries", "rows leased again")
        self.fenced_writes = self.total("fenced_writes", "writes refused because their lease had ended")
        self.ledger_bytes = self.gauge("ledger_bytes", "size of the ledger")
        self.ledger_syncs = self.total(
            "ledger_syncs", "syncs of the ledger to disk (storage.ledger.sync: interval or always)"
        )
        self.ledger_sync_seconds = self.total(
            "ledger_sync_seconds", "total duration of the syncs of the ledger to disk"
        )
        self.ledger_lag = self.gauge(
            "ledger_lag_seconds", "age of the oldest event that is not yet synchronised to disk as configured"
        )
        self.unit_rows = self.gauge(
            "unit_rows",
            "rows by storage unit and its state; for a leaving unit the rows that it still has to move",
            "unit",
            "state",
        )
        self.silence = self.gauge(
            "silence_seconds", "time since a replica controller last requested changes from this primary", "controller"
        )
        self.unready = self.gauge(
            "oldest_unready_seconds",
            "age of the oldest row that a task waits for, and a column that the row lacks",
            "task",
            "lacks",
        )


class StorageMetrics(RoleMetrics):
    """One storage unit."""

    role = "storage"
    reported = ("limit_bytes", "budget_waits", "budget_waited_seconds")

    def __init__(self) -> None:
        super().__init__()
        self.held = self.gauge("held_bytes", "stored bytes")
        self.limit = self.gauge("limit_bytes", "most bytes that may be stored")
        self.put = self.total("put_bytes", "bytes put")
        self.fetched = self.total("fetched_bytes", "bytes fetched")
        self.rows = self.gauge("rows", "stored rows")
        self.moved = self.total("moved_rows", "rows moved to other units")
        self.to_move = self.gauge("leaving_rows", "rows that a leaving unit still has to move; 0 unless it leaves")
        self.waiting = self.gauge("waiting_puts", "puts that wait for room")
        self.budget_waits = self.total("budget_waits", "puts that had to wait for room")
        self.budget_waited = self.total("budget_waited_seconds", "total time for which puts waited for room")


class PulledVersion(Protocol):
    """A pulled version: the counted fields of a ``weights.transfer.TransferRecord``."""

    @property
    def started(self) -> float:
        """Start of the pull, in seconds of a monotonic clock."""

    @property
    def finished(self) -> float:
        """End of the pull."""

    @property
    def fallbacks(self) -> int:
        """Number of its transfers that used the host network instead of a faster transport."""

    @property
    def sent(self) -> int:
        """Bytes transferred for it."""


class LoadingMetrics(RoleMetrics):
    """Metrics of an engine that loads versions of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.version_step = self.gauge("version_step", "optimizer step of the weights in use")
        self.swaps = self.counter("swaps", "changes of weights")
        self.swap_seconds = self.histogram("swap_seconds", "time for which a change of weights paused generation")
        self.stage_seconds = self.histogram("stage_seconds", "time to load a version next to the running model")
        self.pull_seconds = self.histogram("pull_seconds", "time to pull a version into host memory")
        self.pull_fallbacks = self.counter(
            "pull_fallbacks", "pulls that used the host network because a faster transport failed"
        )
        self.pulled = self.counter("pulled_bytes", "bytes received from other processes for versions, as transferred")
        self.probe_gap = self.figure(
            "probe_gap",
            "largest difference of the engine's log-probs from those published with its weights, at the last swap",
        )

    def count_pull(self, record: PulledVersion) -> None:
        """Count a pulled version."""
        self.pull_seconds.observe(record.finished - record.started)
        self.pull_fallbacks.inc(record.fallbacks)
        self.pulled.inc(record.sent)


class PublisherMetrics(RoleMetrics):
    """The publisher of a model that no job trains."""

    role = "publisher"

    def __init__(self) -> None:
        super().__init__()
        self.version_step = self.gauge("version_step", "number of the newest published version")
        self.publish_seconds = self.histogram("publish_seconds", "time to read, digest and announce a version")


class FollowerMetrics(LoadingMetrics):
    """One follower."""

    role = "follower"


class RolloutMetrics(LoadingMetrics):
    """One rollout instance."""

    role = "rollout"
    reported = ("sequences", "swap_seconds", "pull_seconds", "pull_fallbacks", "pulled_bytes", "reward_seconds")

    def __init__(self) -> None:
        super().__init__()
        self.inflight = self.gauge("inflight_sequences", "sequences being generated")
        self.sequences = self.counter("sequences", "ended sequences, by the reason of their end", "finish")
        self.tokens = self.total(
            "tokens_generated",
            "generated tokens, including those of running responses and of responses that were handed on",
        )
        self.stale = self.total(
            "tokens_on_kept_prefix",
            "tokens generated after keys and values of older weights (prefix: keep), at least of ended responses",
        )
        self.unsaved = self.gauge(
            "unsaved_tokens",
            "tokens neither delivered nor saved, which would be generated again if this process were killed now",
        )
        self.taken_over = self.counter(
            "tokens_taken_over", "tokens that other rollouts generated for responses that ended here"
        )
        self.reward_seconds = self.histogram("reward_seconds", "time to score one sample")
        self.rewards_failed = self.counter("rewards_failed", "samples that got no reward", "failure")


class WorkerMetrics(RoleMetrics):
    """One process of a task with a role of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = self.counter(
            "rows",
            "rows: done; without a result, by failure; retried; lost (their leases had ended)",
            "outcome",
        )
        self.batch_seconds = self.histogram("batch_seconds", "time to compute one batch of rows")


class TaskMetrics(WorkerMetrics):
    """One process of a user's task."""

    role = "task"


class RewardMetrics(WorkerMetrics):
    """One process of the reward."""

    role = "reward"


class ReferenceMetrics(WorkerMetrics):
    """One process of the reference model."""

    role = "reference"


class CriticMetrics(RoleMetrics):
    """The critic, if it is a role of its own."""

    role = "critic"


class TrainerMetrics(RoleMetrics):
    """One trainer rank."""

    role = "trainer"

    def __init__(self) -> None:
        super().__init__()
        self.step = self.gauge("step", "completed optimizer steps")
        self.loss = self.figure("loss", "loss of the last step")
        self.grad_norm = self.figure("grad_norm", "norm of the gradient before clipping, last step")
        self.approx_kl = self.figure(
            "approx_kl", "estimate of the KL divergence of the trainer's weights from the sampler's, last step"
        )
        self.correction = self.gauge(
            "correction",
            "importance weights of algorithm.correction, last step: the field correction_FIGURE of metrics.jsonl",
            "figure",
        )
        self.tokens = self.counter("tokens_trained", "tokens trained: prompt, response, observation", "kind")
        self.steps_skipped = self.counter("steps_skipped", "steps skipped because their gradient was not finite")
        self.wait_seconds = self.histogram("wait_seconds", "time that the trainer waited for a slot")
        self.publish_seconds = self.histogram(
            "publish_seconds", "time to publish a version, concurrently with training"
        )
        self.checkpoint_seconds = self.histogram(
            "checkpoint_seconds", "time to write a checkpoint, concurrently with training"
        )
        self.checkpoint_failures = self.counter(
            "checkpoint_failures", "failed writes of checkpoints, which are retried"
        )
