import re

import pytest
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric

from asyncflow.api.status import DriverStatus, JobStatus
from asyncflow.rpc.server import RpcCounters
from asyncflow.telemetry.busy import BusyClock
from asyncflow.telemetry.collectors import by_rank
from asyncflow.telemetry.metrics import (
    ControllerMetrics,
    DriverMetrics,
    FollowerMetrics,
    PublisherMetrics,
    RoleMetrics,
    RolloutMetrics,
    StorageMetrics,
    TrainerMetrics,
)
from asyncflow.training.report import TrainReport

ROLES: list[type[RoleMetrics]] = [
    DriverMetrics,
    ControllerMetrics,
    StorageMetrics,
    RolloutMetrics,
    FollowerMetrics,
    PublisherMetrics,
    TrainerMetrics,
]
SHARES = {f"asyncflow_driver_{name}_ratio" for name in ("eval_accuracy", "eval_pass", "idle_share")}
SHARES |= {f"asyncflow_driver_eval_set_{name}_ratio" for name in ("accuracy", "pass")}
"""What is between 0 and 1."""
GROWING = re.compile(
    "certificate_errors|tokens_|samples|lease_expiries|lease_timeouts|redeliveries|fenced_writes|moved_rows|put_bytes|"
    "fetched_bytes|pulled_bytes|ledger_sync|budget_wait|swaps|fallbacks|sequences$|rewards|skipped|checkpoint_failures|sink_failures"
)
"""What only grows while a process lives."""


@pytest.mark.parametrize("kind", ROLES)
def test_names_say_what_prometheus_takes_them_for(kind: type[RoleMetrics]) -> None:
    families = [each for each in kind().registry.collect() if each.name.startswith("asyncflow_")]
    assert families
    for family in families:
        name = family.name
        assert name.startswith(f"asyncflow_{kind.role}_")
        assert not name.endswith(("_total", "_count", "_sum", "_bucket")), "a suffix of its type"
        assert name.endswith("_ratio") == (name in SHARES), name
        assert (family.type == "counter") == bool(GROWING.search(name)) or "inflight" in name, (name, family.type)


def test_what_somebody_else_counts_is_a_counter() -> None:
    metrics = StorageMetrics()
    metrics.put.set(7)
    text = generate_latest(metrics.registry).decode()
    assert "# TYPE asyncflow_storage_put_bytes_total counter" in text
    assert "asyncflow_storage_put_bytes_total 7.0" in text


UNKNOWN = {
    DriverMetrics: {"reward_mean", "eval_accuracy_ratio", "eval_reward"},
    TrainerMetrics: {"loss", "grad_norm", "approx_kl"},
    RolloutMetrics: {"probe_gap"},
}
"""What a job may never have (an evaluation), and what only the trainer's first rank knows."""


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_figure_that_nobody_knows_is_not_shown_as_zero(kind: type[RoleMetrics]) -> None:
    metrics = kind()
    names = {f"asyncflow_{kind.role}_{what}" for what in UNKNOWN[kind]}
    families = {family.name: family for family in metrics.registry.collect()}
    assert [sample for name in names for sample in families[name].samples] == []
    metrics.figure("other", "another").set(-0.5)
    assert f"asyncflow_{kind.role}_other -0.5" in generate_latest(metrics.registry).decode().splitlines()


def test_the_loss_of_a_trainer_with_several_ranks_is_that_of_the_rank_that_knows_it() -> None:
    ranks = [TrainerMetrics(), TrainerMetrics()]
    ranks[0].loss.set(-0.25)
    texts = {str(rank): generate_latest(metrics.registry).decode() for rank, metrics in enumerate(ranks)}
    shown = generate_latest(by_rank(texts)).decode().splitlines()
    assert [line for line in shown if line.startswith("asyncflow_trainer_loss{")] == [
        'asyncflow_trainer_loss{rank="0"} -0.25'
    ]


def test_the_staleness_of_samples_has_one_name() -> None:
    shown = (
        DriverMetrics().registry.collect(),
        DriverStatus.model_fields,
        JobStatus.model_fields,
        TrainReport.__annotations__,
    )
    names = [each.name if isinstance(each, Metric) else each for source in shown for each in source]
    assert not [name for name in names if re.search(r"\blag|_lag", name)]
    assert [name for name in names if "staleness" in name]


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


def test_metrics_of_several_processes_are_told_apart_by_a_label() -> None:
    texts = {}
    for rank in "01":
        metrics = TrainerMetrics()
        metrics.step.set(int(rank))
        metrics.tokens.labels("prompt").inc(7)
        metrics.wait_seconds.observe(0.02)
        texts[rank] = generate_latest(metrics.registry).decode()
    lines = generate_latest(by_rank(texts)).decode().splitlines()
    assert len(lines) == len(set(lines)), "a family was announced twice"
    for rank in "01":
        assert f'asyncflow_trainer_step{{rank="{rank}"}} {float(rank)}' in lines
        assert f'asyncflow_trainer_tokens_trained_total{{kind="prompt",rank="{rank}"}} 7.0' in lines
        assert f'asyncflow_trainer_wait_seconds_bucket{{le="0.03",rank="{rank}"}} 1.0' in lines
    assert generate_latest(by_rank({})) == b""
