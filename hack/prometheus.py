"""Evaluation of the chart's alert rules by Prometheus' own engine, over series that running processes exposed.

    scraped = scrape(text, namespace="team", rljob="math")
    check(course(scraped, minutes=60, changes={...}), minutes=60, firing=[{"alertname": "AsyncFlowQueueFull", ...}])

Names and labels come from a real scrape, so a rule over a series that no process exposes does not fire. Only time is
simulated, by ``promtool test rules``, because alerts wait for minutes.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

import yaml
from prometheus_client.parser import text_string_to_metric_families

from kube.build import binary

RULES: Final = Path(__file__).parents[1] / "charts" / "asyncflow" / "files" / "alerts.yaml"
_DEADLINE_S: Final = 60.0


class Series(NamedTuple):
    """One series: its name and its labels, sorted."""

    name: str
    labels: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return self.name + "{" + ", ".join(f"{key}={json.dumps(value)}" for key, value in self.labels) + "}"

    def has(self, name: str, labels: Mapping[str, str]) -> bool:
        """Return whether the series has this name and these labels, possibly with more labels."""
        return self.name == name and labels.items() <= dict(self.labels).items()


class Change(NamedTuple):
    """A change of the series ``name`` with ``labels``: it starts at ``to``, if set, and grows by ``by`` per minute."""

    name: str
    labels: Mapping[str, str]
    by: float = 0.0
    to: float | None = None


class RuleError(AssertionError):
    """The result of the rules differs from the expected one."""


def scrape(text: str, **target: str) -> dict[Series, float]:
    """Return the series that a process exposed, with the labels that the scraper adds."""
    return {
        Series(sample.name, tuple(sorted({**sample.labels, **target}.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def course(scraped: Mapping[Series, float], *, minutes: int, changes: Iterable[Change] = ()) -> dict[str, str]:
    """Return the values of the series over time: constant, except for ``changes``. Raises RuleError if a change matches
    no series.
    """
    values = {series: (value, 0.0) for series, value in scraped.items()}
    for change in changes:
        matching = [series for series in values if series.has(change.name, change.labels)]
        if not matching:
            raise RuleError(f"no process exposes {change.name} with {dict(change.labels)}")
        for series in matching:
            values[series] = (values[series][0] if change.to is None else change.to, change.by)
    return {str(series): f"{first:g}+{by:g}x{minutes}" for series, (first, by) in values.items()}


def check(
    series: Mapping[str, str],
    *,
    minutes: int,
    firing: Sequence[Mapping[str, str]] | None = None,
    summaries: Mapping[str, str] = MappingProxyType({}),
    values: Mapping[str, float] | None = None,
) -> None:
    """Evaluate the rules each minute. Raises RuleError if a result differs from the expected one.

    firing: the labels of all alerts that fire at the end; summaries: the summaries of some of them, by name; values:
    the values of expressions at the end, each of which gives one sample without labels.
    """
    expected: list[dict[str, object]] = []
    if firing is not None:
        samples = [
            {"labels": str(Series("ALERTS", tuple(sorted({**alert, "alertstate": "firing"}.items())))), "value": 1}
            for alert in firing
        ]
        expected.append({"expr": 'ALERTS{alertstate="firing"}', "exp_samples": samples})
    for expression, value in (values or {}).items():
        expected.append({"expr": expression, "exp_samples": [{"labels": "{}", "value": value}]})
    group = {
        "interval": "1m",
        "input_series": [{"series": name, "values": course} for name, course in series.items()],
        "promql_expr_test": [{"eval_time": f"{minutes}m", **each} for each in expected],
        "alert_rule_test": [
            {"eval_time": f"{minutes}m", "alertname": alert["alertname"], "exp_alerts": [_shown(alert, summaries)]}
            for alert in firing or ()
            if alert["alertname"] in summaries
        ],
    }
    whole = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "fuzzy_compare": True, "tests": [group]}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(whole, file)
        file.flush()
        _promtool("test", "rules", file.name)


def _shown(alert: Mapping[str, str], summaries: Mapping[str, str]) -> dict[str, object]:
    """Return an alert as Prometheus sends it; its runbook must be the same for all jobs."""
    name = alert["alertname"]
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    written = next(rule["annotations"] for rule in rules if rule["alert"] == name)
    labels = {key: value for key, value in alert.items() if key != "alertname"}
    return {"exp_labels": labels, "exp_annotations": written | {"summary": summaries[name]}}


def lint() -> None:
    """Validate the rules, including their templates, with promtool. Raises RuleError if it refuses one."""
    _promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES))


def _promtool(*words: str) -> None:
    command = [binary("promtool"), *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    if ended.returncode != 0:
        raise RuleError(f"promtool {' '.join(words)}:\n{ended.stdout}{ended.stderr}")
