"""Telemetry of the operator: metrics, and one line of JSON for every log record.

Invariant: every metric is declared here, once, as ``asyncflow_operator_*``; labels have few values, and no object's
name is one. A log line is one JSON object: time, level, logger, what happened, and to which object.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Final, TextIO

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

_SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class Metrics:
    """The operator's metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.reconciles = self._counter("reconciles", "reconciles by what became of them", "kind", "outcome")
        self.reconcile_seconds = self._histogram("reconcile_seconds", "time of a reconcile, writes included", "kind")
        self.decide_seconds = self._histogram("decide_seconds", "processor time of a decision", "kind")
        self.wait_seconds = self._histogram("wait_seconds", "time that an object that was due waited for its turn")
        self.worklist = self._gauge("worklist_count", "objects that wait, also for a later time")
        self.oldest_seconds = self._gauge("worklist_oldest_seconds", "time that the object longest due waits")
        self.objects = self._gauge("objects_count", "objects of ours", "kind")
        self.jobs = self._gauge("jobs_count", "jobs", "phase")
        self.jobs_stalled = self._gauge("jobs_stalled_count", "jobs that make no progress")
        self.pods = self._gauge("pods_count", "pods", "role", "phase")
        self.budget_used = self._gauge("restart_budget_used_ratio", "of the job that has used most of it", "role")
        self.actions = self._counter("actions", "actions carried out", "action", "outcome")
        self.api_requests = self._counter("api_requests", "calls to the API server", "verb", "resource", "code")
        self.api_seconds = self._histogram("api_seconds", "time of a call to the API server", "verb")
        self.probes = self._counter("probes", "questions to drivers", "outcome")
        self.probe_seconds = self._histogram("probe_seconds", "time of a question to a driver")
        self.leads = self._gauge("leads_flag", "1 while this process works")
        self.loop_lag = self._gauge("loop_lag_seconds", "how late the event loop was when last measured")
        self.watch_age = self._gauge("watch_age_seconds", "time since the watch heard from least recently was heard")

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
        """Count one question to a driver."""
        self.probes.labels(outcome).inc()
        self.probe_seconds.observe(seconds)

    def _gauge(self, what: str, words: str, *labels: str) -> Gauge:
        return Gauge(f"asyncflow_operator_{what}", words, labels, registry=self.registry)

    def _counter(self, what: str, words: str, *labels: str) -> Counter:
        return Counter(f"asyncflow_operator_{what}", words, labels, registry=self.registry)

    def _histogram(self, what: str, words: str, *labels: str) -> Histogram:
        return Histogram(f"asyncflow_operator_{what}", words, labels, registry=self.registry, buckets=_SECONDS)


class JsonLines(logging.Formatter):
    """One JSON object a record; what was given as ``extra`` becomes its fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line: dict[str, Any] = {"at": at, "level": record.levelname, "logger": record.name, "what": record.getMessage()}
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD and not key.startswith("_")}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def setup_logging(level: str, *, stream: TextIO | None = None) -> None:
    """Send all log records of this process to ``stream`` (stderr); others' than our own from WARNING on."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("asyncflow_operator").setLevel(level.upper())
    logging.captureWarnings(capture=True)
