"""Telemetry of the operator: metrics, log records as JSON lines, and the HTTP server for metrics and health.

Invariants: every metric is declared here, once, as ``asyncflow_operator_*``. A label has few values, so the number of
series does not grow with the number of jobs: a metric that names objects has series for ``MOST_NAMED`` of them, those
that need attention most. A log line is one JSON object with the time, level, logger, event and the object concerned.
The process is healthy if a restart would not help: the event loop runs, objects are processed, and the watches receive
messages or retry. An unreachable or slow API server does not make this process unhealthy; the metrics show it.
"""

from __future__ import annotations

import asyncio
import collections
import json
import logging
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final, Never, TextIO, get_args

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder

from asyncflow.api.names import kind_of_role
from asyncflow.api.status import Phase
from asyncflow.errors import Refused
from asyncflow.plan import plan
from asyncflow_operator.cluster.kinds import CUSTOM_KINDS, POD, QUEUE, RLJOB, SYNC
from asyncflow_operator.cluster.owners import CustomResource
from asyncflow_operator.cluster.store import ObjectStore
from asyncflow_operator.decide.progress import ACTIVE
from asyncflow_operator.references import Key

_SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
MOST_NAMED: Final = 50
"""Most series of a metric that names objects."""
MOST_LAG_S: Final = 10.0
MOST_STUCK_S: Final = 300.0
_TICK_S: Final = 1.0


class Metrics:
    """The operator's metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.reconciles = self._counter("reconciles", "reconciles by kind of object and outcome", "kind", "outcome")
        self.reconcile_seconds = self._histogram(
            "reconcile_seconds", "time of a reconcile, including its writes", "kind"
        )
        self.decide_seconds = self._histogram("decide_seconds", "processor time of a decision", "kind")
        self.wait_seconds = self._histogram("wait_seconds", "time that a due object waited for its reconcile")
        self.worklist = self._gauge("worklist_count", "waiting objects, including those that are due later")
        self.oldest_seconds = self._gauge("worklist_oldest_seconds", "longest waiting time of a due object")
        self.objects = self._gauge("objects_count", "objects of the three kinds", "kind")
        self.jobs = self._gauge("jobs_count", "jobs, by phase", "phase")
        self.job_failed = self._gauge(
            "job_failed_flag", f"1 for each of the {MOST_NAMED} jobs that failed last", "job_namespace", "rljob"
        )
        self.jobs_stalled = self._gauge("jobs_stalled_count", "jobs without progress")
        self.degraded = self._gauge(
            "degraded_flag",
            f"1 for each of the {MOST_NAMED} TransferQueues and WeightSyncs without a job that were degraded last",
            "kind",
            "object_namespace",
            "object",
        )
        self.pods = self._gauge("pods_count", "pods, by role and phase", "role", "phase")
        self.budget_used = self._gauge(
            "restart_budget_used_ratio",
            f"used share of a role's restart budget, for the {MOST_NAMED} largest; no series without restarts",
            "job_namespace",
            "rljob",
            "role",
        )
        self.failing = self._gauge(
            "failing_seconds",
            f"time for which the reconciliation of an object has failed, for the {MOST_NAMED} longest",
            "kind",
            "object_namespace",
            "object",
        )
        self.actions = self._counter("actions", "executed actions", "action", "outcome")
        self.api_requests = self._counter("api_requests", "requests to the API server", "verb", "resource", "code")
        self.api_seconds = self._histogram("api_seconds", "duration of a request to the API server", "verb")
        self.probes = self._counter("probes", "requests for the status of drivers", "outcome")
        self.probe_seconds = self._histogram("probe_seconds", "duration of a request for the status of a driver")
        self.leads = self._gauge("leads_flag", "1 in the leading replica")
        self.loop_lag = self._gauge("loop_lag_seconds", "delay of the event loop at the last measurement")
        self.watch_age = self._gauge(
            "watch_age_seconds", "time since the last message, for the watch that was silent longest"
        )

    def reconciled(self, kind: str, outcome: str, seconds: float) -> None:
        """Count one reconcile."""
        self.reconciles.labels(kind, outcome).inc()
        self.reconcile_seconds.labels(kind).observe(seconds)

    def acted(self, action: str, outcome: str) -> None:
        """Count one action."""
        self.actions.labels(action, outcome).inc()

    def answered(self, verb: str, resource: str, code: str, seconds: float) -> None:
        """Count one call to the API server."""
        self.api_requests.labels(verb, resource, code).inc()
        self.api_seconds.labels(verb).observe(seconds)

    def probed(self, outcome: str, seconds: float) -> None:
        """Count one status request to a driver."""
        self.probes.labels(outcome).inc()
        self.probe_seconds.observe(seconds)

    def _gauge(self, name: str, help_text: str, *labels: str) -> Gauge:
        return Gauge(f"asyncflow_operator_{name}", help_text, labels, registry=self.registry)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"asyncflow_operator_{name}", help_text, labels, registry=self.registry)

    def _histogram(self, name: str, help_text: str, *labels: str) -> Histogram:
        return Histogram(f"asyncflow_operator_{name}", help_text, labels, registry=self.registry, buckets=_SECONDS)


class JsonLogFormatter(logging.Formatter):
    """Formatter that writes each record as one JSON object; the keys of ``extra`` become its fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line: dict[str, Any] = {"at": at, "level": record.levelname, "logger": record.name, "what": record.getMessage()}
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD and not key.startswith("_")}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def setup_logging(level: str, *, stream: TextIO | None = None) -> None:
    """Send log records to ``stream`` (stderr): the operator's from ``level`` up, all others from WARNING up."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLogFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("asyncflow_operator").setLevel(level.upper())
    logging.captureWarnings(capture=True)


def update_gauges(store: ObjectStore, metrics: Metrics, failing: Mapping[Key, float]) -> None:
    """Set the gauges that count or name objects; called for each request of ``/metrics``.

    failing: for how many seconds the reconciliation of an object has failed.
    """
    phases: collections.Counter[str] = collections.Counter()
    failed: list[tuple[str, str, str]] = []
    used: list[tuple[float, str, str, str]] = []
    stalled = 0
    for namespace, name, entry in store.all(RLJOB.name):
        job: CustomResource = entry.view
        phases[job.status.phase] += 1
        if job.status.phase == "Failed":
            failed.append((job.status.completion_time or "", namespace, name))
        stalled += _is(job, "Stalled")
        used += ((share, namespace, name, role) for role, share in _budgets(job).items())
    owned = (entry.view for _, _, entry in store.all(POD.name) if entry.owner)
    pods = collections.Counter((kind_of_role(pod.role), pod.phase) for pod in owned)
    for gauge in (
        metrics.jobs,
        metrics.job_failed,
        metrics.pods,
        metrics.budget_used,
        metrics.failing,
        metrics.degraded,
    ):
        gauge.clear()
    for phase in get_args(Phase):
        metrics.jobs.labels(phase).set(phases[phase])
    for _, namespace, name in sorted(failed)[-MOST_NAMED:]:
        metrics.job_failed.labels(namespace, name).set(1)
    for (role, phase), count in pods.items():
        metrics.pods.labels(role, phase).set(count)
    for share, namespace, name, role in sorted(used)[-MOST_NAMED:]:
        metrics.budget_used.labels(namespace, name, role).set(share)
    for seconds, key in sorted((seconds, key) for key, seconds in failing.items())[-MOST_NAMED:]:
        metrics.failing.labels(*key).set(seconds)
    for kind in CUSTOM_KINDS:
        metrics.objects.labels(kind.name).set(store.count(kind.name))
    for _, key in sorted(_degraded(store))[-MOST_NAMED:]:
        metrics.degraded.labels(*key).set(1)
    metrics.jobs_stalled.set(stalled)


def _is(resource: CustomResource, condition: str) -> bool:
    return any(each.type == condition and each.status == "True" for each in resource.status.conditions)


def _degraded(store: ObjectStore) -> Iterator[tuple[str, Key]]:
    """Yield the degraded objects that no job owns, each with the time since which it is degraded."""
    for kind in (QUEUE, SYNC):
        for namespace, name, entry in store.all(kind.name):
            alone = entry.view.controller[0] != RLJOB.name
            for each in entry.view.status.conditions if alone else ():
                if each.type == "Degraded" and each.status == "True":
                    yield each.last_transition_time, Key(kind.name, namespace, name)


def _budgets(job: CustomResource) -> dict[str, float]:
    """Return the used share of each role's restart budget, by kind of role. Roles without restarts or budget are left
    out, and so are jobs that are suspended or have ended.
    """
    restarts = job.status.restarts
    if job.model is None or not restarts or job.status.phase not in ACTIVE:
        return {}
    used: dict[str, float] = {}
    for role in plan(job.model).roles:
        if role.restart.max_restarts and role.name in restarts:
            kind = kind_of_role(role.name)
            used[kind] = max(used.get(kind, 0.0), restarts[role.name] / role.restart.max_restarts)
    return used


class HealthChecks:
    """Measurements that ``/healthz`` reports.

    work_s, watch_s: return the seconds without progress on due objects, and without activity of the least active watch.
    """

    def __init__(self, *, work_s: Callable[[], float], watch_s: Callable[[], float], metrics: Metrics) -> None:
        self._work_s = work_s
        self._watch_s = watch_s
        self._lag_s = 0.0
        metrics.loop_lag.set_function(lambda: self._lag_s)

    async def run(self) -> Never:
        """Measure the delay of the event loop, until cancelled."""
        while True:
            started = time.monotonic()
            await asyncio.sleep(_TICK_S)
            self._lag_s = max(0.0, time.monotonic() - started - _TICK_S)

    def problems(self) -> list[str]:
        """Return a sentence for each limit that is exceeded."""
        limits = (
            ("the event loop is late by", self._lag_s, MOST_LAG_S),
            ("objects are due, and no reconciliation was started or finished for", self._work_s(), MOST_STUCK_S),
            ("a watch has neither received a message nor retried for", self._watch_s(), MOST_STUCK_S),
        )
        return [f"{text} {value:.1f} s" for text, value, limit in limits if value > limit]


class Http:
    """Server of ``/healthz``, ``/readyz`` and ``/metrics``.

    ready: returns the names of pending lists, none if the process is ready; refresh: updates the gauges.
    """

    def __init__(
        self, *, metrics: Metrics, health: HealthChecks, ready: Callable[[], list[str]], refresh: Callable[[], None]
    ) -> None:
        self._metrics = metrics
        self._health = health
        self._ready = ready
        self._refresh = refresh
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._show)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5, handle_signals=False)

    async def start(self, host: str, port: int) -> int:
        """Start serving, and return the port. Raises Refused if it cannot listen."""
        await self._runner.setup()
        try:
            await web.SockSite(self._runner, _bound(host, port)).start()
        except OSError as error:
            await self._runner.cleanup()
            hint = "Another process may hold that port: choose another by --http-port"
            raise Refused(f"cannot listen: {error}", where=f"http://{host}:{port}", hint=hint) from error
        bound: int = self._runner.addresses[0][1]
        return bound

    async def close(self) -> None:
        """Stop serving."""
        await self._runner.cleanup()

    async def _healthz(self, _: web.Request) -> web.Response:
        return _health_response(self._health.problems())

    async def _readyz(self, _: web.Request) -> web.Response:
        return _health_response(self._ready())

    async def _show(self, request: web.Request) -> web.Response:
        self._refresh()
        encode, form = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._metrics.registry), headers={"Content-Type": form})


def _bound(host: str, port: int) -> socket.socket:
    """Return a listening socket on ``host``, ``*`` for all addresses of this machine."""
    if host == "*":
        host = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104 - a pod's probes come from the node
    both = host == "::" and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, dualstack_ipv6=both)


def _health_response(problems: list[str]) -> web.Response:
    return web.Response(text="; ".join(problems) or "ok", status=503 if problems else 200)
