"""A leader that dies after it has dismissed the others finds them again."""

from asyncflow.api.load import load_job
from asyncflow.local.lifecycle import DISMISSED_S, ExitStatus, ProcessTable, Start
from asyncflow.plan.job import plan


def test_those_who_were_dismissed_start_again_with_their_leader() -> None:
    table = ProcessTable(plan(load_job("examples/quickstart.yaml")).roles, now=0.0)
    replicas = {start.replica: start for start in table.due(0.0)}
    driver = next(replica for replica in replicas if replica.role == "driver")
    rollout = next(replica for replica in replicas if replica.role == "rollout")
    table.ended(rollout, ExitStatus(status=0), 10.0)
    table.ended(driver, ExitStatus(signal=9), 11.0)
    again = {start.replica for start in table.due(30.0)}
    assert {driver, rollout} <= again
    assert table.result is None


def test_those_who_end_only_after_the_leader_that_dismissed_them_start_again_too() -> None:
    table = ProcessTable(plan(load_job("examples/quickstart.yaml")).roles, now=0.0)
    replicas = {start.replica.role: start.replica for start in table.due(0.0)}
    table.ended(replicas["driver"], ExitStatus(signal=9), 11.0)
    table.due(12.0)
    table.ended(replicas["trainer"], ExitStatus(status=0), 13.0)
    assert table.due(13.0 + DISMISSED_S - 0.1) == []
    assert table.wake_at() == 13.0 + DISMISSED_S
    assert table.due(13.0 + DISMISSED_S) == [Start(replicas["trainer"], 1)]
    table.ended(replicas["trainer"], ExitStatus(status=0), 40.0)
    table.ended(replicas["driver"], ExitStatus(status=0), 41.0)
    assert table.result is not None
    assert table.result.ok
    assert table.due(100.0) == []
