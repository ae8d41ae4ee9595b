"""Alerts and recorded figures of jobs, as Prometheus evaluates them over what a job's processes really expose."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pod_world import pods

from asyncflow.api.durability import LimitsSpec
from asyncflow.api.load import load_job
from asyncflow.api.names import QUEUE_ROLES
from asyncflow.plan import plan
from prometheus import Change, RuleError, Series, check, course, lint, scrape

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
COUNTING = ROOT / "examples" / "counting.yaml"
SETTINGS = ["transferQueue.controllers=2", "transferQueue.storageUnits=1", "algorithm.steps=10000"]
JOB = {"namespace": "team", "rljob": "math"}
QUEUE = {"queue": "math"}
"""Label of the job's controllers and storage units, whose pods belong to its TransferQueue."""
QUIET = "asyncflow_driver_quiet_seconds"
Scraped = dict[Series, float]


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Scraped:
    """Metrics of every process of a job amid its run, with the labels of the chart's PodMonitor."""
    with pods(tmp_path_factory.mktemp("job"), COUNTING, SETTINGS, leader="driver") as made:
        made.place(*plan(load_job(COUNTING, SETTINGS)).roles)
        made.start()
        made.until_step(1)
        found: Scraped = {}
        for name, pod in made.pods.items():
            place = {"pod": f"math-{name}", "instance": f"{pod.host}:9571", "role": pod.role.name}
            place |= QUEUE if pod.role.name in QUEUE_ROLES else {}
            found |= scrape(pod.ask("/metrics"), **JOB, **place, index=str(pod.index))
    return found


def total(scraped: Scraped, name: str) -> float:
    return sum(value for series, value in scraped.items() if series.name == name)


def told(scraped: Scraped, *changes: Change, minutes: int, firing: list[str], summary: str = "", **labels: str) -> None:
    """Expect these alerts about the job, with these further labels, beside an operator that leads."""
    series = course(scraped, minutes=minutes, changes=changes) | {"asyncflow_operator_leads_flag": f"1x{minutes}"}
    labels = JOB | {"severity": "warning"} | labels
    summaries = dict.fromkeys(firing, summary) if summary else {}
    check(series, minutes=minutes, firing=[{"alertname": alert, **labels} for alert in firing], summaries=summaries)


def test_prometheus_reads_the_rules() -> None:
    lint()


def test_a_job_that_makes_no_step_for_as_long_as_it_says_has_stalled(scraped: Scraped) -> None:
    assert 0 < total(scraped, QUIET) < 60
    told(scraped, minutes=60, firing=[])
    told(scraped, Change(QUIET, {}, by=60), minutes=29, firing=[])
    told(scraped, Change(QUIET, {}, by=60), minutes=32, firing=["AsyncFlowJobStalled"])


def test_a_job_whose_driver_is_gone_is_told(scraped: Scraped) -> None:
    rest = {series: value for series, value in scraped.items() if not series.name.startswith("asyncflow_driver_")}
    told(rest, minutes=9, firing=[])
    told(rest, minutes=30, firing=["AsyncFlowDriverMissing"])


def test_a_full_queue_and_a_silent_controller_are_told(scraped: Scraped) -> None:
    full = Change("asyncflow_storage_held_bytes", {}, to=0.99 * total(scraped, "asyncflow_storage_limit_bytes"))
    summary = "the queue of team/math is 99% full"
    told(scraped, full, minutes=30, firing=["AsyncFlowQueueFull"], summary=summary, **QUEUE)
    silent = Change("asyncflow_controller_silence_seconds", {"controller": "1"}, by=60)
    told(scraped, silent, minutes=30, firing=["AsyncFlowQueueControllerSilent"], controller="1", **QUEUE)


def test_a_full_queue_that_stands_alone_is_told_beside_an_empty_one(scraped: Scraped) -> None:
    both: Scraped = {}
    for queue in ("full", "empty"):
        for series, value in scraped.items():
            if series.name.startswith("asyncflow_storage_"):
                labels = dict(series.labels) | {"queue": queue, "pod": f"{queue}-storage-0"}
                del labels["rljob"]
                both[Series(series.name, tuple(sorted(labels.items())))] = value
    limit = total(scraped, "asyncflow_storage_limit_bytes")
    full = Change("asyncflow_storage_held_bytes", {"queue": "full"}, to=limit)
    firing = {"alertname": "AsyncFlowQueueFull", "namespace": "team", "queue": "full", "severity": "warning"}
    series = course(both, minutes=30, changes=[full]) | {"asyncflow_operator_leads_flag": "1x30"}
    check(series, minutes=30, firing=[firing], summaries={"AsyncFlowQueueFull": "the queue of team/full is 100% full"})


def test_what_autoscalers_follow_is_what_the_driver_wants(scraped: Scraped) -> None:
    gauge = "asyncflow_driver_desired_rollouts"
    assert total(scraped, gauge) == 2, "as many as there are until it has decided"
    keda = yaml.safe_load((ROOT / "examples/kubernetes/keda.yaml").read_text())
    (trigger,) = keda["spec"]["triggers"]
    query = trigger["metadata"]["query"].replace("default", JOB["namespace"]).replace('"cpu"', f'"{JOB["rljob"]}"')
    wants = course(scraped, minutes=30, changes=[Change(gauge, {}, to=5)])
    check(wants, minutes=30, values={query: 5.0})


def test_a_rule_about_what_nobody_exposes_is_found_out(scraped: Scraped) -> None:
    with pytest.raises(RuleError, match="no process exposes asyncflow_driver_steps"):
        course(scraped, minutes=1, changes=[Change("asyncflow_driver_steps", {})])
    with pytest.raises(RuleError, match="AsyncFlowJobStalled"):
        told(scraped, Change(QUIET, {}, to=2 * LimitsSpec().stall_seconds), minutes=60, firing=[])
