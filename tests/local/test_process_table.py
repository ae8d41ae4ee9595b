import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.local.lifecycle import (
    LONGEST_S,
    SETTLED_S,
    ExitStatus,
    LocalReplica,
    ProcessState,
    ProcessTable,
    RestartBudget,
    restart_delay,
)
from asyncflow.plan.roles import MOST_DISRUPTIONS, Readiness, Resources, RestartPolicy, Role

OK = ExitStatus()
KILLED = ExitStatus(signal=9)
REFUSED = ExitStatus(status=2)
DISRUPTED = ExitStatus(status=3)


def role(name, replicas=1, *, gang=False, leader=False, restarts=3, window_s=100.0, backoff_s=1.0):
    return Role(
        name=name,
        replicas=replicas,
        core=replicas,
        most=replicas,
        gang=gang,
        leader=leader,
        restart=RestartPolicy(max_restarts=restarts, window_s=window_s, backoff_s=backoff_s, dismissed_s=15.0),
        resources=Resources(cpu=1),
        readiness=Readiness(path="/readyz", port="http", within_s=1),
    )


def started(*roles, attempts=None):
    table = ProcessTable(roles, now=0.0, attempts=attempts)
    table.due(0.0)
    return table


def test_everything_starts_at_once_in_plan_order():
    table = ProcessTable([role("driver", leader=True), role("rollout", 2)], now=0.0)
    assert [str(start.replica) for start in table.due(0.0)] == ["driver-0", "rollout-0", "rollout-1"]
    assert table.due(0.0) == []
    assert table.wake_at() is None


def test_a_replica_starts_again_alone_after_its_backoff():
    table = started(role("rollout", 2))
    others, restart = table.ended(LocalReplica("rollout", 1), KILLED, 5.0)
    assert others == []
    assert restart is not None
    assert (restart.replicas, restart.attempt, restart.delay_s) == ((LocalReplica("rollout", 1),), 1, 1.0)
    assert table.due(5.9) == []
    assert table.wake_at() == 6.0
    assert table.due(6.0) == [(LocalReplica("rollout", 1), 1)]


def test_failures_in_a_row_wait_longer_and_a_long_life_ends_the_row():
    table, now, waits = ProcessTable([role("rollout", restarts=9)], now=50.0), 50.0, []
    table.due(now)
    for lived in (0.1, 0.1, 0.1, SETTLED_S):
        now += lived
        _, restart = table.ended(LocalReplica("rollout", 0), KILLED, now)
        waits.append(restart.delay_s)
        now += restart.delay_s
        table.due(now)
    assert waits == [1.0, 2.0, 4.0, 1.0]


def test_a_gang_starts_again_only_when_all_of_it_is_down():
    table = started(role("trainer", 3, gang=True))
    ranks = [LocalReplica("trainer", rank) for rank in range(3)]
    others, restart = table.ended(ranks[1], KILLED, 1.0)
    assert others == [ranks[0], ranks[2]]
    assert restart.replicas == tuple(ranks)
    assert table.wake_at() is None
    assert table.ended(ranks[0], KILLED, 2.0) == ([], None)
    assert table.due(99.0) == []
    assert table.ended(ranks[2], OK, 3.0) == ([], None)
    assert table.due(4.0) == [(rank, 1) for rank in ranks]


def test_a_gang_takes_along_ranks_that_were_done():
    table = started(role("trainer", 2, gang=True))
    table.ended(LocalReplica("trainer", 0), OK, 1.0)
    table.ended(LocalReplica("trainer", 1), KILLED, 2.0)
    assert len(table.due(3.0)) == 2


def test_the_leader_decides_and_others_are_not_needed():
    table = started(role("driver", leader=True), role("rollout"))
    table.ended(LocalReplica("rollout", 0), OK, 1.0)
    assert table.result is None
    table.ended(LocalReplica("driver", 0), OK, 2.0)
    assert table.result.ok


def test_without_a_leader_all_must_be_done():
    table = started(role("rollout", 2))
    table.ended(LocalReplica("rollout", 0), OK, 1.0)
    assert table.result is None
    table.ended(LocalReplica("rollout", 1), OK, 1.0)
    assert table.result.ok


def test_used_up_restarts_fail_the_job_and_name_the_culprit():
    table = started(role("driver", leader=True), role("rollout", 2, restarts=1))
    table.ended(LocalReplica("rollout", 0), KILLED, 1.0)
    _, restart = table.ended(LocalReplica("rollout", 1), ExitStatus(status=7), 2.0)
    assert restart is None
    assert (table.result.ok, table.result.culprit) == (False, LocalReplica("rollout", 1))
    assert "all 1 restarts within 100 s" in table.result.reason
    assert table.due(999.0) == []


def test_a_role_that_refuses_its_input_costs_no_restart():
    table = started(role("driver", leader=True, restarts=5))
    table.ended(LocalReplica("driver", 0), REFUSED, 1.0)
    assert not table.result.ok


def test_an_end_that_was_anothers_fault_costs_no_restart_of_its_role():
    table = started(role("driver", leader=True), role("trainer", 2, gang=True, restarts=0))
    others, restart = table.ended(LocalReplica("trainer", 1), DISRUPTED, 1.0)
    assert others == [LocalReplica("trainer", 0)]
    assert restart is not None
    assert (restart.attempt, restart.delay_s) == (1, 1.0)
    table.ended(LocalReplica("trainer", 0), KILLED, 1.5)
    table.due(9.0)
    assert table.ended(LocalReplica("trainer", 0), KILLED, 10.0)[1] is None
    assert not table.result.ok


def test_ends_that_were_anothers_fault_wait_longer_and_longer_and_are_bounded():
    table = started(role("trainer", restarts=0, window_s=1e9))
    now, waits = 0.0, []
    while table.result is None:
        _, restart = table.ended(LocalReplica("trainer", 0), DISRUPTED, now)
        if restart is not None:
            waits.append(restart.delay_s)
            now += restart.delay_s
            table.due(now)
    assert waits[:4] == [1.0, 2.0, 4.0, 8.0]
    assert len(waits) == MOST_DISRUPTIONS
    assert f"all {MOST_DISRUPTIONS} restarts" in table.result.reason


def test_a_stopped_table_starts_nothing_and_decides_nothing_more():
    table = started(role("driver", leader=True), role("trainer", 2, gang=True))
    table.ended(LocalReplica("trainer", 0), KILLED, 1.0)
    table.stop("SIGINT")
    table.stop("SIGTERM")
    table.ended(LocalReplica("trainer", 1), KILLED, 2.0)
    table.ended(LocalReplica("driver", 0), OK, 2.0)
    assert (table.result.ok, table.result.reason) == (False, "SIGINT")
    assert table.due(99.0) == []
    assert table.wake_at() is None


def test_who_ends_after_the_result_has_not_failed():
    table = started(role("driver", leader=True), role("trainer", restarts=0), role("rollout", 2))
    table.ended(LocalReplica("trainer", 0), KILLED, 1.0)
    assert not table.result.ok
    for index, status in enumerate((KILLED, OK)):
        table.ended(LocalReplica("rollout", index), status, 2.0)
    states = {str(replica): state for replica, (state, _) in table.replicas.items()}
    assert states == {"driver-0": "running", "trainer-0": "down", "rollout-0": "ended", "rollout-1": "done"}


def test_first_attempts_of_a_resumed_job():
    table = ProcessTable([role("rollout", 2), role("trainer")], now=0.0, attempts={"rollout": 4})
    assert [start.attempt for start in table.due(0.0)] == [4, 4, 0]


@given(times=st.lists(st.floats(0, 1000), min_size=1, max_size=40), most=st.integers(0, 5), window=st.floats(1, 300))
def test_no_window_holds_more_restarts_than_allowed(times, most, window):
    budget = RestartBudget(RestartPolicy(max_restarts=most, window_s=window, backoff_s=1, dismissed_s=15.0))
    granted = [now for now in sorted(times) if budget.grant(now)]
    for first in granted:
        assert sum(first <= now < first + window for now in granted) <= most


@given(failures=st.integers(1, 10_000), backoff=st.floats(0, 3600))
def test_a_delay_never_falls_and_has_a_ceiling(failures, backoff):
    policy = RestartPolicy(max_restarts=1, window_s=1, backoff_s=backoff, dismissed_s=15.0)
    assert restart_delay(policy, failures) <= restart_delay(policy, failures + 1) <= LONGEST_S


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_no_replica_ever_has_two_processes_attempts_only_grow_and_all_run_in_the_end(data):
    table = ProcessTable(
        [role("driver", leader=True), role("trainer", 3, gang=True, restarts=50), role("rollout", 2, restarts=50)],
        now=0.0,
    )
    running: dict[LocalReplica, int] = {}
    last: dict[LocalReplica, int] = {}
    now = 0.0
    for _ in range(30):
        now += data.draw(st.floats(0, 5))
        assert running.keys() >= set(table.recall(now))
        for replica, attempt in table.due(now):
            assert replica not in running
            assert attempt > last.get(replica, -1)
            running[replica] = last[replica] = attempt
        assert all(table.replicas[replica][0] in (ProcessState.RUNNING, ProcessState.ENDING) for replica in running)
        gang = {running[replica] for replica in running if replica.role == "trainer"}
        assert len(gang) <= 1
        if not running:
            continue
        replica = data.draw(st.sampled_from(sorted(running)))
        del running[replica]
        table.ended(replica, data.draw(st.sampled_from([OK, KILLED])), now)
    if table.result:
        assert table.due(now + 1000) == []
        return
    now += LONGEST_S
    table.recall(now)
    for replica in [each for each in running if table.replicas[each][0] is ProcessState.ENDING]:
        table.ended(replica, KILLED, now)
    table.due(now + LONGEST_S)
    assert {state for state, _ in table.replicas.values()} == {ProcessState.RUNNING}


@pytest.mark.parametrize(
    ("word", "text", "ok"), [(0, "exit status 0", True), (3 << 8, "exit status 3", False), (9, "SIGKILL", False)]
)
def test_an_exit_status_reads_the_word_of_waitpid(word, text, ok):
    status = ExitStatus.of(word)
    assert (str(status), status.ok) == (text, ok)


def states(table, role="rollout"):
    own = {replica.index: found for replica, found in table.replicas.items() if replica.role == role}
    return {index: (str(state), attempt) for index, (state, attempt) in own.items()}


def test_those_that_are_wanted_beyond_start_and_those_that_are_not_wanted_leave():
    table = started(role("driver", leader=True), role("rollout", 2))
    assert table.scale("rollout", 3, 5.0) == []
    assert table.wake_at() == 5.0
    assert table.due(5.0) == [(LocalReplica("rollout", 2), 0)]
    leaving = table.scale("rollout", 1, 6.0)
    assert leaving == [LocalReplica("rollout", 1), LocalReplica("rollout", 2)]
    assert states(table) == {0: ("running", 0), 1: ("leaving", 0), 2: ("leaving", 0)}
    assert table.scale("rollout", 1, 7.0) == [], "asked twice is asked once"


@pytest.mark.parametrize("status", [OK, KILLED, REFUSED, ExitStatus(status=143)])
def test_the_end_of_one_that_leaves_is_no_failure_however_it_ends(status):
    table = started(role("driver", leader=True), role("rollout", 2, restarts=0))
    table.scale("rollout", 1, 1.0)
    assert table.ended(LocalReplica("rollout", 1), status, 2.0) == ([], None)
    assert table.result is None
    assert states(table)[1] == ("left", 0)
    assert table.wake_at() is None


def test_one_that_is_wanted_again_starts_as_another_attempt_when_it_has_left():
    table = started(role("driver", leader=True), role("rollout", 2))
    table.scale("rollout", 1, 1.0)
    table.scale("rollout", 2, 2.0)
    assert table.due(2.0) == [], "two processes of one replica are never alive together"
    table.ended(LocalReplica("rollout", 1), OK, 3.0)
    assert table.due(3.0) == [(LocalReplica("rollout", 1), 1)]
    table.scale("rollout", 1, 4.0)
    table.ended(LocalReplica("rollout", 1), OK, 5.0)
    table.scale("rollout", 2, 6.0)
    assert table.due(6.0) == [(LocalReplica("rollout", 1), 2)]


def test_one_that_waits_for_its_restart_leaves_at_once():
    table = started(role("driver", leader=True), role("rollout", 2))
    table.ended(LocalReplica("rollout", 1), KILLED, 1.0)
    assert table.scale("rollout", 1, 1.5) == []
    assert table.due(100.0) == []
    assert states(table)[1] == ("left", 1)


def test_a_driver_that_fails_starts_nobody_who_has_left():
    table = started(role("driver", leader=True), role("rollout", 2))
    table.scale("rollout", 1, 1.0)
    table.ended(LocalReplica("rollout", 1), OK, 2.0)
    table.ended(LocalReplica("driver", 0), KILLED, 3.0)
    assert table.due(100.0) == [(LocalReplica("driver", 0), 1)]


def test_one_that_is_done_and_not_wanted_any_more_has_left_and_starts_only_when_it_is_wanted_again():
    table = started(role("driver", leader=True), role("rollout", 2))
    table.ended(LocalReplica("rollout", 1), OK, 1.0)
    assert table.scale("rollout", 1, 2.0) == []
    assert states(table)[1] == ("left", 0)
    table.ended(LocalReplica("driver", 0), KILLED, 3.0)
    assert table.due(100.0) == [(LocalReplica("driver", 0), 1)]
    table.scale("rollout", 2, 101.0)
    assert table.due(101.0) == [(LocalReplica("rollout", 1), 1)]


def test_nothing_is_scaled_once_the_job_is_over():
    table = started(role("driver", leader=True), role("rollout", 1))
    table.ended(LocalReplica("driver", 0), OK, 1.0)
    assert table.scale("rollout", 0, 2.0) == []
    assert table.scale("rollout", 5, 2.0) == []
    assert states(table) == {0: ("running", 0)}


@given(st.lists(st.tuples(st.sampled_from(["scale", "end"]), st.integers(0, 5)), max_size=40))
def test_just_those_that_are_wanted_run_in_the_end_and_attempts_only_grow(happens):
    table = started(role("driver", leader=True), role("rollout", 2, restarts=1000, backoff_s=0.0))
    now, wanted, used = 0.0, 2, {(0, 0), (1, 0)}
    running = {LocalReplica("rollout", 0), LocalReplica("rollout", 1)}

    def start():
        for replica, attempt in table.due(now):
            assert replica not in running
            assert (replica.index, attempt) not in used
            used.add((replica.index, attempt))
            running.add(replica)

    for what, number in happens:
        now += 1.0
        if what == "scale":
            wanted = number
            assert set(table.scale("rollout", wanted, now)) <= running
        elif LocalReplica("rollout", number) in running:
            running.discard(LocalReplica("rollout", number))
            table.ended(LocalReplica("rollout", number), KILLED, now)
        start()
    for replica in [each for each in running if each.index >= wanted]:
        running.discard(replica)
        table.ended(replica, OK, now)
    now += 100.0
    start()
    assert {replica.index for replica in running} == set(range(wanted))
