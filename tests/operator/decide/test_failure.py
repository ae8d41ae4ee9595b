"""Ends of processes: what they count as, once, within which window, and how long a replica stays missing after them."""

from dataclasses import replace

import pytest
from model_samples import START, dead, pod_view

from asyncflow.api.records import RoleRecord
from asyncflow.plan.roles import MOST_DISRUPTIONS, Readiness, Resources, RestartPolicy, Role
from asyncflow_operator.decide.failure import (
    SETTLED_S,
    PodEnd,
    delay,
    end_of,
    may_be_replaced,
    record_ends,
    starts_at,
)
from asyncflow_operator.decide.times import Alarm, from_rfc3339, to_rfc3339

POLICY = RestartPolicy(max_restarts=3, window_s=100.0, backoff_s=2.0, dismissed_s=15.0)


def role(*, gang: bool = False, leader: bool = False, policy: RestartPolicy = POLICY) -> Role:
    return Role(
        name="trainer" if gang else "driver" if leader else "rollout",
        replicas=4,
        core=4,
        most=4,
        resources=Resources(cpu=1.0),
        readiness=Readiness(path="/readyz", port="http", within_s=60.0),
        restart=policy,
        gang=gang,
        leader=leader,
    )


def ends(pods, record=None, *, now=START + 10, of=None):
    return record_ends(of or role(), pods, record or RoleRecord(), Alarm(now))


@pytest.mark.parametrize(
    ("pod", "end"),
    [
        (pod_view("rollout"), None),
        (pod_view("rollout", disrupted=True), None),
        (pod_view("rollout", deleting=True), PodEnd.DELETED),
        (dead("rollout", code=143, deleting=True), PodEnd.DELETED),
        (dead("rollout", code=1), PodEnd.FAILED),
        (dead("rollout", code=137, disrupted=True), PodEnd.EVICTED),
        (dead("rollout", code=2), PodEnd.REFUSED),
        (dead("rollout", code=3), PodEnd.DISRUPTED),
        (dead("rollout", code=3, disrupted=True), PodEnd.EVICTED),
        (dead("rollout", code=2, disrupted=True), PodEnd.EVICTED),
        (dead("rollout", code=0), PodEnd.DONE),
        (dead("rollout", code=0, exit_code=None), PodEnd.DONE),
        (dead("rollout", code=0, phase="Failed"), PodEnd.DONE),
        (dead("rollout", exit_code=None), PodEnd.FAILED),
    ],
)
def test_every_end_has_its_class(pod, end):
    assert end_of(pod) is end


def test_a_failure_is_entered_once_however_often_it_is_seen():
    pods = [dead("rollout", 1), pod_view("rollout", 0)]
    first = ends(pods)
    assert first.record.restarts == 1
    assert first.record.attempt == 1
    assert first.record.counted == (pods[0].uid,)
    assert [(note.type, note.reason) for note in first.notes] == [("Warning", "RolloutFailed")]
    again = ends(pods, first.record, now=START + 20)
    assert again.record == first.record
    assert again.notes == ()


def test_the_event_of_a_deletion_says_what_the_cluster_says_about_it():
    preempted = "default-scheduler: preempting to accommodate a higher priority pod"
    gone = replace(pod_view("rollout"), deleting=True, disrupted=True, disruption=preempted)
    (note,) = ends([gone]).notes
    assert (note.type, note.reason) == ("Normal", "RolloutGone")
    assert note.message == f"demo-rollout-0 was deleted ({preempted}): it is replaced"
    (note,) = ends([replace(gone, disruption="")]).notes
    assert note.message == "demo-rollout-0 was deleted: it is replaced"


def test_the_event_of_a_failure_ends_with_the_last_words():
    said = replace(dead("rollout"), last_words="Traceback ...\n  CUDA out of memory")
    message = ends([said]).notes[0].message
    assert message.endswith("exit code 1: it is replaced. Its last words: Traceback ... CUDA out of memory")
    evicted = {"exit_code": None, "exit_reason": "Evicted", "last_words": "The pod uses more disk than 1Gi"}
    message = ends([replace(said, **evicted)]).notes[0].message
    assert message.endswith("no exit code (Evicted): it is replaced. Its last words: The pod uses more disk than 1Gi")
    assert ends([replace(said, last_words="")]).notes[0].message.endswith("exit code 1: it is replaced")


def test_a_pod_that_was_taken_away_uses_no_budget_but_has_a_new_attempt():
    for pod in (dead("rollout", disrupted=True), pod_view("rollout", deleting=True)):
        found = ends([pod])
        record = found.record
        assert (record.restarts, record.attempt, record.counted) == (0, 1, (pod.uid,))
        assert [(note.type, note.reason) for note in found.notes] == [("Normal", "RolloutGone")]


def test_an_end_caused_by_another_process_uses_no_budget_but_waits_and_is_bounded():
    ranks = [dead("trainer", 0, code=1), dead("trainer", 1, code=3)]
    gang = role(gang=True, policy=replace(POLICY, max_restarts=0))
    first = ends(ranks, of=gang)
    assert (first.record.restarts, first.record.disruptions, first.record.attempt) == (0, 1, 1)
    assert (first.record.in_a_row, first.failure) == (1, None)
    assert "lost its work" in first.notes[0].message
    record = first.record
    for attempt in range(1, MOST_DISRUPTIONS + 1):
        last = ends([dead("trainer", attempt=attempt, code=3)], record, of=gang)
        record = last.record
        assert (last.failure is None) == (attempt < MOST_DISRUPTIONS)
    assert last.failure is not None
    assert last.failure.reason == "BudgetExceeded"
    assert f"{MOST_DISRUPTIONS} restarts of trainer" in last.failure.message
    window = START + 10 + POLICY.window_s
    later = ends([dead("trainer", attempt=record.attempt, code=3, at=window)], record, of=gang, now=window).record
    assert (later.restarts, later.disruptions) == (0, 1)


@pytest.mark.parametrize("cause", [{"disrupted": True}, {"deleting": True}])
def test_ranks_that_fail_for_want_of_one_that_was_taken_away_use_no_budget(cause):
    ranks = [dead("trainer", 0, code=1), dead("trainer", 1, code=137, **cause)]
    record = ends(ranks, of=role(gang=True)).record
    assert (record.restarts, record.disruptions, record.attempt) == (0, 0, 1)


def test_of_a_gang_one_end_counts_for_all_ranks():
    ranks = [dead("trainer", index) for index in range(4)]
    first = ends(ranks, of=role(gang=True))
    assert (first.record.restarts, first.record.attempt, first.record.counted) == (1, 1, ())
    assert ends(ranks, first.record, of=role(gang=True)).record == first.record
    refuses = ends([dead("trainer", code=2)], first.record, of=role(gang=True))
    assert (refuses.record, refuses.failure) == (first.record, None), "it is of an attempt that is over"


def test_only_ends_of_successors_count_as_in_a_row():
    crowd = ends([dead("rollout", index) for index in range(4)], of=role(policy=replace(POLICY, max_restarts=9)))
    assert (crowd.record.restarts, crowd.record.in_a_row) == (4, 1)
    record, now = RoleRecord(), START
    for attempt in range(4):
        now += 5
        record = ends([dead("rollout", attempt=attempt, started=now - 2, at=now)], record, now=now).record
        assert record.in_a_row == attempt + 1
    never_begun = dead("rollout", attempt=4, started=None, at=now + 25)
    assert ends([never_begun], record, now=now + 25).record.in_a_row == 5
    settled = dead("rollout", attempt=4, started=now, at=now + SETTLED_S)
    assert ends([settled], record, now=now + SETTLED_S).record.in_a_row == 1


def test_delays_double_up_to_a_minute():
    assert [delay(POLICY, ends) for ends in range(8)] == [0, 2, 4, 8, 16, 32, 60, 60]
    assert delay(POLICY, 10_000) == 60


def test_the_remains_keep_the_name_until_the_backoff_is_over():
    pod = dead("rollout", at=START + 9)
    record = ends([pod], now=START + 10).record
    early, late = Alarm(START + 10.5), Alarm(START + 11)
    assert not may_be_replaced(POLICY, record, pod, early)
    assert early.again_in_s == 0.5
    assert may_be_replaced(POLICY, record, pod, late)
    assert not may_be_replaced(POLICY, RoleRecord(), pod, late)


def test_a_failure_that_an_operator_with_a_fast_clock_has_recorded_delays_no_restart():
    gang, fast = role(gang=True), START + 3 * 3600
    record = ends([dead("trainer")], of=gang, now=fast).record
    found = ends([], record, of=gang, now=START + 10).record
    assert starts_at(POLICY, found) == START + 10 + POLICY.backoff_s
    assert ends([], found, of=gang, now=START + 11).record == found
    assert ends([], found, of=gang, now=START + 10 + POLICY.window_s).record.restarts == 0


def test_the_budget_is_one_of_a_window():
    record = RoleRecord()
    for attempt in range(4):
        now = START + 10 * attempt
        last = ends([dead("rollout", attempt=attempt, at=now)], record, now=now)
        record = last.record
    assert last.failure is not None
    assert last.failure.reason == "BudgetExceeded"
    assert "demo-rollout-0 ended with exit code 1" in last.failure.message
    assert "3 restarts of rollout within 1m40s are used up" in last.failure.message
    alarm = Alarm(START + 40)
    assert record_ends(role(), [], record, alarm).record == record
    assert alarm.again_in_s == 60, "when the window is over"
    forgotten = ends([], record, now=START + 100)
    assert forgotten.failure is None
    assert (forgotten.record.restarts, forgotten.record.window_start) == (0, None)
    assert forgotten.record.attempt == record.attempt
    later = ends([dead("rollout", attempt=4, at=START + 120)], record, now=START + 120)
    assert (later.record.restarts, later.failure) == (1, None)
    assert from_rfc3339(later.record.window_start) == START + 120


def test_the_end_that_is_told_of_a_budget_is_the_last_one():
    never_begun = dead("rollout", 2, exit_code=None, started=None, finished=None)
    pods = [dead("rollout", 0, code=5, at=START + 6), dead("rollout", 1, code=6, at=START + 5), never_begun]
    failure = ends(pods, RoleRecord(restarts=3, window_start=to_rfc3339(START))).failure
    assert failure is not None
    assert failure.message.startswith("demo-rollout-0 ended with exit code 5, and the 3 restarts")


def test_a_process_that_refuses_its_input_is_not_started_again():
    words = "error: spec.model.source: no such folder"
    failure = ends([dead("rollout", code=2, last_words=words), dead("rollout", 1)]).failure
    assert failure is not None
    assert failure.reason == "Refused"
    assert words in failure.message
    silent = ends([dead("rollout", code=2)]).failure
    assert silent is not None
    assert silent.message == "demo-rollout-0 ended with exit code 2, which no restart can fix."


def test_a_process_that_ended_by_itself_waits_for_the_end_of_the_job():
    pod = dead("rollout", code=0, at=START)
    alarm = Alarm(START + 1)
    assert record_ends(role(), [pod], RoleRecord(), alarm).record == RoleRecord()
    assert alarm.again_in_s == POLICY.dismissed_s - 1
    record = ends([pod], now=START + POLICY.dismissed_s).record
    assert (record.restarts, record.counted) == (0, (pod.uid,))
    assert ends([dead("driver", code=0)], of=role(leader=True), now=START + 1000).record == RoleRecord()


def test_a_record_holds_a_bounded_number_of_uids():
    pods = [dead("rollout", index) for index in range(300)]
    generous = role(policy=replace(POLICY, max_restarts=1000))
    first = ends(pods, of=generous).record
    assert len(first.counted) == 256
    rest = [pod for pod in pods if pod.uid not in first.counted]
    second = ends(rest, first, of=generous).record
    assert second.restarts == 300
