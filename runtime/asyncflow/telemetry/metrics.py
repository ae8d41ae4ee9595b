"""The metrics of each role: one small class a role, each metric declared in one place; and the clock of busy time.

Names are ``asyncflow_<role>_<what>``, with a unit (``_seconds``, ``_bytes``, ``_steps``, ``_ratio`` for shares of one)
where there is one, and ``_total`` for what only grows; which instance it was is no label, since the scraper adds
its name. Every class has a registry of its own, which ``rpc.http`` shows.

Busy time is the union of sections, of each cause and of all together: sections of one cause may overlap (many sequences
run at once) and nest (a forward inside a step), in one thread or in many.

Invariants: what an object counts itself (busy seconds, calls) is read from it when ``/metrics`` is asked, never copied.
No cause is ever busy longer than ``total()``, ``total()`` never longer than the time that passed, and never shorter
than any one section; a section that still runs counts up to now.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import ClassVar, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from asyncflow.errors import AsyncFlowError
from asyncflow.rpc.server import RpcCounters


class _Union:
    """Length of a union of intervals that begin and end in the order of one clock."""

    __slots__ = ("depth", "passed", "since")

    def __init__(self) -> None:
        self.depth = 0
        self.passed = 0.0
        self.since = 0.0

    def begin(self, now: float) -> None:
        if self.depth == 0:
            self.since = now
        self.depth += 1

    def end(self, now: float) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.passed += now - self.since

    def until(self, now: float) -> float:
        return self.passed + (now - self.since if self.depth else 0.0)


class BusyClock:
    """Counts busy seconds per cause: ``busy = BusyClock()``, then ``with busy("forward"): ...``. Thread-safe.

    clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._all = _Union()
        self._causes: dict[str, _Union] = {}

    @contextmanager
    def __call__(self, cause: str) -> Iterator[None]:
        """Count the body as time spent on ``cause``."""
        self.begin(cause)
        try:
            yield
        finally:
            self.end(cause)

    def begin(self, cause: str, *, since: float | None = None) -> None:
        """Begin a section that is no ``with`` block; each needs its ``end``.

        since: when it began, if that was before now, and after all other sections had ended.
        """
        with self._lock:
            now = self._clock() if since is None else since
            self._all.begin(now)
            self._causes.setdefault(cause, _Union()).begin(now)

    def end(self, cause: str) -> None:
        """End a section that ``begin`` began; ValueError where there is none."""
        with self._lock:
            union = self._causes.get(cause)
            if union is None or union.depth == 0:
                raise ValueError(f"no section {cause!r} is running")
            now = self._clock()
            union.end(now)
            self._all.end(now)

    def total(self) -> float:
        """Return the seconds so far in which at least one section of any cause ran."""
        with self._lock:
            return self._all.until(self._clock())

    def seconds(self) -> dict[str, float]:
        """Return the seconds so far of each cause; causes that overlap both count."""
        with self._lock:
            now = self._clock()
            return {cause: union.until(now) for cause, union in self._causes.items()}


_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
_STEPS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
_SERIES = ("_total", "_sum", "_count")
"""Endings of the series of a counter, and of those of a histogram that are sums."""


class _Shown(Collector):
    """A metric without labels of which the value is set as a whole; None: it has no sample."""

    family: ClassVar[type[CounterMetricFamily | GaugeMetricFamily]]

    def __init__(self, name: str, words: str, *, value: float | None = None) -> None:
        self._named = name, words
        self._value = value

    def set(self, value: float) -> None:
        """Show ``value``."""
        self._value = value

    def collect(self) -> Iterable[Metric]:
        """Yield the metric."""
        yield self.family(*self._named, value=self._value)

    def describe(self) -> Iterable[Metric]:
        """Yield the metric, by whose name a registry finds it."""
        return self.collect()


class Total(_Shown):
    """A counter whose value is kept elsewhere, and never falls: shown as ``<name>_total``."""

    family = CounterMetricFamily


class Figure(_Shown):
    """A gauge that is not shown until it has a value, because 0 would be taken for one."""

    family = GaugeMetricFamily


class RoleMetrics:
    """Metrics that all roles have in common: those of the process itself, and how to declare one of this role.

    reported: those that the driver is told with each heartbeat, and keeps with what it knows of the process
    (``lives.json``), so that they are known of a process that is gone.
    """

    role = "role"
    reported: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.refreshed: list[Callable[[], Awaitable[None]]] = []
        ProcessCollector(registry=self.registry)
        self.insecure = self.gauge("insecure", "1 where this process serves other hosts without a certificate")
        self.certificate_errors = self.total("certificate_errors", "changed certificates that could not be used")

    def figures(self) -> dict[str, float]:
        """Return the metrics that are ``reported``, and ``insecure``, by name without ``asyncflow_<role>_``.

        The label of one that has labels follows its name: ``sequences_total{length}``.
        """
        prefix = f"asyncflow_{self.role}_"
        wanted = {f"{prefix}{what}{end}" for what in (*self.reported, "insecure") for end in ("", *_SERIES)}
        found: dict[str, float] = {}
        for family in self.registry.restricted_registry(wanted).collect():
            for sample in family.samples:
                if sample.name in wanted:
                    label = f"{{{','.join(sample.labels.values())}}}" if sample.labels else ""
                    found[sample.name.removeprefix(prefix) + label] = sample.value
        return found

    def watch_busy(self, busy: BusyClock, *, what: str = "busy") -> None:
        """Show ``busy`` as ``asyncflow_<role>_<what>_seconds_total{cause}``; the cause "any" is their union."""
        self._count(
            f"{what}_seconds", "time spent on a cause", "cause", lambda: {**busy.seconds(), "any": busy.total()}
        )

    def relay(self, source: Callable[[], Awaitable[str]]) -> None:
        """Show the metrics that ``source`` returns in Prometheus' text format, asked anew whenever these are."""
        relayed = _Relayed(source)
        self.registry.register(relayed)
        self.refreshed.append(relayed.refresh)

    def watch_rpc(self, counters: RpcCounters) -> None:
        """Show the counters of this role's RPC server as ``asyncflow_<role>_rpc_*_total``."""
        for what, words, label, counts in (
            ("calls", "calls begun", "method", counters.calls),
            ("errors", "calls answered by an error", "code", counters.errors),
            ("refused", "connections and calls refused", "reason", counters.refused),
            ("dropped", "messages dropped, such as follow no protocol", "reason", counters.dropped),
        ):
            self._count(f"rpc_{what}", words, label, partial(dict, counts))
        words = "calls whose caller waited no longer"
        self._count("rpc_cancelled", words, "reason", lambda: {"deadline or cancel": counters.cancelled})

    def _count(self, what: str, words: str, label: str, counts: Callable[[], Mapping[str, float]]) -> None:
        self.registry.register(_CountCollector(f"asyncflow_{self.role}_{what}", words, label, counts))

    def gauge(self, what: str, words: str, *labels: str) -> Gauge:
        """Declare a gauge ``asyncflow_<role>_<what>``."""
        return Gauge(f"asyncflow_{self.role}_{what}", words, labels, registry=self.registry)

    def counter(self, what: str, words: str, *labels: str) -> Counter:
        """Declare a counter ``asyncflow_<role>_<what>_total``."""
        return Counter(f"asyncflow_{self.role}_{what}", words, labels, registry=self.registry)

    def total(self, what: str, words: str) -> Total:
        """Declare a counter ``asyncflow_<role>_<what>_total`` whose value is set as a whole."""
        made = Total(f"asyncflow_{self.role}_{what}", words, value=0.0)
        self.registry.register(made)
        return made

    def figure(self, what: str, words: str) -> Figure:
        """Declare a gauge ``asyncflow_<role>_<what>`` that is not shown until it is set."""
        made = Figure(f"asyncflow_{self.role}_{what}", words)
        self.registry.register(made)
        return made

    def histogram(self, what: str, words: str, *labels: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        """Declare a histogram ``asyncflow_<role>_<what>``."""
        return Histogram(f"asyncflow_{self.role}_{what}", words, labels, registry=self.registry, buckets=buckets)


class DriverMetrics(RoleMetrics):
    """The course of the training, as the driver knows it."""

    role = "driver"
    reported = ("prompts_skipped", "sink_failures")

    def __init__(self) -> None:
        super().__init__()
        self.step = self.gauge("step", "optimizer steps done")
        self.target_step = self.gauge("target_step", "optimizer steps of the job")
        self.step_seconds = self.histogram("step_seconds", "time from one optimizer step to the next")
        self.quiet = self.gauge("quiet_seconds", "time since the last step, 0 once all are made")
        self.stall_limit = self.gauge("stall_limit_seconds", "time without a step after which the job has stalled")
        self.reward_mean = self.figure("reward_mean", "mean reward of the last step's samples")
        self.reward_component = self.gauge(
            "reward_component_mean", "mean of a component of the reward, last step's samples", "component"
        )
        self.eval_accuracy = self.figure("eval_accuracy_ratio", "accuracy of the last evaluation")
        self.eval_reward = self.figure("eval_reward", "mean reward of the last evaluation's samples")
        self.eval_pass = self.gauge("eval_pass_ratio", "pass@k of the last evaluation", "k")
        self.set_accuracy = self.gauge("eval_set_accuracy_ratio", "accuracy on a named set of held-out prompts", "set")
        self.set_reward = self.gauge("eval_set_reward", "mean reward on a named set of held-out prompts", "set")
        self.set_pass = self.gauge("eval_set_pass_ratio", "pass@k on a named set of held-out prompts", "set", "k")
        self.staleness = self.histogram(
            "staleness_steps", "staleness of the trained samples in optimizer steps", "token", buckets=_STEPS
        )
        self.tokens = self.counter("tokens_trained", "tokens trained", "kind")
        self.samples = self.counter("samples", "samples by what became of them", "outcome")
        self.prompts_skipped = self.counter("prompts_skipped", "training prompts left out because they are too long")
        self.queue_rows = self.gauge("queue_rows", "rows in the queue", "state")
        self.queue_bytes = self.gauge("queue_bytes", "bytes held by the queue")
        self.idle_share = self.gauge("idle_share_ratio", "share of time in which the role did no work", "of")
        self.members = self.gauge("members", "members of the job", "of")
        self.sink_failures = self.counter("sink_failures", "ends of a sink's process by a failure", "sink")
        self.desired_rollouts = self.gauge(
            "desired_rollouts",
            "rollouts that the built-in policy would have; until it has decided, those there are",
        )

    def watch_rewards(self, outcomes: Callable[[], Mapping[str, int]]) -> None:
        """Show what became of the samples that were judged as ``asyncflow_driver_rewards_total{outcome}``."""
        self._count("rewards", "samples judged", "outcome", outcomes)

    def watch_groups(self, alike: Callable[[], Mapping[str, int]]) -> None:
        """Show groups of equal rewards as ``asyncflow_driver_equal_groups_total{all}``."""
        self._count("equal_groups", "groups of equal rewards, by whether all were right or wrong", "all", alike)


class ControllerMetrics(RoleMetrics):
    """The queue as its controller sees it."""

    role = "controller"
    reported = ("lease_timeouts", "redeliveries", "ledger_syncs", "ledger_sync_seconds")

    def __init__(self) -> None:
        super().__init__()
        self.rows = self.gauge("rows", "rows by task and state", "task", "state")
        self.parked = self.gauge("parked_claims", "claims that wait", "task")
        self.lease_expiries = self.total("lease_expiries", "leases that ended without an answer")
        self.lease_timeouts = self.total("lease_timeouts", "those whose holder was there, and did not renew them")
        self.redeliveries = self.total("redeliveries", "rows given out again")
        self.fenced_writes = self.total("fenced_writes", "writes refused as too late")
        self.ledger_bytes = self.gauge("ledger_bytes", "size of the ledger")
        self.ledger_syncs = self.total("ledger_syncs", "times that the ledger was brought to the disk")
        self.ledger_sync_seconds = self.total("ledger_sync_seconds", "time that this took together")
        self.ledger_lag = self.gauge("ledger_lag_seconds", "age of the oldest change that is not as safe as it will be")
        self.unit_rows = self.gauge(
            "unit_rows", "rows by storage unit, those still to be moved where it leaves", "unit", "state"
        )
        self.silence = self.gauge(
            "silence_seconds", "time for which a controller has not asked the first one what happened", "controller"
        )
        self.unready = self.gauge(
            "oldest_unready_seconds",
            "age of the oldest row that is not ready, and a column that it lacks",
            "task",
            "lacks",
        )


class StorageMetrics(RoleMetrics):
    """One storage unit."""

    role = "storage"
    reported = ("limit_bytes", "budget_waits", "budget_waited_seconds")

    def __init__(self) -> None:
        super().__init__()
        self.held = self.gauge("held_bytes", "bytes of cells held")
        self.limit = self.gauge("limit_bytes", "bytes of cells allowed")
        self.put = self.total("put_bytes", "bytes written")
        self.fetched = self.total("fetched_bytes", "bytes read")
        self.rows = self.gauge("rows", "rows held")
        self.moved = self.total("moved_rows", "rows taken to other units")
        self.to_move = self.gauge("leaving_rows", "rows still to be taken to other units; 0 unless it leaves")
        self.waiting = self.gauge("waiting_puts", "puts that wait for room")
        self.budget_waits = self.total("budget_waits", "puts that had to wait for room")
        self.budget_waited = self.total("budget_waited_seconds", "time that puts waited for room")


class PulledVersion(Protocol):
    """A version that was pulled: what is counted of a ``weights.transfer.TransferRecord``."""

    @property
    def started(self) -> float:
        """When it began, in seconds of a monotonic clock."""

    @property
    def finished(self) -> float:
        """When it ended."""

    @property
    def fallbacks(self) -> int:
        """Pulls of it that went over the host network instead."""

    @property
    def sent(self) -> int:
        """Bytes that travelled for it."""


class LoadingMetrics(RoleMetrics):
    """An engine that is given one version of the weights after another."""

    def __init__(self) -> None:
        super().__init__()
        self.version_step = self.gauge("version_step", "optimizer step of the weights in use")
        self.swaps = self.counter("swaps", "changes of weights")
        self.swap_seconds = self.histogram("swap_seconds", "time that generation stood still for a change of weights")
        self.stage_seconds = self.histogram("stage_seconds", "time to bring a version beside the running model")
        self.pull_seconds = self.histogram("pull_seconds", "time to pull a version into host memory")
        self.pull_fallbacks = self.counter("pull_fallbacks", "pulls that went over the host network instead")
        self.pulled = self.counter("pulled_bytes", "bytes of versions that came from other processes")
        self.probe_gap = self.figure(
            "probe_gap", "largest difference of the engine's log-probs to those published with its weights, last swap"
        )

    def count_pull(self, record: PulledVersion) -> None:
        """Count a version that was pulled."""
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
        self.inflight = self.gauge("inflight_sequences", "sequences in generation")
        self.sequences = self.counter("sequences", "sequences ended", "finish")
        self.tokens = self.total("tokens_generated", "tokens generated")
        self.stale = self.total("tokens_on_kept_prefix", "tokens made behind keys and values of older weights")
        self.unsaved = self.gauge("unsaved_tokens", "tokens made here that are neither delivered nor saved")
        self.taken_over = self.counter("tokens_taken_over", "tokens that another rollout made of responses ended here")
        self.reward_seconds = self.histogram("reward_seconds", "time to score one sample")
        self.rewards_failed = self.counter("rewards_failed", "samples that got no reward", "failure")


class WorkerMetrics(RoleMetrics):
    """One process of a task that is a role of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = self.counter("rows", "rows by what became of them", "outcome")
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
    """The critic, where it is a role of its own."""

    role = "critic"


class TrainerMetrics(RoleMetrics):
    """One trainer rank."""

    role = "trainer"

    def __init__(self) -> None:
        super().__init__()
        self.step = self.gauge("step", "optimizer steps done")
        self.loss = self.figure("loss", "loss of the last step")
        self.grad_norm = self.figure("grad_norm", "norm of the last gradient before clipping")
        self.approx_kl = self.figure("approx_kl", "estimate of the KL divergence from the sampling policy, last step")
        self.correction = self.gauge(
            "correction", "importance weights of algorithm.correction, last step: a figure of metrics.jsonl", "figure"
        )
        self.tokens = self.counter("tokens_trained", "tokens trained", "kind")
        self.steps_skipped = self.counter("steps_skipped", "optimizer steps left out: their gradient was not finite")
        self.wait_seconds = self.histogram("wait_seconds", "time a slot was waited for")
        self.publish_seconds = self.histogram("publish_seconds", "time to publish a version, beside the training")
        self.checkpoint_seconds = self.histogram("checkpoint_seconds", "time to write a checkpoint, beside training")
        self.checkpoint_failures = self.counter("checkpoint_failures", "checkpoints put off by the disk")


class _Relayed(Collector):
    """The metrics of another process, as they were when ``refresh`` was called last."""

    def __init__(self, source: Callable[[], Awaitable[str]]) -> None:
        self._source = source
        self._text = ""

    async def refresh(self) -> None:
        """Fetch the metrics of the other process; while it does not answer it has none."""
        text = ""
        with suppress(AsyncFlowError):
            text = await self._source()
        self._text = text

    def collect(self) -> Iterable[Metric]:
        yield from text_string_to_metric_families(self._text)


def by_rank(texts: Mapping[str, str]) -> CollectorRegistry:
    """Return the metrics of several ranks as those of one process: each sample has its rank as the label ``rank``.

    texts: by rank, what it answers at ``/metrics``, in Prometheus' text format.
    """
    families: dict[str, Metric] = {}
    for rank, text in texts.items():
        for family in text_string_to_metric_families(text):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.add_sample(sample.name, {**sample.labels, "rank": rank}, sample.value)
    registry = CollectorRegistry()
    registry.register(_Families(families.values()))
    return registry


class _Families(Collector):
    """Families that are there already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class _CountCollector(Collector):
    """A counter with one label whose values are kept elsewhere."""

    def __init__(self, name: str, words: str, label: str, counts: Callable[[], Mapping[str, float]]) -> None:
        self._describe = (name, words, label)
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        name, words, label = self._describe
        family = CounterMetricFamily(name, words, labels=[label])
        for value, count in self._counts().items():
            family.add_metric([value], count)
        yield family
