"""The queue from threads and from processes that were forked: controller and units on sockets, no event loop here."""

import inspect
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncflow.errors import DeadlineExceeded, PeerLost, StaleHandle
from asyncflow.queue.blocking import BlockingPartition, BlockingQueue
from asyncflow.queue.client import QueueClient
from asyncflow.queue.partition import Partition
from asyncflow.queue.protocol.messages import TaskSpec
from asyncflow.rpc.columns import Jagged

sys.path.insert(0, str(Path(__file__).parent))
from blocking_world import Cluster

P = "open"


@contextmanager
def cluster(folder):
    made = Cluster(folder / "ledger")
    try:
        for index in range(2):
            made.start_unit(index)
        made.connect().declare([TaskSpec(partition=P, name="t", needs=["x"])], timeout=10)
        yield made
    finally:
        made.close()


def column(values):
    return Jagged.from_rows([[value] * 3 for value in values], "int64")


def first_of(got):
    return [int(got.row(i)[0]) for i in range(len(got))]


def test_rows_are_put_claimed_fetched_and_acknowledged(tmp_path):
    with cluster(tmp_path) as made:
        queue = made.connect()
        for start in (0, 4, 8):
            numbers = queue.put(P, {"x": column(range(start, start + 4))}, timeout=10)
            assert len(set(numbers.rows)) == 4
        first = queue.claim(partition=P, task="t", max_rows=8, min_rows=8, timeout=10)
        assert first_of(queue.fetch(first.rows, ["x"], timeout=10)["x"]) == list(range(8))
        assert queue.claim(partition=P, task="t", max_rows=8, min_rows=8, timeout=0).rows == []
        rest = queue.claim(partition=P, task="t", max_rows=8, timeout=10)
        assert first_of(queue.fetch(rest.rows, ["x"], timeout=10)["x"]) == [8, 9, 10, 11]
        assert queue.complete([*first.rows, *rest.rows], {}, timeout=10) == [True] * 12
        backwards = [row.row for row in rest.rows[::-1]]
        assert first_of(queue.fetch(backwards, ["x"], timeout=10)["x"]) == [11, 10, 9, 8]
        with pytest.raises(StaleHandle):
            queue.fetch([backwards[0], backwards[0] + 1000], ["x"], timeout=10)


def test_a_batch_is_completed_with_columns(tmp_path):
    with cluster(tmp_path) as made:
        queue = made.connect()
        queue.declare([TaskSpec(partition=P, name="next", needs=["y"])], timeout=10)
        for value in range(4):
            queue.put(P, {"x": column([value])}, timeout=10)
        batch = queue.claim(partition=P, task="t", max_rows=4, min_rows=4, timeout=10).rows
        assert queue.complete(batch, {"y": column([10, 11, 12, 13])}, timeout=10) == [True] * 4
        following = queue.claim(partition=P, task="next", max_rows=4, min_rows=4, timeout=10).rows
        got = queue.fetch(following, ["x", "y"], timeout=10)
        assert [y - x for x, y in zip(first_of(got["x"]), first_of(got["y"]), strict=True)] == [10] * 4


def test_many_threads_share_a_client_and_no_row_comes_twice(tmp_path):
    rows, threads = 240, 8
    with cluster(tmp_path) as made, ThreadPoolExecutor(threads) as pool:
        queue = made.connect()

        def put(number):
            queue.put(P, {"x": column([2 * number, 2 * number + 1])}, timeout=30)

        def take(_number):
            claimed = queue.claim(partition=P, task="t", max_rows=3, min_rows=3, timeout=30)
            return first_of(queue.fetch(claimed.rows, ["x"], timeout=30)["x"])

        puts = [pool.submit(put, number) for number in range(rows // 2)]
        taken = [value for part in pool.map(take, range(rows // 3)) for value in part]
        assert [future.result() for future in puts] == [None] * len(puts)
        assert sorted(taken) == list(range(rows))


def test_a_parked_claim_is_woken_by_a_put_of_another_thread(tmp_path):
    with cluster(tmp_path) as made, ThreadPoolExecutor(1) as pool:
        queue = made.connect()
        waiting = pool.submit(lambda: queue.claim(partition=P, task="t", max_rows=1, timeout=30))
        while not queue.stats(timeout=10).parked:
            pass
        row = queue.put(P, {"x": column([5])}, timeout=10).rows[0]
        assert [leased.row for leased in waiting.result(10).rows] == [row]


def test_a_claim_survives_the_restart_of_the_controller(tmp_path):
    with cluster(tmp_path) as made, ThreadPoolExecutor(1) as pool:
        queue = made.connect()
        waiting = pool.submit(lambda: queue.claim(partition=P, task="t", max_rows=1, timeout=60))
        while not queue.stats(timeout=10).parked:
            pass
        made.stop_controller()
        made.start_controller()
        row = queue.put(P, {"x": column([5])}, timeout=30).rows[0]
        assert [leased.row for leased in waiting.result(30).rows] == [row]


def test_without_a_controller_a_call_ends_at_its_deadline(tmp_path):
    with cluster(tmp_path) as made:
        made.stop_controller()
        with pytest.raises(DeadlineExceeded, match=r"queue.stats at the controller did not succeed within 0.5 s"):
            made.connect().stats(timeout=0.5)


def test_a_closed_client_says_so(tmp_path):
    with cluster(tmp_path) as made:
        queue = made.connect()
        queue.stats(timeout=10)
        queue.close()
        with pytest.raises(PeerLost, match="this client was closed"):
            queue.stats(timeout=10)


def test_a_claim_that_waits_ends_when_its_client_is_closed(tmp_path):
    with cluster(tmp_path) as made, ThreadPoolExecutor(1) as pool:
        queue, other = made.connect(), made.connect("other")
        waiting = pool.submit(lambda: queue.claim(partition=P, task="t", max_rows=1, timeout=60))
        while not other.stats(timeout=10).parked:
            pass
        queue.close()
        with pytest.raises(PeerLost, match="this client was closed"):
            waiting.result(10)
        while other.stats(timeout=10).parked:
            pass


def test_a_forked_child_has_connections_tickets_and_serials_of_its_own(tmp_path):
    with cluster(tmp_path) as made:
        queue = made.connect()
        queue.put(P, {"x": column([0, 1])}, timeout=10)
        mine = queue.claim(partition=P, task="t", max_rows=1, timeout=10)
        child = os.fork()
        if not child:
            status = 1
            try:
                status = _in_child(queue)
            finally:
                os._exit(status)
        queue.put(P, {"x": column([2])}, timeout=10)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        counted = queue.stats(timeout=10)
        assert counted.leased == {f"{P}/t": 2}
        assert first_of(queue.fetch(mine.rows, ["x"], timeout=10)["x"]) == [0]
        left = queue.claim(partition=P, task="t", max_rows=9, min_rows=3, timeout=10)
        assert sorted(first_of(queue.fetch(left.rows, ["x"], timeout=10)["x"])) == [2, 7, 8]


def _in_child(queue):
    numbers = queue.put(P, {"x": column([7, 8])}, timeout=10)
    claimed = queue.claim(partition=P, task="t", max_rows=1, timeout=10)
    got = first_of(queue.fetch(claimed.rows, ["x"], timeout=10)["x"])
    return 0 if len(set(numbers.rows)) == 2 and all(numbers.new) and got == [1] else 1


@pytest.mark.parametrize(("blocking", "awaited"), [(BlockingQueue, QueueClient), (BlockingPartition, Partition)])
def test_every_public_coroutine_function_is_there_as_one_that_blocks(blocking, awaited):
    names = {name for name in dir(awaited) if inspect.iscoroutinefunction(getattr(awaited, name)) and name[0] != "_"}
    assert len(names) >= 16
    for name in names:
        made = getattr(blocking, name)
        assert not inspect.iscoroutinefunction(made)
        if (blocking, name) != (BlockingQueue, "close"):
            assert (made.__wrapped__, made.__doc__) == (getattr(awaited, name), getattr(awaited, name).__doc__)
