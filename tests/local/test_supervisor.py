import os
import signal
import socket
import time

import pytest

from asyncflow.local.folder import requests_of
from asyncflow.local.placement import PortReservation
from asyncflow.local.scaling import write_request

pytestmark = pytest.mark.process


JOB = {
    "driver": {},
    "controller": {},
    "storage": {},
    "trainer": {"replicas": 2, "gang": True},
    "rollout": {"replicas": 2, "does": ["children"]},
}
REPLICAS = ["driver-0", "controller-0", "storage-0", "trainer-0", "trainer-1", "rollout-0", "rollout-1"]


def test_a_job_succeeds_when_its_driver_does_and_the_others_are_told_to_end(start):
    run = start(driver={"does": ["done-after=0.3"]}, storage={}, rollout={"does": ["exit=0"]})
    assert run.wait() == 0
    assert run.ended() == ["storage-0"]
    states = {placed.role: placed.state for placed in run.record().processes}
    assert states["driver"] == "done"
    assert states["rollout"] == "done"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_everything_in_order(start, number, code):
    run = start(**JOB)
    pids = [pid for replica in REPLICAS for pid in run.pids(replica)]
    run.process.send_signal(number)
    assert run.wait() == code
    run.nothing_left(pids)
    ended = [replica.partition("-")[0] for replica in run.ended()]
    assert ended == ["rollout", "rollout", "trainer", "trainer", "driver", *ended[5:]]
    assert sorted(ended[5:]) == ["controller", "storage"]


def test_roles_that_refuse_to_end_are_killed_in_time(start):
    roles = {role: {**options, "does": ["stubborn"]} for role, options in JOB.items()}
    run = start(end_s=2.0, **roles)
    pids = [pid for replica in REPLICAS for pid in run.pids(replica)]
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    run.nothing_left(pids)


def test_a_job_out_of_time_fails_and_says_so(start):
    run = start(driver={}, rollout={}, active_s="0.5")
    assert run.wait() == 1
    assert "has not finished within its" in run.said()


def test_a_second_signal_ends_everything_at_once(start):
    run = start(end_s=600.0, driver={"does": ["stubborn"]}, rollout={"does": ["stubborn"]})
    pids = run.pids("driver-0") + run.pids("rollout-0")
    run.process.send_signal(signal.SIGINT)
    run.says("Stopping")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    run.nothing_left(pids)


def test_a_terminal_that_closes_ends_everything_in_order_though_it_says_so_twice(start):
    """The shell tells its jobs, and the kernel the foreground ones, once the shell has ended."""
    run = start(**JOB)
    pids = [pid for replica in REPLICAS for pid in run.pids(replica)]
    for _ in range(2):
        run.process.send_signal(signal.SIGHUP)
        time.sleep(0.05)
    assert run.wait() == 128 + signal.SIGHUP
    assert len(run.ended()) == len(REPLICAS)
    run.nothing_left(pids)


def test_a_stopped_role_still_ends_in_order(start):
    run = start(driver={}, rollout={})
    os.kill(run.pids("rollout-0")[0], signal.SIGSTOP)
    run.pids("driver-0")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143
    assert run.ended() == ["rollout-0", "driver-0"]


def test_sigkill_of_the_supervisor_leaves_nothing(start):
    with PortReservation(1) as ports:
        port = ports[0]
    run = start(**{**JOB, "driver": {"does": [f"listen={port}"]}})
    pids = [pid for replica in REPLICAS for pid in run.pids(replica)]
    assert len(run.reapers()) == 1
    run.process.kill()
    run.wait()
    run.nothing_left(pids)
    socket.create_server(("127.0.0.1", port)).close()


def test_a_killed_reaper_is_replaced_and_the_new_one_knows_the_run(start):
    run = start(rollout={"does": ["children"]})
    pids = run.pids("rollout-0")
    [old] = run.reapers()
    os.kill(old, signal.SIGKILL)
    run.wait_until(lambda: set(run.reapers()) - {old}, "another reaper")
    time.sleep(0.3)
    run.process.kill()
    run.wait()
    run.nothing_left(pids)


def test_a_killed_rollout_starts_again_alone_with_the_next_attempt(start):
    run = start(driver={}, rollout={"replicas": 2, "does": ["children"]})
    first = run.pids("rollout-1")
    run.pids("rollout-0")
    run.pids("driver-0")
    os.kill(first[0], signal.SIGKILL)
    second = run.pids("rollout-1", 1)
    run.wait_until(lambda: not any(run.alive(pid) for pid in first[:3]), "what the old rollout started")
    assert run.alive(run.pids("rollout-0")[0])
    assert run.alive(run.pids("driver-0")[0])
    run.wait_until(lambda: run.placed("rollout", 1).pid == second[0], "the record of who was started")
    assert run.placed("rollout", 1).attempt == 1
    assert run.placed("rollout", 0).attempt == 0
    log = (run.folder / "logs" / "rollout-1.log").read_text()
    assert "rollout-1 attempt 0 says hello" in log
    assert "attempt 0 ended: SIGKILL" in log
    assert "rollout-1 attempt 1 says hello" in log


def test_a_gang_ends_and_starts_again_as_one(start):
    run = start(driver={}, trainer={"replicas": 3, "gang": True, "does": ["stubborn"]})
    ranks = [run.pids(f"trainer-{rank}")[0] for rank in range(3)]
    driver = run.pids("driver-0")
    os.kill(ranks[1], signal.SIGKILL)
    for rank in range(3):
        run.pids(f"trainer-{rank}", 1)
    assert not any(run.alive(pid) for pid in ranks)
    assert run.alive(driver[0])


@pytest.mark.parametrize("rank", ["0", "1", "2"])
def test_a_gang_of_which_a_rank_cannot_be_started_starts_again_as_one(start, rank):
    run = start(driver={}, trainer={"replicas": 3, "gang": True, "missing": {rank: 2}})
    pids = [run.pids(f"trainer-{number}", 2)[0] for number in range(3)]
    assert all(map(run.alive, pids))
    assert not list(run.cwd.glob(f"trainer-{rank}.[01].json"))
    assert "cannot be started: " in (run.folder / "logs" / f"trainer-{rank}.log").read_text()


@pytest.mark.parametrize("ranks", [[1], [0, 1]])
def test_a_disk_that_does_not_take_a_certificate_costs_a_restart_and_no_more(start, ranks):
    run = start(driver={}, trainer={"replicas": 2, "gang": True, "full": dict.fromkeys(ranks, 1)})
    pids = run.pids("driver-0") + [run.pids(f"trainer-{index}", 1)[0] for index in range(2)]
    log = run.folder / f"logs/trainer-{ranks[0]}.log"
    assert "cannot be started: [Errno 28] No space left on device" in log.read_text()
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143
    assert [run.placed("trainer", index).restarts for index in range(2)] == [1, 1]
    run.nothing_left(pids)


def test_a_gang_that_can_never_be_started_ends_the_run_and_says_why(start):
    run = start(driver={}, trainer={"replicas": 3, "gang": True, "restarts": 1, "missing": {"0": 99}})
    assert run.wait() == 1
    said = run.said()
    assert "trainer-0 cannot be started (No such file or directory), and all 1 restarts" in said
    assert "Traceback" not in said


def test_when_the_restarts_are_used_up_the_job_fails_and_says_why(start):
    run = start(driver={}, rollout={"restarts": 2, "does": ["crash-below=99"]})
    assert run.wait() == 1
    said = run.said()
    assert "rollout-0 ended with exit status 1 and all 2 restarts" in said
    assert "attempt 2 crashes" in said
    assert "rollout-0.log" in said
    assert "refused: False" in said
    assert said.count("wanted=False") == 3, "nobody told the rollout to end"
    assert "Stopping(reason='rollout-0 failed')" in said
    assert run.ended() == ["driver-0"] or not (run.cwd / "driver-0.0.json").exists()


def test_a_role_that_refuses_its_input_is_not_started_again(start):
    run = start(driver={"does": ["exit=2"]}, rollout={})
    assert run.wait() == 1
    said = run.said()
    assert "refused its input" in said
    assert "driver-0.log: " not in said, "the log is removed with the folder of the start"
    assert "refused: True" in said
    assert [placed.attempt for placed in run.record().processes] == [0, 0]


def test_a_crash_loop_that_ends_in_time_does_no_harm(start):
    run = start(driver={"does": ["crash-below=2", "done-after=0.1"]}, rollout={"does": ["exit=0"]})
    assert run.wait() == 0
    assert run.placed("driver", 0).restarts == 2


def test_a_resumed_run_never_uses_an_attempt_again(start):
    assert start(driver={"does": ["crash-below=1", "exit=0"]}).wait() == 0
    run = start(driver={"does": ["exit=0"]})
    assert run.wait() == 0
    assert run.record().processes[0].attempt == 2


def test_a_role_that_was_away_for_a_while_never_uses_an_attempt_again(start):
    both = {"driver": {"does": ["done-after=0.1"]}, "rollout": {"does": ["exit=0"]}}
    for roles in (both, {"driver": both["driver"]}):
        assert start(**roles).wait() == 0
    run = start(**both)
    assert run.wait() == 0
    assert {placed.role: placed.attempt for placed in run.record().processes} == {"driver": 2, "rollout": 1}


def test_a_run_whose_record_is_damaged_is_resumed_with_new_attempts(start):
    run = start(driver={"does": ["crash-below=1", "exit=0"]})
    assert run.wait() == 0
    (run.folder / "run" / "processes.json").write_bytes(bytes(100))
    again = start(driver={"does": ["exit=0"]})
    assert again.wait() == 0
    assert again.record().processes[0].attempt == 2


def test_what_a_killed_supervisor_left_has_ended_before_the_next_run_begins(start):
    first = start(driver={}, rollout={"does": ["children"]})
    rollout, marked, unmarked, elsewhere = first.pids("rollout-0")
    first.pids("driver-0")
    reaper = first.reapers()[0]
    os.kill(reaper, signal.SIGSTOP)
    try:
        first.process.kill()
        first.wait()
        second = start(driver={}, rollout={})
        second.pids("driver-0", 1)
        assert not any(map(second.alive, [rollout, marked, elsewhere]))
    finally:
        os.kill(reaper, signal.SIGCONT)
    second.wait_until(lambda: not second.alive(unmarked), "the stopped reaper to do its work")
    second.process.send_signal(signal.SIGTERM)
    assert second.wait() == 143


SCALED = {"driver": {}, "rollout": {"replicas": 1, "most": 4}}


def ask(run, replicas):
    write_request(requests_of(run.folder), "rollout", replicas)


def test_rollouts_join_and_leave_and_nobody_else_is_restarted(start):
    run = start(**SCALED)
    driver, first = run.pids("driver-0"), run.pids("rollout-0")
    ask(run, 3)
    second, third = run.pids("rollout-1"), run.pids("rollout-2")
    run.wait_until(lambda: [(each.wanted, each.by) for each in run.record().scales] == [(3, "person")], "the record")
    ask(run, 1)
    run.wait_until(lambda: sorted(run.ended()) == ["rollout-1", "rollout-2"], "the others to leave in order")
    run.wait_until(lambda: {run.placed("rollout", index).state for index in (1, 2)} == {"left"}, "the record of it")
    assert not any(map(run.alive, second + third))
    ask(run, 2)
    again = run.pids("rollout-1", 1)
    os.kill(again[0], signal.SIGKILL)
    run.pids("rollout-1", 2)
    assert run.alive(driver[0])
    assert run.alive(first[0])


def test_one_that_does_not_leave_in_time_is_killed(start):
    run = start(driver={}, rollout={"replicas": 2, "most": 2, "does": ["stubborn"]})
    stubborn = run.pids("rollout-1")
    run.pids("rollout-0")
    ask(run, 1)
    run.wait_until(lambda: not run.alive(stubborn[0]), "it to be killed")
    run.wait_until(lambda: run.placed("rollout", 1).state == "left", "the record of it")
    assert run.alive(run.pids("rollout-0")[0])


def test_what_was_asked_for_counts_for_the_next_supervisor_too(start):
    first = start(**SCALED)
    first.pids("driver-0")
    ask(first, 3)
    first.pids("rollout-2")
    first.process.kill()
    first.wait()
    second = start(**SCALED)
    for index, attempt in ((0, 1), (1, 1), (2, 1)):
        second.pids(f"rollout-{index}", attempt)


def test_where_there_is_no_place_for_all_there_are_as_many_as_there_is_place_for(start):
    run = start(driver={}, rollout={"replicas": 1, "most": 4, "places": 2})
    run.pids("rollout-0")
    ask(run, 4)
    run.pids("rollout-1")
    run.wait_until(lambda: run.record().scales[0].wanted == 2, "the record of it")
    assert "this machine is full" in run.record().scales[0].problem
    ask(run, 1)
    run.wait_until(lambda: run.ended() == ["rollout-1"], "it to leave")
    run.wait_until(lambda: run.record().scales[0].problem == "", "the record of that")


def test_a_policy_that_cannot_be_followed_is_told_and_the_run_goes_on(start):
    run = start(driver={"does": ["done-after=0.5"]}, rollout={"replicas": 1, "most": 4, "deaf": True})
    assert run.wait() == 0
    assert "rollout: the built-in policy is no longer followed" in run.said()
