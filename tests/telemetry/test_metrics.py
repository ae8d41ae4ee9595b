import re

import pytest
from prometheus_client import generate_latest

from asyncflow.net.rpc import RpcCounters
from asyncflow.telemetry.busy import BusyClock
from asyncflow.telemetry.metrics import (
    ControllerMetrics,
    DriverMetrics,
    RoleMetrics,
    RolloutMetrics,
    StorageMetrics,
    TrainerMetrics,
)

ROLES: list[type[RoleMetrics]] = [DriverMetrics, ControllerMetrics, StorageMetrics, RolloutMetrics, TrainerMetrics]
UNITS = "count|ratio|seconds|bytes|versions|info"
COUNTED = (
    "samples|sequences|tokens_\\w+|swaps|slots|lease_expiries|redeliveries|fenced_writes|reward_flags"
    "|checkpoint_failures"
)


@pytest.mark.parametrize("kind", ROLES)
def test_names_say_role_what_and_unit(kind: type[RoleMetrics]) -> None:
    metrics = kind()
    names = {family.name for family in metrics.registry.collect() if family.name.startswith("asyncflow_")}
    assert names
    for name in names:
        assert re.fullmatch(rf"asyncflow_{kind.role}_(\w+_({UNITS})|{COUNTED}|bytes)", name), name


@pytest.mark.parametrize("kind", ROLES)
def test_two_roles_in_one_process_have_registries_of_their_own(kind: type[RoleMetrics]) -> None:
    assert kind().registry is not kind().registry


def test_what_an_object_counts_is_read_when_asked() -> None:
    now = [0.0]
    metrics, busy, counters = RolloutMetrics(), BusyClock(lambda: now[0]), RpcCounters()
    metrics.watch_busy(busy)
    metrics.watch_rpc(counters)
    busy.begin("sequence")
    now[0] = 3.5
    counters.calls["weights.fetch"] += 2
    counters.dropped["header"] += 1
    text = generate_latest(metrics.registry).decode()
    assert 'asyncflow_rollout_busy_seconds_total{cause="sequence"} 3.5' in text
    assert 'asyncflow_rollout_busy_seconds_total{cause="any"} 3.5' in text
    assert 'asyncflow_rollout_rpc_calls_total{method="weights.fetch"} 2.0' in text
    assert 'asyncflow_rollout_rpc_dropped_total{reason="header"} 1.0' in text
    assert "process_cpu_seconds_total" in text
