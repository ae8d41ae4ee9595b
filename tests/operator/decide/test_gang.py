"""The trainer's ranks: one attempt at a time, begun together, given up together."""

import pytest
from model import World
from model_samples import START, dead, job_of, pod_view

from asyncflow.api.records import RoleRecord
from asyncflow.plan.roles import Readiness, Resources, RestartPolicy, Role
from asyncflow_operator.decide.failure import record_ends
from asyncflow_operator.decide.replicas import OVERDUE_S, caught_up, next_attempt, plan_gang
from asyncflow_operator.decide.times import Alarm

ROLE = Role(
    name="trainer",
    replicas=3,
    core=3,
    most=3,
    gang=True,
    resources=Resources(cpu=1.0),
    readiness=Readiness(path="/readyz", port="http", within_s=60.0),
    restart=RestartPolicy(max_restarts=3, window_s=3600.0, backoff_s=4.0, dismissed_s=15.0),
)
BEGUN = RoleRecord(attempt=2, begun=True)
WHOLE = RoleRecord(attempt=2, begun=True, whole=True)


def ranks(*indexes: int, attempt: int = 2, **changes):
    return [pod_view("trainer", index, attempt=attempt, **changes) for index in indexes]


def plan_replicas(pods, record, *, may_make=True, never_made=False, now=START + 100):
    return plan_gang(ROLE, pods, record, may_make=may_make, never_made=never_made, alarm=Alarm(now))


def made(moves):
    return [(replica.index, replica.attempt) for replica in moves.make]


def test_all_ranks_are_made_at_once_and_that_is_on_record_first():
    record, moves, _ = plan_replicas([], RoleRecord())
    assert made(moves) == [(0, 0), (1, 0), (2, 0)]
    assert (record.begun, record.whole) == (True, False)
    assert made(plan_replicas([], RoleRecord(), may_make=False)[1]) == []


def test_a_gang_that_never_was_whole_is_completed():
    record, moves, _ = plan_replicas(ranks(0, 2), BEGUN)
    assert made(moves) == [(1, 2)]
    assert record.attempt == 2


def test_a_gang_that_was_whole_begins_again_without_a_rank():
    pods = ranks(0, 2)
    record, moves, notes = plan_replicas(pods, WHOLE)
    assert (record.attempt, record.begun, record.whole) == (3, False, False)
    assert {delete.ref.name for delete in moves.remove} == {pod.name for pod in pods}
    assert made(moves) == []
    assert [note.reason for note in notes] == ["TrainerGone"]


def test_whether_a_begun_attempt_ran_is_not_guessed():
    assert made(plan_replicas([], BEGUN)[1]) == [(0, 3), (1, 3), (2, 3)]
    assert made(plan_replicas([], BEGUN, never_made=True)[1]) == [(0, 2), (1, 2), (2, 2)]


def test_a_rank_that_has_not_begun_and_is_outdated_ends_the_attempt():
    waits = ranks(1, phase="Pending", ready=False, started=None, outdated=True)
    for before in (BEGUN, WHOLE):
        record, moves, notes = plan_replicas([*ranks(0, 2), *waits], before)
        assert (record.attempt, record.begun) == (3, False)
        assert len(moves.remove) == 3
        assert "the spec has changed" in notes[0].message


def test_it_is_whole_once_all_have_been_seen():
    assert plan_replicas(ranks(0, 1, 2), BEGUN)[0] == WHOLE
    assert plan_replicas(ranks(0, 1, 2), WHOLE) == (WHOLE, plan_replicas(ranks(0, 1, 2), WHOLE)[1], ())


def test_no_rank_is_made_while_one_of_an_older_attempt_is_there():
    old = [*ranks(0, attempt=1, deleting=True), *ranks(1, attempt=1)]
    record, moves, _ = plan_replicas(old, RoleRecord(attempt=2))
    assert made(moves) == []
    assert [delete.ref.name for delete in moves.remove] == ["demo-trainer-1"]
    assert not record.begun


def test_a_smaller_gang_is_another_attempt():
    record, moves, _ = plan_replicas(ranks(0, 1, 2, 3), WHOLE)
    assert record.attempt == 3
    assert len(moves.remove) == 4


def test_after_a_failure_it_waits_for_the_backoff():
    stock = record_ends(ROLE, [dead("trainer", 0, attempt=2), *ranks(1, 2)], WHOLE, Alarm(START + 10))
    alarm = Alarm(START + 12)
    _, moves, _ = plan_gang(ROLE, [], stock.record, may_make=True, never_made=False, alarm=alarm)
    assert made(moves) == []
    assert alarm.again_in_s == 2.0
    assert made(plan_replicas([], stock.record, now=START + 14)[1]) == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize(("known", "pods"), [(7, []), (0, ranks(0, attempt=7))])
def test_an_attempt_that_is_known_elsewhere_is_never_used_again(known, pods):
    record = caught_up(RoleRecord(attempt=2), pods, known=known)
    assert (record.attempt, record.begun, record.whole) == (7, True, False)
    assert caught_up(record, pods, known=known) == record


def test_the_next_attempt_is_one_more():
    assert next_attempt(WHOLE) == RoleRecord(attempt=3)


def test_the_ranks_of_an_older_attempt_are_not_waited_for_on_a_node_that_does_not_answer():
    old = ranks(0, attempt=1, deleting=True, ends_by=START + 90)
    assert plan_replicas(old, RoleRecord(attempt=2), now=START + 90 + OVERDUE_S - 1)[1].remove == ()
    (forced,) = plan_replicas(old, RoleRecord(attempt=2), now=START + 90 + OVERDUE_S)[1].remove
    assert (forced.uid, forced.grace_s) == (old[0].uid, 0)
    silent = ranks(0, attempt=1, deleting=True, ends_by=START + 500, unreachable=True)
    assert [delete.grace_s for delete in plan_replicas(silent, RoleRecord(attempt=2))[1].remove] == [0]
    held = ranks(0, attempt=1, deleting=True, ends_by=START, forced=True)
    assert plan_replicas(held, RoleRecord(attempt=2))[1].remove == ()


def test_a_gang_that_loses_a_node_begins_again_without_anybodys_help():
    world = World(job_of(trainer={"replicas": 2}))
    world.settle()
    rank = world.with_role("trainer")[1]
    world.lose_node_of(rank)
    world.run_rounds(3)
    assert world.status.attempt == 0, "the cluster has not given the node up yet"
    world.take(world.pods[rank.name])
    world.settle()
    assert [pod.attempt for pod in world.with_role("trainer")] == [1, 1]
    assert world.status.failures["trainer"].restarts == 0
