"""Dashboards and alerts ask only for what is emitted, by series and label; the page of metrics has all of it."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import promql_parser as promql
import pytest
import yaml
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.metrics import MetricWrapperBase

import chart
from asyncflow.api.job import RLJob
from asyncflow.api.load import load
from asyncflow.api.names import LABEL_QUEUE, LABEL_SYNC, ROLES
from asyncflow.rpc.server import RpcCounters
from asyncflow.rpc.tls import Reason
from asyncflow.telemetry.busy import BusyClock
from asyncflow.telemetry.metrics import (
    ControllerMetrics,
    CriticMetrics,
    DriverMetrics,
    FollowerMetrics,
    PublisherMetrics,
    ReferenceMetrics,
    RewardMetrics,
    RolloutMetrics,
    StorageMetrics,
    TaskMetrics,
    TrainerMetrics,
)
from asyncflow_operator.desired import Desired, DesiredSettings, Registry
from asyncflow_operator.observed import JobState, Owner
from asyncflow_operator.telemetry import Metrics

FILES = Path(__file__).parents[2] / "charts" / "asyncflow" / "files"
PAGE = FILES.parents[2] / "docs" / "reference" / "metrics.md"
DASHBOARDS = sorted((FILES / "dashboards").glob("*.json"))
SCRAPED = {"namespace", "pod", "instance", "rljob", "queue", "weightsync", "role", "index"}
"""Labels that the scraper adds, those of the chart's PodMonitor among them."""
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


def registries() -> Iterator[CollectorRegistry]:
    """Of every role and of the operator, with all that a running process adds to its own."""
    driver = DriverMetrics()
    driver.watch_rewards(lambda: {"raised": 1})
    driver.watch_groups(lambda: {"right": 1})
    for role in (driver, ControllerMetrics(), StorageMetrics()):
        counters = RpcCounters()
        counters.calls["a"] = counters.errors["a"] = counters.refused["a"] = counters.dropped["a"] = 1
        role.watch_rpc(counters)
        yield role.registry
    rollout, trainer = RolloutMetrics(), TrainerMetrics()
    rollout.watch_busy(BusyClock(), what="occupied")
    for worker in (rollout, trainer, TaskMetrics(), RewardMetrics(), ReferenceMetrics(), CriticMetrics()):
        worker.watch_busy(BusyClock())
        yield worker.registry
    yield FollowerMetrics().registry
    yield PublisherMetrics().registry
    yield Metrics().registry


def emitted() -> dict[str, set[str]]:
    """The series of all processes by name, each with its labels."""
    series: dict[str, set[str]] = {}
    for registry in registries():
        declared = {
            collector._name: set(collector._labelnames)
            for collector in registry._collector_to_names
            if isinstance(collector, MetricWrapperBase)
        }
        for family in registry.collect():
            labels = declared.get(family.name, set()) | {key for sample in family.samples for key in sample.labels}
            series |= dict.fromkeys(names(family), labels | ({"le"} if family.type == "histogram" else set()))
    return series


def names(family: Metric) -> list[str]:
    return [family.name + suffix for suffix in SUFFIXES[family.type]]


def asked(part: Any, grouped: frozenset[str] = frozenset()) -> Iterator[tuple[str, set[str]]]:
    """The series of an expression by name, each with the labels by which it is chosen or grouped."""
    if isinstance(part, promql.VectorSelector):
        yield part.name, {matcher.name for matcher in part.matchers.matchers} | grouped
    elif isinstance(part, promql.MatrixSelector):
        yield from asked(part.vector_selector, grouped)
    elif isinstance(part, promql.AggregateExpr):
        yield from asked(part.expr, grouped | set(part.modifier.labels if part.modifier else ()))
    elif isinstance(part, promql.BinaryExpr):
        yield from asked(part.lhs, grouped)
        yield from asked(part.rhs, frozenset() if str(part.op) == "and" else grouped)
    elif isinstance(part, promql.Call):
        for argument in part.args:
            yield from asked(argument, grouped)
    elif isinstance(part, promql.ParenExpr):
        yield from asked(part.expr, grouped)
    else:
        assert isinstance(part, promql.NumberLiteral), part


def questions() -> Iterator[tuple[str, str]]:
    for dashboard in DASHBOARDS:
        for panel in json.loads(dashboard.read_text())["panels"]:
            for target in panel.get("targets", ()):
                yield f"{dashboard.stem}: {panel['title']}", target["expr"]
    for rule in rules():
        yield f"rule {rule.get('alert') or rule['record']}", rule["expr"]


def rules() -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


@pytest.mark.parametrize("expression", [pytest.param(text, id=where) for where, text in questions()])
def test_what_is_asked_for_is_emitted(expression: str) -> None:
    series = emitted()
    for name, labels in asked(promql.parse(expression)):
        assert name in series, f"nobody emits {name}"
        assert labels <= series[name] | SCRAPED, f"{name} has no {labels - series[name] - SCRAPED}"


LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


def documented() -> dict[str, tuple[str, set[str], str]]:
    """Return type, labels and text of the metrics of the page by name; ROLE stands for the roles above its table."""
    found: dict[str, tuple[str, set[str], str]] = {}
    roles: list[str] = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("ROLE is "):
            roles = re.findall(r"`(\w+)`", line)
        elif row := re.fullmatch(r"\| `(asyncflow_\w+)(?:{([\w, ]+)})?` \| (\w+) \| (.+) \|", line):
            name, labels, kind, text = row.groups()
            for role in roles if "ROLE" in name else ("",):
                shown = kind, set(labels.split(", ")) if labels else set(), LINK.sub(r"\1", text).replace("`", "")
                assert found.setdefault(name.replace("ROLE", role), shown) is shown
    return found


def test_the_page_has_every_metric_with_its_type_labels_and_help() -> None:
    shown = documented()
    series = emitted()
    families = {family.name: family for registry in registries() for family in registry.collect()}
    own = {
        f"{name}_total" if family.type == "counter" else name: (
            family.type,
            series[names(family)[0]] - {"le"},
            family.documentation,
        )
        for name, family in families.items()
        if name.startswith("asyncflow_")
    }
    assert shown == own


def test_every_page_names_metrics_that_exist() -> None:
    known = emitted().keys() | {family.name for registry in registries() for family in registry.collect()}
    pages = [*FILES.parents[2].glob("*.md"), *PAGE.parents[1].rglob("*.md")]
    named = {(page.name, name) for page in pages for name in re.findall(r"`(asyncflow_\w+)[`{]", page.read_text())}
    own = {
        (page, name)
        for page, name in named
        if name.removeprefix("asyncflow_").partition("_")[0] in (*ROLES, "task", "operator")
    }
    assert len(own) > 100
    assert {(page, name) for page, name in own if name not in known} == set()


def test_the_page_has_every_reason_of_a_refusal() -> None:
    (line,) = re.findall(r"^The reasons of refusals are (.*?)\.", PAGE.read_text(), re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", line)) == {
        "access",
        *(name for part in get_args(Reason) for name in get_args(part)),
    }


SHOWN: dict[str, dict[str, set[str]]] = {
    "queue": {
        "asyncflow_controller_oldest_unready_seconds": {"task", "lacks"},
        "asyncflow_controller_parked_claims": {"task"},
        "asyncflow_controller_lease_expiries_total": set(),
        "asyncflow_controller_redeliveries_total": set(),
        "asyncflow_storage_held_bytes": set(),
        "asyncflow_storage_put_bytes_total": set(),
        "asyncflow_storage_fetched_bytes_total": set(),
        "asyncflow_storage_budget_waits_total": set(),
        "asyncflow_controller_ledger_lag_seconds": set(),
    },
    "job": {
        "asyncflow_trainer_steps_skipped_total": set(),
        "asyncflow_trainer_checkpoint_failures_total": set(),
    },
}
"""What a dashboard must show, and by which labels."""


@pytest.mark.parametrize("dashboard", SHOWN)
def test_a_dashboard_names_what_is_waited_for_and_left_out(dashboard: str) -> None:
    board = json.loads((FILES / "dashboards" / f"{dashboard}.json").read_text())
    shown: dict[str, set[str]] = {}
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            for name, labels in asked(promql.parse(target["expr"])):
                shown.setdefault(name, set()).update(labels)
    for name, labels in SHOWN[dashboard].items():
        assert name in shown
        assert labels <= shown[name], name


def test_a_legend_names_labels_that_are_left() -> None:
    for dashboard in DASHBOARDS:
        for panel in json.loads(dashboard.read_text())["panels"]:
            for target in panel.get("targets", ()):
                shown = set(re.findall(r"{{(\w+)}}", target.get("legendFormat", "")))
                expression = promql.parse(target["expr"])
                grouped = set().union(*(labels for _, labels in asked(expression)))
                assert shown <= grouped | SCRAPED, f"{panel['title']}: {target['legendFormat']}"


def test_no_panel_counts_series_where_there_may_be_none() -> None:
    """Of no series the count is no series: of a job whose rollouts are scaled to zero nothing would be shown."""
    assert [where for where, text in questions() if text.startswith("count(") and "vector(0)" not in text] == []


def test_variables_of_dashboards_are_emitted() -> None:
    series = emitted()
    for dashboard in DASHBOARDS:
        for variable in json.loads(dashboard.read_text())["templating"]["list"]:
            if variable["type"] == "query":
                name, label = re.fullmatch(r"label_values\((\w+)(?:{.*})?, (\w+)\)", variable["definition"]).groups()
                assert name in series
                assert label in series[name] | SCRAPED


def test_dashboards_are_whole() -> None:
    boards = [json.loads(dashboard.read_text()) for dashboard in DASHBOARDS]
    assert {board["uid"] for board in boards} == {"asyncflow-fleet", "asyncflow-job", "asyncflow-queue"}
    for board in boards:
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)
        for panel in board["panels"]:
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24
            assert panel["type"] == "row" or panel["targets"]


def test_the_pod_monitor_finds_the_pods_of_a_job(render: Callable[..., list[dict[str, Any]]]) -> None:
    objects = render({"metrics": {"podMonitor": {"enabled": True}}})
    spec = next(each["spec"] for each in objects if each["kind"] == "PodMonitor")
    job = load(chart.ROOT / "examples" / "quickstart.yaml")
    assert isinstance(job, RLJob)
    desired = Desired(DesiredSettings(registry=Registry(prefix="registry", tag="1"), master=b"m" * 32))
    owner = Owner(kind="RLJob", namespace="default", name=job.name, uid="u")
    pod = desired.pod(JobState(owner=owner, job=job), "rollout", 0, 0)
    labels = pod["metadata"]["labels"]
    (endpoint,) = spec["podMetricsEndpoints"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    assert endpoint["port"] in {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
    seen = {f"__meta_kubernetes_pod_label_{re.sub('[./-]', '_', label)}" for label in labels}
    wanted = {source for each in endpoint["relabelings"] for source in each["sourceLabels"]}
    alone = {f"__meta_kubernetes_pod_label_{re.sub('[./-]', '_', label)}" for label in (LABEL_QUEUE, LABEL_SYNC)}
    assert wanted - seen == alone
    assert {each["targetLabel"] for each in endpoint["relabelings"]} <= SCRAPED


def test_a_monitor_takes_the_labels_of_the_scraper_and_no_process_has_them(render: Callable[..., Any]) -> None:
    objects = render({"metrics": {kind: {"enabled": True} for kind in ("podMonitor", "serviceMonitor")}})
    specs = [each["spec"] for each in objects if each["kind"] in ("PodMonitor", "ServiceMonitor")]
    endpoints = [each for spec in specs for each in spec.get("endpoints", spec.get("podMetricsEndpoints"))]
    assert len(endpoints) == 2
    added = {each["targetLabel"] for endpoint in endpoints for each in endpoint.get("relabelings", ())}
    for endpoint in endpoints:
        assert not endpoint.get("honorLabels")
    for name, labels in emitted().items():
        taken = SCRAPED if not name.startswith("asyncflow_operator_") else SCRAPED - added
        assert not labels & taken, name


def test_every_alert_says_what_to_do() -> None:
    assert len(alerts()) >= 5
    for alert in alerts():
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert alert["annotations"]["summary"]
        assert alert["annotations"]["runbook"].endswith(".")
        labels = set(re.findall(r"\$labels\.(\w+)", json.dumps(alert["annotations"])))
        grouped = set().union(*(labels for _, labels in asked(promql.parse(alert["expr"]))))
        assert labels <= grouped, alert["alert"]
