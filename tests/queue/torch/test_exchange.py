"""Two data-parallel ranks of two model-parallel processes each, real ones over gloo."""

import multiprocessing
import os

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from asyncflow.errors import AsyncFlowError  # noqa: E402
from asyncflow.queue.torch import StepDataset, StreamingDataset, share_batches  # noqa: E402

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:This DataLoader will create")]

P = "train"
WORLD, SIZE = 4, 2


def test_a_model_parallel_group_sees_the_same_and_others_see_other_rows(served, tmp_path):
    for step in (1, 2):
        served.open_step(step, 8, size=SIZE)
        served.fill(range(8 * step, 8 * step + 8), size=SIZE, step=step)
    served.close_partition(2)
    answers = in_processes(_train, served.address, tmp_path)
    seen = [[batch for batch in rank if batch] for rank in answers]
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    assert [place for place, *_ in seen[0]] == [place for place, *_ in seen[2]]
    samples = sorted(key for rank in (seen[0], seen[2]) for batch in rank for key in batch[1])
    assert samples == [(s, j) for s in range(8, 24) for j in range(SIZE)]
    stats = served.stats()
    assert (stats.committed, stats.staged) == (32, 0)


def test_all_fail_as_the_first_does(served, tmp_path):
    served.fill(range(4))
    answers = in_processes(_dry_up, served.address, tmp_path)
    assert len(set(answers)) == 1
    assert "no row became ready within 0.3 s" in answers[0]


def in_processes(main, *args):
    context = multiprocessing.get_context("fork")
    ends = []
    for rank in range(WORLD):
        ours, theirs = context.Pipe()
        child = context.Process(target=_in_group, args=(rank, theirs, main, *args))
        child.start()
        ends.append((child, ours))
    try:
        return [ours.recv() if ours.poll(90) else None for _, ours in ends]
    finally:
        for child, _ in ends:
            child.join(10)
            child.kill()


def _in_group(rank, pipe, main, address, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    groups = [dist.new_group([first, first + 1]) for first in (0, 2)]
    pipe.send(main(address, rank // 2, groups[rank // 2]))
    dist.barrier()
    dist.destroy_process_group()


def _train(address, data_rank, group):
    data = StepDataset(queue=address, partition=P, columns=["prompt"], tokens=6, rank=data_rank, world=2)
    with data:
        assert data.begin() == 0
        seen = []
        for batch in share_batches(DataLoader(data, batch_size=None, num_workers=data_rank), group=group):
            place = (batch.step, batch.slot, batch.last, batch.totals and batch.totals.samples)
            rows = [batch.columns["prompt"][row].tolist() for row in range(len(batch))]
            seen.append((place, [tuple(meta.key) for meta in batch.metas], rows))
            if batch.last:
                data.step_done(batch.step)
        dist.barrier()
        data.commit()
        return seen


def _dry_up(address, _data_rank, _group):
    with StreamingDataset(queue=address, partition=P, task="load", columns=["prompt"], rows=4, patience_s=0.3) as data:
        try:
            return [len(batch) for batch in share_batches(data)]
        except AsyncFlowError as error:
            return str(error)
