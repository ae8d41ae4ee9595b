"""Tests of what heartbeats tell of instances: how far behind each is, and why."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.api.graph import graph_of
from asyncflow.api.load import load_job
from asyncflow.api.status import DriverStatus, TaskState
from asyncflow.api.versions import LAG_BUCKETS
from asyncflow.driver.instances import LastHeartbeat, cause, fleets, histogram, task_states, versions_state
from asyncflow.identity import Version
from asyncflow.queue.protocol.messages import QueueStats
from asyncflow.rpc.membership import Member

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
STATS: dict[str, Any] = (
    {"parked": {}}
    | dict.fromkeys(("live", "staged", "committed", "filtered", "dropped", "wanted", "bytes", "limit", "units"), 0)
    | dict.fromkeys(("lease_expiries", "redeliveries", "fenced", "ledger_bytes"), 0)
)


def at(**steps: int) -> dict[str, Any]:
    return {which: Version(0, step).packed for which, step in steps.items()}


@pytest.mark.parametrize(
    ("status", "silent_s", "why"),
    [
        (at(version=4, receiving=5) | {"staged": -1, "received": 0.4}, 1.0, "receiving θ_5, 40% of it here"),
        (at(version=4, staged=5) | {"running": 3}, 1.0, "θ_5 is here; generating until its share is done"),
        (
            at(version=4, staged=5) | {"running": 3, "waits_permit": True},
            1.0,
            "θ_5 is here; waits for a permit",
        ),
        (at(version=4, staged=5) | {"waits_permit": True}, 1.0, "θ_5 is here; waits for a permit"),
        (at(version=4, staged=5) | {"running": 0}, 1.0, "θ_5 is here; about to swap"),
        (at(version=4, staged=5, receiving=6) | {"running": 1}, 4.2, "no heartbeat for 4 s"),
        (at(version=4) | {"draining": True}, 0.1, "draining"),
        (at(version=4) | {"staged": -1, "receiving": -1}, 0.1, "has not started to receive a newer version"),
    ],
)
def test_a_cause_is_what_the_last_heartbeat_tells(status: dict[str, Any], silent_s: float, why: str) -> None:
    assert cause(status, silent_s, swap_at="quota") == why


def test_of_many_instances_the_ten_furthest_are_named_and_all_are_counted() -> None:
    rollouts = [
        (Member(role="rollout", index=step, incarnation=f"rollout-{step}-a"), at(version=step), 0.0)
        for step in range(1, 21)
    ]
    follower = (Member(role="follower", index=7, incarnation="follower-7-a"), at(version=0) | {"swap_s": 0.5}, 0.0)
    starting = (Member(role="rollout", index=50, incarnation="rollout-50-a"), {"version": -1}, 0.0)
    trainer = (Member(role="trainer", index=0, incarnation="trainer-0-a"), {"publish_s": 0.25}, 0.0)
    seen = versions_state([*rollouts, follower, starting, trainer], nbytes=99, newest=20, swap_at="quota")
    assert (seen.rollouts, seen.followers, seen.behind, seen.bytes) == (20, 1, 20, 99)
    assert seen.lag == (1,) * 15 + (6,)
    assert [(each.version, each.instances) for each in seen.serving] == [(step, 1) for step in range(20, 4, -1)]
    assert [each.id for each in seen.laggards] == ["follower-7-a", *(f"rollout-{step}-a" for step in range(1, 10))]
    assert (seen.seconds.publish, seen.seconds.swap, seen.seconds.transfer) == (0.25, 0.5, None)


def test_of_a_thousand_instances_each_version_is_counted_and_the_state_stays_small() -> None:
    told = [
        (Member(role="follower", index=n, incarnation=f"follower-{n}-a"), at(version=100 * (n % 3)), 0.0)
        for n in range(1000)
    ]
    seen = versions_state(told, nbytes=99, newest=200, swap_at="token")
    assert [(each.version, each.instances) for each in seen.serving] == [(200, 333), (100, 333), (0, 334)]
    assert seen.behind == 667
    assert len(seen.model_dump_json(by_alias=True)) < 4096


def test_the_followers_of_each_weight_sync_are_told_apart_and_the_largest_fleets_are_told() -> None:
    def follower(index: int, version: int, **info: str) -> LastHeartbeat:
        member = Member(role="follower", index=index, incarnation=f"follower-{index}-a", info=info)
        return member, at(version=version), 0.0

    rollout = (Member(role="rollout", index=0, incarnation="rollout-0-a"), at(version=0), 0.0)
    trainer = (Member(role="trainer", index=0, incarnation="trainer-0-a"), {"publish_s": 0.25}, 0.0)
    told = [follower(0, 3, fleet="a"), follower(1, 4, fleet="a"), follower(2, 4, fleet="b"), follower(3, 2)]
    seen = fleets([*told, rollout, trainer], nbytes=99, newest=4)
    assert {name: (state.rollouts, state.followers, state.behind, state.lag) for name, state in seen.items()} == {
        "a": (0, 2, 1, (1, 1)),
        "b": (0, 1, 0, (1,)),
    }
    assert [each.id for each in seen["a"].laggards] == ["follower-0-a"]
    assert (seen["a"].bytes, seen["a"].seconds.publish) == (99, 0.25)
    many = [follower(100 + n, 4, fleet=f"{n:02}" + "n" * 1000) for n in range(20)]
    some = fleets([*told, *many], nbytes=99, newest=4)
    assert next(iter(some)) == "a"
    assert DriverStatus(fleets=some).fleets == some, "what the operator takes"


def test_a_task_is_what_its_processes_and_the_queue_tell_together() -> None:
    tasks = "tasks=[{name: a, function: 'm:f', reads: [reward], writes: [{name: x}]}]"
    graph = graph_of(load_job(EXAMPLE, [tasks, "reference={}", "algorithm.kl.coefficient=0.1"]).spec)
    told = {"done": 4, "failed": {"raised": 2}, "first_failure": "raised: Traceback\nValueError: odd"}
    heard = [
        (Member(role="task-a", index=0, incarnation="task-a-0-x"), told, 0.0),
        (Member(role="task-a", index=1, incarnation="y"), {"done": 3, "failed": {"raised": 1, "died": 1}}, 0.0),
        (Member(role="rollout", index=0, incarnation="rollout-0-z"), {"done": 9}, 0.0),
    ]
    stats = STATS | {"ready": {"train/a": 7, "eval/a": 1}, "leased": {"train/a": 2}}
    states = task_states(graph, heard, QueueStats(**stats))
    assert states == {
        "a": TaskState(
            role="task-a",
            replicas=2,
            ready=7,
            leased=2,
            done=7,
            failed={"raised": 3, "died": 1},
            first_failure="ValueError: odd",
        ),
        "reference": TaskState(role="reference"),
    }
    assert task_states(graph, [], None)["a"] == TaskState(role="task-a")


def test_of_a_task_that_is_left_to_clients_the_queue_tells_and_no_client_counts_as_its_process() -> None:
    own = "tasks=[{name: a, reads: [reward], writes: [{name: x}]}, {name: b, reads: [reward], writes: [{name: z}]}]"
    graph = graph_of(load_job(EXAMPLE, [own, "trainer.external=true"]).spec)
    heard = [(Member(role="client", index=0, incarnation=f"client-0-{n}"), {"done": 5}, 0.0) for n in range(3)]
    stats = STATS | {"ready": {"train/a": 7}, "leased": {"train/b": 2}}
    assert task_states(graph, heard, QueueStats(**stats)) == {
        "a": TaskState(role="client", ready=7),
        "b": TaskState(role="client", leased=2),
    }


@given(st.lists(st.integers(0, 1000), max_size=200))
def test_a_histogram_counts_everybody_once(lags: list[int]) -> None:
    counts = histogram(lags)
    assert sum(counts) == len(lags)
    assert len(counts) <= LAG_BUCKETS
