"""The torch face: any number of loader workers, each sample once, an end."""

import asyncio
import threading

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from asyncflow.errors import DeadlineExceeded  # noqa: E402
from asyncflow.net.frames import Jagged  # noqa: E402
from asyncflow.queue.dataset import Queue, StreamingDataset  # noqa: E402
from asyncflow.queue.messages import RowMeta, TaskSpec  # noqa: E402

P = "train"
ROWS = 12


@pytest.fixture
def serving(cluster):
    """Give a function that runs a coroutine beside a cluster which lives in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(job):
        return asyncio.run_coroutine_threadsafe(job, loop).result(timeout=30)

    manager = cluster()
    queue = run(manager.__aenter__())
    run(queue.client.declare([TaskSpec(partition=P, name="load", needs=["prompt"], lease_s=1.0)], timeout=10))
    yield queue, run
    run(manager.__aexit__(None, None, None))
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def fill(queue, run, *, close=True):
    metas = [RowMeta(partition=P, serial=serial, sample=0, step=1) for serial in range(ROWS)]
    columns = {
        "prompt": Jagged.from_rows([[meta.serial] * (1 + meta.serial % 3) for meta in metas], "int32"),
        "brain": Jagged.from_rows([[0x3F80] for _ in metas], "bfloat16"),
    }
    run(queue.client.create(metas, columns, group_size=1, timeout=10))
    if close:
        run(queue.client.close_partition(partition=P, step=1, timeout=10))


def dataset(queue, **options):
    where = Queue(
        controller=queue.controller.server.address,
        units={index: unit.server.address for index, unit in queue.units.items()},
    )
    options = {"columns": ["prompt", "brain"], "rows": 5, "patience_s": 20.0} | options
    return StreamingDataset(queue=where, partition=P, task="load", **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_each_sample_comes_once(serving, workers):
    queue, run = serving
    fill(queue, run)
    batches = list(DataLoader(dataset(queue), batch_size=None, num_workers=workers, timeout=60 if workers else 0))
    assert sorted(meta.serial for batch in batches for meta in batch.metas) == list(range(ROWS))
    for batch in batches:
        for index, meta in enumerate(batch.metas):
            assert batch.columns["prompt"][index].tolist() == [meta.serial] * (1 + meta.serial % 3)
        assert batch.columns["brain"].values.dtype == torch.bfloat16
        assert batch.columns["brain"].values.tolist() == [1.0] * len(batch)
        batch.columns["prompt"].values.zero_()
    stats = run(queue.client.stats(timeout=10))
    assert stats.ready["train/load"] == stats.leased["train/load"] == 0
    assert stats.lease_expiries == 0


def test_what_was_not_acknowledged_comes_again(serving):
    queue, run = serving
    fill(queue, run)
    iterator = iter(dataset(queue))
    first, second = next(iterator), next(iterator)
    assert len(first) == len(second) == 5
    iterator.close()
    rest = [meta.serial for batch in dataset(queue) for meta in batch.metas]
    seen = [meta.serial for meta in first.metas]
    assert sorted(seen + rest) == list(range(ROWS))


def test_a_stream_that_dries_up_says_so(serving):
    queue, run = serving
    fill(queue, run, close=False)
    iterator = iter(dataset(queue, rows=ROWS, patience_s=0.3))
    assert len(next(iterator)) == ROWS
    with pytest.raises(DeadlineExceeded, match="no row became ready within"):
        next(iterator)
