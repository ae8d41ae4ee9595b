"""Figures in the words of ``kubectl get``, and the watchdog that says when there are no new ones."""

import pytest
from model_samples import START, job_of, pending, pod_view

from asyncflow.api.durability import LimitsSpec
from asyncflow.api.status import (
    BestState,
    CheckpointState,
    DriverStatus,
    JobStatus,
    QueueDepth,
    RewardState,
    RolloutState,
    SetState,
    Staleness,
)
from asyncflow.plan import plan
from asyncflow_operator.decide.draft import ConditionSet
from asyncflow_operator.decide.progress import figures, reached, ready_of, set_stalled
from asyncflow_operator.decide.times import Alarm, to_rfc3339
from asyncflow_operator.observed import DriverProbe

LIMITS = LimitsSpec(stall_seconds=900)
BEGUN = JobStatus(start_time=to_rfc3339(START))
TRAINERS = [pod_view("trainer", started=START + 10)]


def stall_condition(
    *, now: float, seen: DriverStatus | None = None, failing_since: float | None = None, trainers=TRAINERS, status=BEGUN
):
    conditions, alarm = ConditionSet((), 1, now), Alarm(now)
    probe = DriverProbe(status=seen, at=START, failing_since=failing_since)
    set_stalled(conditions, limits=LIMITS, status=status, probe=probe, trainers=trainers, alarm=alarm)
    return conditions.current[0], alarm.again_in_s


def test_figures_are_the_drivers():
    seen = DriverStatus(
        step=12,
        steps=60,
        reward=0.9609375,
        tokens_per_second=828.5645490796835,
        eta_seconds=8000,
        staleness=Staleness(start=1.0, mean=0.4),
        version=12,
        queue=QueueDepth(ready=32),
        rollouts=tuple(RolloutState(id=state, state=state) for state in ("ready", "lagging", "draining")),
        checkpoint=CheckpointState(step=10),
        best=BestState(step=5, by="accuracy", value=0.5),
        eval_sets={"aime": SetState(accuracy=0.25)},
        waiting_for="1 rollout",
    )
    shown = figures(seen, ())
    assert (shown["reward"], shown["eval"], shown["tokens_per_second"]) == (0.9609, None, 828.6)
    assert (shown["best_step"], shown["eval_sets"]) == (5, {"aime": 0.25})
    assert (shown["progress"], shown["eta"], shown["staleness"], shown["queue_depth"]) == ("12/60", "2h13m", 1.0, 32)
    assert (shown["checkpoint_step"], shown["ready_rollouts"], shown["waiting_for"]) == (10, 1, "1 rollout")


def test_what_a_driver_does_not_know_yet_is_left_out():
    shown = figures(DriverStatus(steps=60), ())
    assert (shown["eta"], shown["checkpoint_step"], shown["best_step"], shown["reward"]) == ("", None, None, None)


def test_without_a_driver_only_pods_are_counted():
    rollouts = [pod_view("rollout", 0), pod_view("rollout", 1, ready=False), pod_view("rollout", 2, deleting=True)]
    assert figures(None, rollouts) == {"ready_rollouts": 1}


@pytest.mark.parametrize(
    ("seen", "patience"),
    [
        (DriverStatus(steps=60), 900),
        (DriverStatus(steps=60, step_p95=20.0), 200),
        (DriverStatus(steps=60, step_p95=1.0), 60),
        (DriverStatus(steps=60, step_p95=500.0), 900),
    ],
)
def test_patience_is_ten_steps_between_a_minute_and_the_limit(seen, patience):
    since = START + 10
    fine, again = stall_condition(now=since + patience - 1, seen=seen)
    assert (fine.status, again) == ("False", 1.0)
    stalled, _ = stall_condition(now=since + patience, seen=seen)
    assert (stalled.status, stalled.reason) == ("True", "NoStep")
    assert stalled.message.endswith(", after step 0 of 60")


def test_the_status_names_what_the_driver_waits_for():
    seen = DriverStatus(step=3, steps=60, last_step_at=to_rfc3339(START + 100), waiting_for="1 storage")
    stalled, _ = stall_condition(now=START + 1000, seen=seen)
    assert stalled.message == "No step for more than 15m, after step 3 of 60; it waits for 1 storage"


def test_a_job_that_is_paused_has_stalled_and_says_why():
    seen = DriverStatus(
        phase="Paused", steps=60, last_step_at=to_rfc3339(START), waiting_for="a person:\x1b[2J 9 of 16"
    )
    paused, again = stall_condition(now=START + 1, seen=seen)
    assert (paused.status, paused.reason, paused.message) == ("True", "Paused", "a person: [2J 9 of 16")
    assert again is None


def test_a_job_that_is_paused_shows_the_first_traceback():
    told = "raised: Traceback (most recent call last):\n  File\x1b[2J 'mine.py', line 3, in score\nKeyError: 'x'"
    seen = DriverStatus(
        phase="Paused",
        last_step_at=to_rfc3339(START),
        waiting_for="the reward to be fixed",
        rewards=RewardState(failed={"raised": 9}, first_failure=told),
    )
    paused, _ = stall_condition(now=START + 1, seen=seen)
    assert paused.message.splitlines() == ["the reward to be fixed", *told.replace("\x1b", " ").splitlines()]
    whole = "x" * 1024
    longest = DriverStatus(phase="Paused", waiting_for=whole, rewards=RewardState(first_failure="y\n" * 1024))
    paused, _ = stall_condition(now=START + 1, seen=longest)
    assert paused.message.startswith(whole)
    assert len(paused.message) <= 4096


def test_a_trainer_that_began_again_gets_its_time():
    seen = DriverStatus(step=3, steps=60, step_p95=6.0, last_step_at=to_rfc3339(START + 20))
    again = [pod_view("trainer", started=START + 500)]
    assert stall_condition(now=START + 550, seen=seen, trainers=again)[0].status == "False"
    lost = stall_condition(now=START + 20, seen=DriverStatus(steps=60), status=JobStatus())
    assert lost[0].status == "False", "of a status that somebody has emptied"


def test_a_job_starts_once_its_gang_is_on_record_and_a_process_runs():
    roles = plan(job_of()).roles
    runs, waits = pod_view("driver", ready=False), pending("driver")

    def phase(before, *pods, begun=True):
        return reached(before, roles, pods, ready_of(pods), begun=begun)

    assert phase("Pending", waits) == "Pending"
    assert phase("Pending", runs, begun=False) == "Pending"
    assert phase("Pending", runs) == "Starting"
    assert phase("Starting", waits, begun=False) == "Starting"
    assert phase("Running") == "Running"


def test_of_a_driver_that_is_silent_nobody_knows():
    assert stall_condition(now=START + 9000, failing_since=START)[0].status == "Unknown"
    seen = DriverStatus(step=3, steps=60, last_step_at=to_rfc3339(START + 20))
    assert stall_condition(now=START + 59, seen=seen, failing_since=START)[0].status == "False"
    assert stall_condition(now=START + 60, seen=seen, failing_since=START)[0].status == "Unknown"
