"""A leader that dies after it has dismissed the others finds them again."""

from asyncflow.api.load import load_job
from asyncflow.local.lifecycle import ExitStatus, ProcessTable
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
