"""A client in a process that was forked: an identity, connections and a view of the queue of its own."""

import json
import os
import signal
import sys
import threading
import traceback
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from asyncflow.queue.blocking import BlockingPartition, connect

sys.path.insert(0, str(Path(__file__).parent))
from blocking_world import Elsewhere

P = "scores"


class Child:
    """A forked process that runs ``job``, whose result is read back as JSON."""

    def __init__(self, job):
        self.pipe, theirs = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            signal.alarm(60)
            status = 1
            try:
                os.write(theirs, json.dumps(job()).encode())
                status = 0
            finally:
                if status:
                    traceback.print_exc()
                os._exit(status)
        os.close(theirs)

    def result(self):
        with os.fdopen(self.pipe, "rb") as pipe:
            told = pipe.read()
        assert os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) == 0
        return json.loads(told)


class Signal:
    """Something that happens once, in one process of several."""

    def __init__(self):
        self.ends = os.pipe()

    def set(self):
        os.write(self.ends[1], b".")

    def wait(self):
        os.read(self.ends[0], 1)

    def close(self):
        for end in self.ends:
            os.close(end)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    made = Elsewhere(tmp_path_factory.mktemp("queue") / "ledger")
    yield made
    made.close()


@pytest.fixture
def alone(elsewhere):
    yield elsewhere
    with connect(elsewhere.address) as queue:
        BlockingPartition(queue, P).clear()


@contextmanager
def scores_at(made):
    with connect(made.address) as queue:
        scores = BlockingPartition(queue, P)
        scores.declare("grade", needs=["n"], lease_s=60.0)
        yield scores


def put_each(scores, values):
    for value in values:
        scores.put({"n": [value]}, timeout=30)


def claim_all(scores):
    had = []
    while rows := scores.claim("grade", 7, timeout=1.0):
        had += [int(value) for value in scores.get(rows, ["n"])["n"]]
        assert all(scores.complete(rows))
    return had


def test_parent_and_child_put_each_of_their_rows_once_and_share_the_claims(alone):
    def in_child():
        put_each(scores, range(1000, 1100))
        done.set()
        return claim_all(scores)

    with scores_at(alone) as scores, closing(Signal()) as done:
        put_each(scores, [-1])
        child = Child(in_child)
        put_each(scores, range(100))
        done.wait()
        mine = claim_all(scores)
        assert sorted(mine + child.result()) == [-1, *range(100), *range(1000, 1100)]
        assert scores.consumed("grade").done == 201


def test_a_child_of_a_child_and_the_threads_of_a_child_lose_no_row(alone):
    def in_child():
        grandchild = Child(lambda: put_each(scores, range(100, 120)))
        threads = [threading.Thread(target=put_each, args=(scores, [200 + n])) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return grandchild.result()

    with scores_at(alone) as scores:
        child = Child(in_child)
        put_each(scores, range(20))
        child.result()
        assert scores.consumed("grade").rows == 48


def test_a_forked_child_learns_of_restarts(alone):
    def in_child():
        put_each(scores, [1])
        ready.set()
        restarted.wait()
        return len(scores.rows(timeout=15).rows)

    with scores_at(alone) as scores, closing(Signal()) as ready, closing(Signal()) as restarted:
        child = Child(in_child)
        ready.wait()
        alone.restart_controller()
        restarted.set()
        assert child.result() == 1


def test_what_a_child_holds_is_given_to_others_when_it_dies(alone):
    with scores_at(alone) as scores:
        put_each(scores, [1, 2])
        (mine,) = scores.claim("grade", 1)
        (theirs,) = Child(lambda: [row.row for row in scores.claim("grade", 1)]).result()
        (again,) = scores.claim("grade", 1, timeout=20)
        assert (again.row, again.attempt) == (theirs, 1)
        assert scores.complete([mine, again]) == [True, True]


@pytest.mark.parametrize("used", [False, True])
def test_a_child_that_leaves_the_queue_ends_and_takes_nothing_from_its_parent(alone, used):
    def in_child():
        if used:
            put_each(scores, [1])
        visit.__exit__(None, None, None)
        return "left"

    visit = scores_at(alone)
    scores = visit.__enter__()
    put_each(scores, [0])
    (mine,) = scores.claim("grade", 1)
    assert Child(in_child).result() == "left"
    assert scores.complete([mine]) == [True]
    assert claim_all(scores) == [1] * used
    visit.__exit__(None, None, None)
