import io
import json
import logging
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from asyncflow.api.load import load_job
from asyncflow.errors import Refused
from asyncflow_operator.cluster.store import ObjectStore
from asyncflow_operator.references import Key
from asyncflow_operator.telemetry import (
    MOST_NAMED,
    MOST_STUCK_S,
    HealthChecks,
    Http,
    JsonLogFormatter,
    Metrics,
    update_gauges,
)

HAS_IPV6 = socket.has_dualstack_ipv6() and bool(Path("/proc/net/if_inet6").read_text())
EXAMPLE = Path(__file__).parents[3] / "examples" / "quickstart.yaml"


class World:
    def __init__(self) -> None:
        self.watch_s = self.work_s = 0.0
        self.missing: list[str] = []
        self.metrics = Metrics()
        vitals = HealthChecks(work_s=lambda: self.work_s, watch_s=lambda: self.watch_s, metrics=self.metrics)
        store = ObjectStore(lambda *_: None, lambda *_: None)
        self.http = Http(
            metrics=self.metrics,
            health=vitals,
            ready=lambda: self.missing,
            refresh=lambda: update_gauges(store, self.metrics, {}),
        )


async def get(port: int, path: str, *, host: str = "127.0.0.1") -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://{host}:{port}{path}") as answer:
        return answer.status, await answer.text()


async def test_problems_and_missing_lists_are_reported() -> None:
    world = World()
    port = await world.http.start("*", 0)
    assert await get(port, "/healthz") == (200, "ok")
    if HAS_IPV6:
        assert await get(port, "/healthz", host="[::1]") == (200, "ok")
    world.watch_s = world.work_s = MOST_STUCK_S + 1
    status, words = await get(port, "/healthz")
    assert status == 503
    assert "a watch has neither received a message nor retried" in words
    assert "no reconciliation was started or finished" in words
    world.missing = ["the list of pods"]
    assert await get(port, "/readyz") == (503, "the list of pods")
    status, text = await get(port, "/metrics")
    assert status == 200
    assert "asyncflow_operator_worklist_count" in text
    with pytest.raises(Refused, match="Another process may hold that port"):
        await World().http.start("127.0.0.1", port)
    await world.http.close()


def test_the_jobs_that_failed_last_are_named() -> None:
    store = ObjectStore(lambda _kind, raw, _before: raw["view"], lambda *_: None)
    for number in range(MOST_NAMED + 5):
        phase, at = ("Running", None) if number == 7 else ("Failed", f"2026-11-28T10:{number:02}:00Z")
        status = SimpleNamespace(phase=phase, completion_time=at, conditions=[], restarts={})
        meta = {"name": f"j{number}", "namespace": "ns", "uid": str(number), "resourceVersion": "1"}
        store.put("RLJob", {"metadata": meta, "view": SimpleNamespace(status=status, model=None)})
    metrics = Metrics()

    def named() -> set[str]:
        update_gauges(store, metrics, {})
        families = metrics.registry.collect()
        (family,) = (each for each in families if each.name == "asyncflow_operator_job_failed_flag")
        assert {(each.labels["job_namespace"], each.value) for each in family.samples} == {("ns", 1)}
        return {each.labels["rljob"] for each in family.samples}

    assert named() == {f"j{number}" for number in range(4, MOST_NAMED + 5)} - {"j7"}
    store.remove("RLJob", "ns", "j20", "20")
    assert named() == {f"j{number}" for number in range(3, MOST_NAMED + 5)} - {"j7", "j20"}


def test_the_fleet_is_counted_and_the_jobs_that_have_used_most_restarts_are_named() -> None:
    settings = ["failurePolicy.rollout.maxRestarts=4", "reward.role.replicas=1"]
    model = load_job(EXAMPLE, settings)
    stalled = SimpleNamespace(type="Stalled", status="True")

    def job(phase: str, **restarts: int) -> Any:
        return SimpleNamespace(
            status=SimpleNamespace(phase=phase, completion_time=None, conditions=[stalled], restarts=restarts),
            model=model,
        )

    store = ObjectStore(lambda _kind, raw, _before: raw["view"], lambda *_: None)
    jobs = job("Running", rollout=1, reward=4), job("Running", rollout=3), job("Failed", rollout=5)
    for number, view in enumerate(jobs):
        meta = {"name": f"j{number}", "namespace": "ns", "uid": str(number), "resourceVersion": "1"}
        store.put("RLJob", {"metadata": meta, "view": view})
    metrics = Metrics()
    update_gauges(store, metrics, {})
    value = metrics.registry.get_sample_value
    assert value("asyncflow_operator_jobs_count", {"phase": "Running"}) == 2
    assert value("asyncflow_operator_jobs_count", {"phase": "Succeeded"}) == 0, "a series that alerts may rely on"
    assert value("asyncflow_operator_jobs_stalled_count") == 3

    def used(job: str, role: str) -> float | None:
        labels = {"job_namespace": "ns", "rljob": job, "role": role}
        return value("asyncflow_operator_restart_budget_used_ratio", labels)

    assert used("j0", "rollout") == 0.25
    assert used("j0", "reward") == 1, "a role that the job adds"
    assert used("j1", "rollout") == 0.75
    assert used("j2", "rollout") is None, "it has ended"


def test_the_objects_that_have_failed_longest_are_named() -> None:
    metrics = Metrics()
    store = ObjectStore(lambda *_: None, lambda *_: None)
    failing = {Key("RLJob", "ns", f"j{number}"): float(number) for number in range(MOST_NAMED + 5)}
    for expected in (failing, {Key("WeightSync", "ns", "w"): 2.0}):
        update_gauges(store, metrics, expected)
        families = metrics.registry.collect()
        (family,) = (each for each in families if each.name == "asyncflow_operator_failing_seconds")
        named = {Key(*each.labels.values()): each.value for each in family.samples}
        assert named == dict(list(expected.items())[-MOST_NAMED:])


def test_what_stands_alone_and_is_degraded_is_named() -> None:
    store = ObjectStore(lambda _kind, raw, _before: raw["view"], lambda *_: None)
    alone, of_a_job = ("Application", "a"), ("RLJob", "j")
    for number, (controller, status) in enumerate([(alone, "True"), (alone, "False"), (of_a_job, "True")]):
        condition = SimpleNamespace(type="Degraded", status=status, last_transition_time="2026-11-28T10:00:00Z")
        view = SimpleNamespace(controller=controller, status=SimpleNamespace(conditions=[condition]))
        meta = {"name": f"w{number}", "namespace": "ns", "uid": str(number), "resourceVersion": "1"}
        store.put("WeightSync", {"metadata": meta, "view": view})
    metrics = Metrics()
    update_gauges(store, metrics, {})
    families = metrics.registry.collect()
    (family,) = (each for each in families if each.name == "asyncflow_operator_degraded_flag")
    named = [(Key(*each.labels.values()), each.value) for each in family.samples]
    assert named == [(Key("WeightSync", "ns", "w0"), 1)], "a job tells of its own"


def test_no_user_makes_a_series_of_pods_by_the_name_of_a_task_or_a_label() -> None:
    store = ObjectStore(lambda _kind, raw, _before: raw["view"], lambda *_: None)
    for number, role in enumerate(("rollout", "task-judge", "task-score", "mine")):
        owner = {"kind": "RLJob", "name": "j", "uid": "uj", "controller": True}
        meta = {"name": f"p{number}", "namespace": "ns", "uid": str(number), "resourceVersion": "1"}
        meta |= {} if role == "mine" else {"ownerReferences": [owner]}
        store.put("Pod", {"metadata": meta, "view": SimpleNamespace(role=role, phase="Running")})
    metrics = Metrics()
    update_gauges(store, metrics, {})
    (family,) = (each for each in metrics.registry.collect() if each.name == "asyncflow_operator_pods_count")
    assert {each.labels["role"]: each.value for each in family.samples} == {"rollout": 1, "task": 2}


def test_a_log_record_is_one_line_of_json_with_its_extras() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLogFormatter())
    record = logging.makeLogRecord({"msg": "apply\nfailed", "levelname": "WARNING", "name": "x", "target": "Pod/a"})
    handler.emit(record)
    (line,) = stream.getvalue().splitlines()
    said = json.loads(line)
    assert (said["what"], said["level"], said["target"]) == ("apply\nfailed", "WARNING", "Pod/a")
