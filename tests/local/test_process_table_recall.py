"""A leader that dies after it has dismissed the others finds them again."""

from dataclasses import replace

import pytest

from asyncflow.api.load import load_job
from asyncflow.local.lifecycle import ExitStatus, ProcessTable, Start
from asyncflow.plan.job import plan

ROLES = plan(load_job("examples/quickstart.yaml", ["limits.stopSeconds=20"])).roles
DISMISSED_S = 27.0
"""The job's limits.stopSeconds, and 7 s for the leader."""


def test_those_who_were_dismissed_start_again_with_their_leader() -> None:
    table = ProcessTable(ROLES, now=0.0)
    replicas = {start.replica: start for start in table.due(0.0)}
    driver = next(replica for replica in replicas if replica.role == "driver")
    rollout = next(replica for replica in replicas if replica.role == "rollout")
    table.ended(rollout, ExitStatus(status=0), 10.0)
    table.ended(driver, ExitStatus(signal=9), 11.0)
    assert table.recall(11.0) == []
    assert table.due(11.0) == [Start(rollout, 1)]
    again = {rollout, *(start.replica for start in table.due(40.0))}
    assert {driver, rollout} <= again
    assert table.result is None


def test_those_who_end_only_after_the_leader_that_dismissed_them_start_again_too() -> None:
    table = ProcessTable(ROLES, now=0.0)
    replicas = {start.replica.role: start.replica for start in table.due(0.0)}
    table.ended(replicas["driver"], ExitStatus(signal=9), 11.0)
    table.due(12.0)
    table.ended(replicas["trainer"], ExitStatus(status=0), 13.0)
    assert table.recall(13.0 + DISMISSED_S - 0.1) == []
    assert table.due(13.0 + DISMISSED_S - 0.1) == []
    assert table.wake_at() == 13.0 + DISMISSED_S
    assert table.recall(13.0 + DISMISSED_S) == []
    assert table.due(13.0 + DISMISSED_S) == [Start(replicas["trainer"], 1)]
    table.ended(replicas["trainer"], ExitStatus(status=0), 40.0)
    table.ended(replicas["driver"], ExitStatus(status=0), 41.0)
    assert table.result is not None
    assert table.result.ok
    assert table.wake_at() is None
    assert table.recall(100.0) == []
    assert table.due(100.0) == []


@pytest.mark.parametrize("killed", [9.5, 10.5], ids=["before one has ended", "after one has ended"])
def test_a_gang_of_which_only_some_were_dismissed_starts_again_as_a_whole(killed: float) -> None:
    roles = [replace(role, replicas=3) if role.gang else role for role in ROLES]
    table = ProcessTable(roles, now=0.0)
    replicas = [start.replica for start in table.due(0.0)]
    driver = next(replica for replica in replicas if replica.role == "driver")
    ranks = [replica for replica in replicas if replica.role == "trainer"]
    for replica, at in sorted([(driver, killed), (ranks[0], 10.0), (ranks[2], 11.0)], key=lambda end: end[1]):
        table.ended(replica, ExitStatus(signal=9) if replica == driver else ExitStatus(), at)
    assert [start.replica for start in table.due(20.0)] == [driver]
    assert table.recall(11.0 + DISMISSED_S - 0.1) == []
    assert table.wake_at() == 11.0 + DISMISSED_S
    assert table.recall(11.0 + DISMISSED_S) == [ranks[1]]
    assert (table.wake_at(), table.recall(50.0), table.due(50.0)) == (None, [], []), "one still ends"
    assert table.ended(ranks[1], ExitStatus(status=143), 51.0) == ([], None)
    assert table.due(51.0) == [Start(rank, 1) for rank in ranks]
