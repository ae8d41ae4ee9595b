"""A lease task as a data set: any number of loader workers, each sample once, nothing lost, an end."""

import asyncio
import gc
import multiprocessing
import os
import threading
import time
import weakref
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from asyncflow.api.names import TLS_ENV  # noqa: E402
from asyncflow.errors import DeadlineExceeded, Refused, StaleHandle  # noqa: E402
from asyncflow.local.issuer import Issuer  # noqa: E402
from asyncflow.queue.blocking import BlockingPartition, connect  # noqa: E402
from asyncflow.queue.client import aconnect  # noqa: E402
from asyncflow.queue.torch import QueueAddress, StreamingDataset  # noqa: E402
from asyncflow.queue.torch.dataset import Consumer, _end_with_parent  # noqa: E402
from asyncflow.queue.values import encode  # noqa: E402
from asyncflow.rpc.columns import Jagged  # noqa: E402
from asyncflow.rpc.shm import SHARED_MEMORY_ENV  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

P = "train"
ROWS = 12
LEASE_S = 2.0


@pytest.fixture
def dataset(served):
    made = []

    def make(**options):
        options = {"queue": served.address, "task": "load", "columns": ["prompt"], "rows": 5} | options
        made.append(StreamingDataset(partition=P, **{"patience_s": 20.0} | options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def loader(dataset, workers=0, **options):
    options = {"in_order": False, "timeout": 60 if workers else 0} | options
    return DataLoader(dataset, batch_size=None, num_workers=workers, **options)


def serials(batches):
    return [meta.serial for batch in batches for meta in batch.metas]


@pytest.mark.parametrize("workers", [0, 4])
@pytest.mark.parametrize("acknowledge", ["next", "explicit"])
def test_each_sample_comes_once(served, dataset, workers, acknowledge):
    served.fill(range(40), close=1)
    data, seen = dataset(acknowledge=acknowledge), []
    for batch in loader(data, workers):
        for index, meta in enumerate(batch.metas):
            assert batch.columns["prompt"][index].tolist() == [10 * meta.serial] * meta.tokens
        batch.columns["prompt"].values.zero_()
        seen += serials([batch])
        if acknowledge == "explicit":
            assert data.complete(batch) == [True] * len(batch)
    assert sorted(seen) == list(range(40))
    stats = served.stats()
    assert (stats.ready["train/load"], stats.leased["train/load"], stats.lease_expiries) == (0, 0, 0)
    assert stats.redeliveries == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_two_consumers_share_the_rows_and_both_end(served, dataset, workers):
    served.fill(range(40), close=1)
    seen = []
    # No pool: a process that is forked by a pool's thread fails at its end, where it would join that thread.
    consumers = [
        threading.Thread(target=lambda data: seen.extend(serials(loader(data, workers))), args=[dataset(rows=2)])
        for _ in range(2)
    ]
    for consumer in consumers:
        consumer.start()
    for consumer in consumers:
        consumer.join(60)
    assert sorted(seen) == list(range(40))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", ["close", "expect"])
def test_an_open_partition_ends_when_its_producers_say_so(served, how, workers):
    with connect(served.address) as queue:
        scores = BlockingPartition(queue, "scores")
        scores.declare("load", ["prompt"])
        scores.put({"prompt": np.arange(20)})
        seen, ended = [], threading.Event()

        def consume(data):
            for batch in loader(data, workers):
                seen.extend(int(batch.columns["prompt"][row]) for row in range(len(batch)))
            ended.set()

        options = {"task": "load", "columns": ["prompt"], "rows": 3, "patience_s": 30.0}
        with StreamingDataset(queue=served.address, partition="scores", **options) as data:
            consumer = threading.Thread(target=consume, args=[data])
            consumer.start()
            scores.put({"prompt": np.arange(20, 30)})
            if how == "close":
                scores.close()
            else:
                scores.expect(30)
            consumer.join(60)
        assert ended.is_set()
        assert sorted(seen) == list(range(30))


def test_certificates(serving, tmp_path):
    issuer = Issuer(tmp_path / "tls")
    with serving(issuer=issuer) as served:
        served.fill(range(ROWS), close=1)
        where = QueueAddress(address=served.address, tls=issuer.issue("client"))
        with StreamingDataset(queue=where, partition=P, task="load", columns=["prompt"], rows=5) as data:
            assert sorted(serials(data)) == list(range(ROWS))


def test_a_client_shows_the_certificate_that_the_environment_names(serving, tmp_path, monkeypatch):
    monkeypatch.setenv(SHARED_MEMORY_ENV, "off")
    issuer = Issuer(tmp_path / "tls")
    with serving(issuer=issuer) as served:
        with pytest.raises(DeadlineExceeded), connect(served.address, timeout=0.5):
            pass
        monkeypatch.setenv(TLS_ENV, str(issuer.issue("client")))
        with connect(served.address) as queue:
            assert queue.stats(timeout=10).live == 0


def test_what_was_not_acknowledged_comes_again(served, dataset):
    served.fill(range(ROWS), close=1)
    iterator = iter(dataset())
    first, second = next(iterator), next(iterator)
    assert len(first) == len(second) == 5
    iterator.close()
    assert served.stats().leased["train/load"] == 0
    assert sorted(serials([first]) + serials(dataset())) == list(range(ROWS))


def test_no_more_than_asked_for_is_prefetched(served, dataset):
    served.fill(range(ROWS), close=1)
    for prefetch in (0, 2):
        iterator = iter(dataset(rows=1, prefetch=prefetch))
        next(iterator)
        if prefetch:
            while served.stats().leased["train/load"] < 1 + prefetch:
                pass
        assert served.stats().leased["train/load"] == 1 + prefetch
        next(iterator)
        assert served.stats().leased["train/load"] <= 1 + prefetch
        iterator.close()


def test_whole_groups(served, dataset):
    served.fill(range(4), size=3, close=1)
    batches = list(loader(dataset(task="whole", rows=7), 2))
    for batch in batches:
        assert sorted(m.sample for m in batch.metas) == sorted(list(range(3)) * (len(batch) // 3))
    assert sorted(serials(batches)) == sorted(list(range(4)) * 3)


@pytest.mark.parametrize("workers", [0, 2])
def test_outputs_are_written_with_the_acknowledgement(served, dataset, workers):
    served.fill(range(ROWS), close=1)
    data = dataset(task="score", acknowledge="explicit")
    for batch in loader(data, workers):
        scores = [row.sum(dtype=torch.float32) for row in map(batch.columns["prompt"].__getitem__, range(len(batch)))]
        assert all(data.complete(batch, {"score": scores}))
    with StreamingDataset(queue=served.address, partition=P, task="load", columns=["score"], rows=ROWS) as second:
        for batch in second:
            for index, meta in enumerate(batch.metas):
                assert batch.columns["score"][index] == 10.0 * meta.serial * meta.tokens


def test_a_batch_is_held_as_long_as_it_takes_also_after_its_worker_is_gone(served, dataset):
    served.fill(range(ROWS), close=1)
    data = dataset(acknowledge="explicit", rows=3)
    batches = list(loader(data, 2))
    time.sleep(1.5 * LEASE_S)
    assert served.stats().leased["train/load"] == ROWS
    assert all(all(data.complete(batch)) for batch in batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_lost_consumer_held_comes_again(served, dataset, workers):
    rows = 15  # so that each claim finds five, whichever worker is first
    served.fill(range(rows), close=1)
    context = multiprocessing.get_context("fork")
    theirs, ours = context.Pipe()
    child = context.Process(target=_hold, args=(dataset(acknowledge="explicit"), ours, workers))
    child.start()
    assert theirs.recv() == 5
    child.kill()
    child.join()
    assert sorted(serials(dataset())) == list(range(rows))
    assert served.stats().redeliveries >= 5


def _hold(data, pipe, workers):
    iterator = iter(loader(data, workers))
    pipe.send(len(next(iterator)))
    pipe.recv()


@pytest.mark.parametrize("alive", [True, False])
def test_a_loader_worker_ends_with_its_parent_which_may_not_be_the_process_that_forked_it(monkeypatch, alive):
    parent = SimpleNamespace(pid=os.getpid(), is_alive=lambda: alive)  # as if a fork server had forked this process
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: parent)
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    asyncio.run(_end_with_parent())
    assert ended == ([] if alive else [1])


def test_a_process_is_forked_only_when_no_thread_is_connecting(dataset, monkeypatch):
    connecting, client, data = threading.Event(), QueueAddress.client, dataset()

    def slow(self, worker=""):
        connecting.set()
        time.sleep(0.1)
        return client(self, worker)

    monkeypatch.setattr(QueueAddress, "client", slow)
    opening = threading.Thread(target=data._consumer)
    opening.start()
    connecting.wait(10)
    child = multiprocessing.get_context("fork").Process(target=data._consumer)
    child.start()
    child.join(5)
    child.kill()
    opening.join(10)
    assert child.exitcode == 0


def test_a_process_may_end_without_closing_its_data_set(served, dataset):
    served.fill(range(ROWS), close=1)
    data = dataset()
    batches = iter(data)
    next(batches)
    ending = next(each for each in weakref.finalize._registry if each.peek()[1] == data._consumer().close)
    assert ending.atexit
    ending()
    assert served.stats().leased["train/load"] == 0
    batches.close()


def test_loader_workers_take_nothing_when_their_process_is_gone(served, dataset):
    served.fill(range(5))
    context = multiprocessing.get_context("fork")
    theirs, ours = context.Pipe()
    child = context.Process(target=_hold, args=(dataset(), ours, 2))
    child.start()
    assert theirs.recv() == 5
    while served.stats().parked.get("train/load") != 2:
        pass
    child.kill()
    child.join()
    while served.client_count():
        pass
    served.fill(range(5, ROWS), close=1)
    assert sorted(serials(dataset())) == list(range(5, ROWS))


def test_a_controller_that_restarts_is_waited_for(served, dataset):
    served.fill(range(ROWS), close=1)
    iterator = iter(dataset(rows=1))
    seen = [next(iterator) for _ in range(3)]
    served.restart_controller()
    assert sorted(serials([*seen, *iterator])) == list(range(ROWS))


def test_what_is_never_completed_is_given_back_when_the_data_set_is_closed(served, dataset):
    served.fill(range(ROWS), close=1)
    data = dataset(acknowledge="explicit", rows=1)
    batches = []
    for batch in loader(data, 2, prefetch_factor=3):
        batches.append(batch)
        if len(batches) == 3:  # the workers have claimed more
            break
    data.complete(batches[0])
    data.give_back(batches[1], reason="not now")
    data.close()
    stats = served.stats()
    assert (stats.leased["train/load"], stats.ready["train/load"]) == (0, ROWS - len(batches[0]))


def test_a_task_that_writes_is_not_acknowledged_by_going_on(served, dataset):
    served.fill(range(ROWS), close=1)
    with pytest.raises(Refused, match="writes"):
        list(dataset(task="score"))


def test_a_stream_that_dries_up_says_so(served, dataset):
    served.fill(range(ROWS))
    iterator = iter(dataset(rows=ROWS, patience_s=0.3))
    assert len(next(iterator)) == ROWS
    with pytest.raises(DeadlineExceeded, match="no row became ready within"):
        next(iterator)


def test_rows_whose_bytes_were_lost_are_passed_over(served, dataset):
    served.fill(range(ROWS))
    data = dataset(rows=1, prefetch=0)
    iterator = iter(data)
    next(iterator)
    fetch, failed = data._consumer().client.fetch, []

    async def fail_once(rows, columns, *, timeout):
        if not failed:
            failed.append(rows)
            raise StaleHandle("gone", where="here")
        return await fetch(rows, columns, timeout=timeout)

    data._consumer().client.fetch = fail_once
    served.close_partition(1)
    assert len(serials(iterator)) == ROWS - 1
    assert served.stats().redeliveries == 1


def test_a_column_that_rows_lack_ends_the_iteration(served, dataset):
    served.fill(range(1), close=1)
    with pytest.raises(Refused, match="has no column 'nothing'"):
        next(iter(dataset(columns=["prompt", "nothing"])))
    assert serials(dataset()) == [0]


def test_an_iteration_may_be_ended_by_the_garbage_collector_in_the_thread_of_the_client(served, dataset):
    served.fill(range(2), close=1)
    data = dataset(rows=1)
    gc.disable()  # until it is told to, lest it passes in the thread of the queue
    try:
        knot = [iter(data)]
        knot.append(knot)
        assert len(next(knot[0])) == 1
        collected = Future()
        del knot
        data._consumer().queue._loop.call_soon_threadsafe(lambda: collected.set_result(gc.collect()))
        assert collected.result(10)
    finally:
        gc.enable()
    assert serials(data) == [0, 1]


def test_a_client_that_found_no_queue_leaves_no_thread(monkeypatch):
    monkeypatch.setattr("asyncflow.queue.torch.dataset.aconnect", partial(aconnect, timeout=0.05))
    before = threading.active_count()
    with pytest.raises(DeadlineExceeded):
        Consumer(QueueAddress(address="tcp://127.0.0.1:1"))
    assert threading.active_count() == before


def test_columns_keep_their_dtypes(served, dataset):
    columns = {
        "brain": lambda metas: Jagged.from_rows([[0x3F80, 0x4000] for _ in metas], "bfloat16"),
        "image": lambda metas: Jagged.from_rows([_image(m) for m in metas], "float32", inner=(2, 3)),
        "reward": lambda metas: Jagged.from_rows([float(m.serial) for m in metas], "float64", inner=None),
        "text": lambda metas: encode([f"né {m.serial}" for m in metas]),
        "thing": lambda metas: encode([{"a": [m.serial]} for m in metas]),
    }
    served.fill(range(ROWS), columns=columns, close=1)
    for batch in loader(dataset(columns=["prompt", *columns]), 1):
        for i, meta in enumerate(batch.metas):
            row = {name: column[i] for name, column in batch.columns.items()}
            assert row["brain"].dtype == torch.bfloat16
            assert row["brain"].tolist() == [1.0, 2.0]
            assert torch.equal(row["image"], torch.from_numpy(_image(meta)))
            assert (row["reward"].shape, float(row["reward"])) == ((), meta.serial)
            assert row["text"] == f"né {meta.serial}"
            assert row["thing"] == {"a": [meta.serial]}


def _image(meta):
    return torch.full((meta.tokens, 2, 3), meta.serial, dtype=torch.float32).numpy()


def test_an_open_partition(served):
    with connect(served.address) as queue:
        corpus = BlockingPartition(queue, "corpus")
        corpus.declare("grade", needs=["text", "length"], writes=["score"])
        corpus.put({"text": ["a", "bb", "ccc"], "length": torch.tensor([1, 2, 3])}, keys=["x", "y", "z"])
        queue.close_partition(partition="corpus", step=1, timeout=10)
        data = StreamingDataset(
            queue=served.address,
            partition="corpus",
            task="grade",
            columns=["text", "length"],
            rows=2,
            acknowledge="explicit",
        )
        with data:
            for batch in loader(data):
                lengths = batch.columns["length"].padded()
                assert [len(batch.columns["text"][row]) for row in range(len(batch))] == lengths.tolist()
                assert all(data.complete(batch, {"score": lengths.double()}))
        assert corpus.get(["z", "x"], ["score"])["score"].tolist() == [3.0, 1.0]


def test_state(served, dataset):
    state = dataset().state_dict()
    dataset().load_state_dict(state)
    with pytest.raises(Refused, match="the state is that of"):
        dataset(task="whole").load_state_dict(state)


def test_what_cannot_be_is_refused(served, dataset):
    for wrong in ({"rows": 0}, {"columns": []}, {"prefetch": -1}, {"acknowledge": "never"}):
        with pytest.raises(Refused, match="cannot be"):
            dataset(**wrong)


def test_a_lease_is_renewed_in_its_time_while_shorter_ones_follow_and_after_a_call_that_hung(served, monkeypatch):
    hung, renewed = [], []

    async def renew(leases, *, timeout):
        if not hung:
            hung.extend(leases)
            await asyncio.sleep(timeout)
            raise DeadlineExceeded("the controller does not answer")
        renewed.extend(leases)
        return leases

    with closing(Consumer(QueueAddress(address=served.address))) as consumer:
        monkeypatch.setattr(consumer.client, "renew", renew)
        for number in range(20):
            until = 0.06 - number * 1e-6 if number else 60.0
            consumer.run(consumer.keep([SimpleNamespace(lease=number, until=until)]))
            time.sleep(0.01)
        consumer._kept.clear()
    assert hung[:2] == renewed[:2] == [0, 1]
    assert renewed.count(1) >= 2
