"""A leader that dies after it has dismissed the others finds them again."""

from asyncflow.api.load import load_job
from asyncflow.plan.job import plan
from asyncflow.substrates.local.crew import Crew
from asyncflow.substrates.local.exits import ExitStatus


def test_those_who_were_dismissed_start_again_with_their_leader() -> None:
    crew = Crew(plan(load_job("examples/quickstart.yaml")).roles, now=0.0)
    seats = {start.seat: start for start in crew.due(0.0)}
    driver = next(seat for seat in seats if seat.role == "driver")
    rollout = next(seat for seat in seats if seat.role == "rollout")
    crew.ended(rollout, ExitStatus(status=0), 10.0)
    crew.ended(driver, ExitStatus(signal=9), 11.0)
    again = {start.seat for start in crew.due(30.0)}
    assert {driver, rollout} <= again
    assert crew.verdict is None
