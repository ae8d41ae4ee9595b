"""Rows over links that are cut all the time, or through which nothing comes for longer than a lease: each once."""

import contextlib
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncflow.queue.blocking import BlockingPartition, BlockingQueue
from asyncflow.queue.client import QueueClient
from asyncflow.queue.protocol.messages import TaskSpec
from asyncflow.rpc.columns import Jagged
from cut_links import Proxy

sys.path.insert(0, str(Path(__file__).parent))
from blocking_world import Cluster

P = "open"
ROWS = 200


@contextlib.contextmanager
def proxied(folder, *, cut_every=0):
    cluster = Cluster(folder / "ledger")
    proxies = []
    try:
        cluster.start_unit(0)
        for server in (cluster.controller.server, cluster.units[0].server):
            proxies.append(Proxy(server.address, random.Random(len(proxies)), cut_every=cut_every))
        controller, unit = (proxy.address for proxy in proxies)
        peers = {"find": lambda role, _: controller if role == "controller" else unit, "units": lambda: [0]}
        queue = BlockingQueue(lambda: QueueClient(**peers, worker="w"))
        queue.declare([TaskSpec(partition=P, name="t", needs=["x"], lease_s=1.0)], timeout=30)
        yield queue, proxies
        queue.close()
    finally:
        for proxy in proxies:
            proxy.close()
        cluster.close()


def put_all(queue):
    for value in range(ROWS):
        queue.put(P, {"x": Jagged.from_rows([[value] * 3], "int64")}, timeout=60)


def take_all(queue, done):
    had = []
    while not done.is_set():
        claimed = queue.claim(partition=P, task="t", max_rows=7, timeout=0.5)
        if not claimed.rows:
            continue
        columns = queue.fetch(claimed.rows, ["x"], timeout=60)["x"]
        values = [int(columns.row(i)[0]) for i in range(len(columns))]
        had += [value for value, ok in zip(values, queue.complete(claimed.rows, {}, timeout=60), strict=True) if ok]
        if BlockingPartition(queue, P).consumed("t", timeout=60).done == ROWS:
            done.set()
    return had


def flow(queue, meanwhile=lambda: None):
    done = threading.Event()
    with ThreadPoolExecutor(3) as threads:
        taking = [threads.submit(take_all, queue, done) for _ in range(2)]
        putting = threads.submit(put_all, queue)
        meanwhile()
        putting.result(100)
        return sorted(value for taken in taking for value in taken.result(100))


def test_streams_that_are_cut_lose_and_double_no_row(tmp_path):
    with proxied(tmp_path, cut_every=1500) as (queue, proxies):
        assert flow(queue) == list(range(ROWS))
        assert sum(proxy.cuts for proxy in proxies) > 5


@pytest.mark.parametrize("cut_off", [[0], [1]])
def test_a_partition_longer_than_a_lease_loses_and_doubles_no_row(tmp_path, cut_off):
    with proxied(tmp_path) as (queue, proxies):

        def meanwhile():
            for number in cut_off:
                proxies[number].hold()
            threading.Event().wait(1.5)
            for number in cut_off:
                proxies[number].go_on()

        assert flow(queue, meanwhile) == list(range(ROWS))
