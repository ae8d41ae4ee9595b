"""Alerts about the operator, as Prometheus evaluates them over what a real one exposes."""

from collections.abc import Iterator

import pytest
from one_job import OneJob
from scripted_driver import ScriptedDrivers
from world import OURS, World

from asyncflow.api.names import API_VERSION
from asyncflow.plan.roles import REFUSED
from asyncflow_operator.telemetry import MOST_STUCK_S
from kube.plane import ControlPlane
from operator_process import OperatorProcess
from prometheus import Change, Series, check, course, scrape

PREFIX = "asyncflow_operator_"
TARGET = {"namespace": "asyncflow-system", "pod": "asyncflow-operator-0", "instance": "10.0.0.1:8080"}
ON = {"severity": "warning"}
Scraped = dict[Series, float]


@pytest.fixture(scope="module")
def scraped(kwok_plane: ControlPlane, shared_operator: OperatorProcess, drivers: ScriptedDrivers) -> Iterator[Scraped]:
    """Metrics of an operator of which one job's driver is silent, and another one's pod has a name that is taken."""
    quiet = OneJob(kwok_plane, "jobs", "quiet", drivers.of("jobs", "quiet")).create()
    taken = OneJob(kwok_plane, "jobs", "taken", drivers.of("jobs", "taken"))
    pod = {"containers": [{"name": "other", "image": "other"}], "nodeSelector": {"none": "such"}}
    path = "/api/v1/namespaces/jobs/pods"
    kwok_plane.api.create(path, {"metadata": {"name": "taken-driver-0"}, "spec": pod})
    taken.create()
    quiet.until_phase("Running")
    quiet.annotate("storage-0", exit="1")
    quiet.until(lambda: quiet.restarts() == {"storage": 1}, "a restart that is counted")
    quiet.driver.silent = True
    failed = {"asyncflow_operator_probes_total": {}, "asyncflow_operator_reconciles_total": {"kind": "RLJob"}}
    for name, labels in failed.items():
        kwok_plane.wait_until(
            lambda name=name, labels=labels: shared_operator.total(name, outcome="failed", **labels), f"a failed {name}"
        )
    yield scrape(shared_operator.get("/metrics")[1], **TARGET)
    quiet.delete()
    taken.delete()
    kwok_plane.api.delete(f"{path}/taken-driver-0")


def working(outcome: str, *, per_minute: float) -> list[Change]:
    """Reconciles and probes that all end in the same way, and the waits of objects for their turn, which are short."""
    return [
        Change(f"{PREFIX}reconciles_total", {"kind": "RLJob", "outcome": outcome}, by=per_minute),
        Change(f"{PREFIX}probes_total", {"outcome": outcome}, by=per_minute),
        Change(f"{PREFIX}wait_seconds_bucket", {}, by=per_minute),
        Change(f"{PREFIX}restart_budget_used_ratio", {}, to=0.1),
        Change(f"{PREFIX}failing_seconds", {}, by=0 if outcome == "ok" else 60, to=0),
        Change(f"{PREFIX}watch_age_seconds", {}, to=30),
    ]


def test_of_an_operator_that_works_nothing_is_said(scraped: Scraped) -> None:
    check(course(scraped, minutes=60, changes=working("ok", per_minute=100)), minutes=60, firing=[])


def test_reconciles_and_probes_that_fail_are_told(scraped: Scraped) -> None:
    changes = working("failed", per_minute=1)
    job = {"kind": "RLJob", "object_namespace": "jobs", "object": "taken"}
    told = [{"alertname": "AsyncFlowReconcileErrors", **job, **ON}, {"alertname": "AsyncFlowProbeFailures", **ON}]
    check(course(scraped, minutes=60, changes=changes), minutes=60, firing=told)


def test_one_driver_of_two_that_is_silent_is_told(scraped: Scraped) -> None:
    """One that does not answer is asked twice a minute, one that answers twelve times."""
    probes = f"{PREFIX}probes_total"
    half = [Change(probes, {"outcome": "ok"}, by=12), Change(probes, {"outcome": "failed"}, by=2)]
    told = [{"alertname": "AsyncFlowProbeFailures", **ON}]
    check(course(scraped, minutes=60, changes=[*working("ok", per_minute=1), *half]), minutes=60, firing=told)


def test_a_budget_that_is_nearly_used_is_told_until_its_window_is_over(scraped: Scraped) -> None:
    used = [*working("ok", per_minute=100), Change(f"{PREFIX}restart_budget_used_ratio", {"role": "storage"}, to=0.9)]
    job = {"job_namespace": "jobs", "rljob": "quiet", "role": "storage"}
    told = [{"alertname": "AsyncFlowRestartBudgetNearlyUsed", **job, **ON}]
    check(course(scraped, minutes=10, changes=used), minutes=10, firing=told)


def test_a_publisher_that_is_degraded_is_told_by_its_name(
    scraped: Scraped, kwok_plane: ControlPlane, shared_operator: OperatorProcess
) -> None:
    syncs, pod = f"{OURS}/namespaces/jobs/weightsyncs", "refuses-publisher-0"
    spec = {"source": {"model": "tiny://reverse-digits"}, "follower": {"maxLength": 64}}
    body = {"apiVersion": API_VERSION, "kind": "WeightSync", "metadata": {"name": "refuses"}, "spec": spec}
    kwok_plane.api.create(syncs, body)
    kwok_plane.wait_until(lambda: kwok_plane.api.exists(f"/api/v1/namespaces/jobs/pods/{pod}"), "the publisher's pod")
    World(kwok_plane, "jobs").annotate(pod, exit=str(REFUSED))
    job = {"kind": "WeightSync", "object_namespace": "jobs", "object": "refuses"}
    kwok_plane.wait_until(lambda: shared_operator.total(f"{PREFIX}degraded_flag", **job), "it to be degraded")
    named = scrape(shared_operator.get("/metrics")[1], **TARGET)
    told = [{"alertname": "AsyncFlowDegraded", **job, **ON}]
    changes = working("ok", per_minute=100)
    check(course({**named, **scraped}, minutes=10, changes=changes), minutes=10, firing=told)
    kwok_plane.api.delete(f"{syncs}/refuses")


def test_each_job_that_has_failed_is_told_by_its_name(
    scraped: Scraped, kwok_plane: ControlPlane, shared_operator: OperatorProcess, drivers: ScriptedDrivers
) -> None:
    failed = [OneJob(kwok_plane, "jobs", name, drivers.of("jobs", name)).create() for name in ("first", "second")]
    for job in failed:
        job.until_phase("Running")
        job.annotate("trainer-0", exit=str(REFUSED))
    for job in failed:
        job.until_phase("Failed")
    named = scrape(shared_operator.get("/metrics")[1], **TARGET)
    told = [{"alertname": "AsyncFlowJobFailed", "job_namespace": "jobs", "rljob": job.name, **ON} for job in failed]
    changes = working("ok", per_minute=100)
    check(course({**named, **scraped}, minutes=10, changes=changes), minutes=10, firing=told)
    for job in failed:
        job.delete()


def test_an_operator_that_is_behind_is_told(scraped: Scraped) -> None:
    work = working("ok", per_minute=100)
    slow = [
        Change(f"{PREFIX}wait_seconds_bucket", {"le": le}, by=0)
        for le in ("0.001", "0.002", "0.005", "0.01", "0.02", "0.05", "0.1", "0.2", "0.5", "1.0", "2.0", "5.0", "10.0")
    ]
    told = [{"alertname": "AsyncFlowOperatorBehind", **ON}]
    check(course(scraped, minutes=60, changes=[*work, *slow]), minutes=60, firing=told)


def test_an_operator_that_is_deaf_is_told_before_its_liveness_probe_ends_it(scraped: Scraped) -> None:
    deaf = [*working("ok", per_minute=100), Change(f"{PREFIX}watch_age_seconds", {}, by=60, to=0)]
    told = [{"alertname": "AsyncFlowWatchSilent", "severity": "critical"}]
    minutes = int(MOST_STUCK_S // 60)
    check(course(scraped, minutes=minutes, changes=deaf), minutes=minutes, firing=told)


def test_an_operator_that_leads_no_more_is_told_beside_another_one_that_leads(scraped: Scraped) -> None:
    nobody = [*working("ok", per_minute=100), Change(f"{PREFIX}leads_flag", {}, to=0)]
    other = {str(Series(f"{PREFIX}leads_flag", (("instance", "10.0.0.2:8080"), ("namespace", "other")))): "1x60"}
    told = {"alertname": "AsyncFlowOperatorNotLeading", "severity": "critical"}
    mine = told | {"namespace": TARGET["namespace"]}
    check(course(scraped, minutes=60, changes=nobody) | other, minutes=60, firing=[mine])
    check({"up": "1x60"}, minutes=60, firing=[told])
