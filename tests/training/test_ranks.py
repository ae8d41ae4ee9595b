"""Gangs of real processes."""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from rank_process import gang
from train_reference import HORIZON, reference_gradient, relative_error, samples

from asyncflow.algorithms.loss import Aggregation, Loss
from asyncflow.errors import DeadlineExceeded, DiskError, Fenced, ProtocolError
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.server import RpcServer
from asyncflow.training.ranks import (
    GatherCall,
    GatherReply,
    GatherService,
    GroupLeft,
    HostProcessGroup,
    ProcessGroup,
    SingleProcess,
    jointly,
)
from asyncflow.training.torch.device import TensorGroup, _store, open_store

ADDRESSES = {each.address for addresses in psutil.net_if_addrs().values() for each in addresses}


@pytest.mark.process
def test_every_rank_gets_what_all_ranks_gave(tmp_path: Path) -> None:
    for result in gang("gathers", tmp_path, 3):
        expected = [[[rank, number] for rank in range(3)] for number in range(50)]
        assert result["rounds"].tolist() == expected
        np.testing.assert_array_equal(result["floats"], np.repeat(np.arange(3) / 3, 4).reshape(3, 2, 2))


@pytest.mark.process
def test_ranks_count_together(tmp_path: Path) -> None:
    for result in gang("counts", tmp_path, 2):
        assert result["counts"].tolist() == [1] * 8


@pytest.mark.process
def test_two_ranks_make_the_gradient_of_one_padded_batch(tmp_path: Path, tiny_folder: Path) -> None:
    shutil.copytree(tiny_folder, tmp_path / "model")
    first, second = gang("gradients", tmp_path, 2)
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
    loss = Loss(aggregation=Aggregation(name="seq-mean-token-mean", horizon=HORIZON), kl=0.05, kl_name="k3")
    expected = reference_gradient(tiny_folder, samples(), loss)
    got = {
        name.removeprefix("gradient1/"): torch.from_numpy(array)
        for name, array in first.items()
        if name.startswith("gradient1/")
    }
    assert relative_error(got, expected) < 1e-5


def test_the_norm_of_a_long_gradient_is_exact() -> None:
    gradient = torch.randn(1 << 23, generator=torch.Generator().manual_seed(0))
    ranks = TensorGroup(SingleProcess(), device=torch.device("cpu"), host="127.0.0.1", timeout_s=1)
    assert ranks.norm(gradient) == pytest.approx(np.linalg.norm(gradient.double().numpy()), rel=1e-5)
    assert ranks.norm(gradient[:0]) == 0
    assert np.isnan(ranks.norm(torch.tensor([1.0, float("nan")])))


@pytest.mark.parametrize("host", sorted({"127.0.0.1", "::1"} & ADDRESSES))
def test_ranks_find_the_store_of_their_process_group_under_either_family_of_addresses(host: str) -> None:
    timeout = timedelta(seconds=10)
    first = _store(SingleProcess(), host=host, timeout=timeout)
    other = open_store(host, first.port, world=1, listener=None, timeout=timeout)
    first.set("said", "by the first")
    assert other.get("said") == b"by the first"


def test_alone_there_is_nobody_to_ask() -> None:
    assert SingleProcess().gather(np.array([1, 2]), what="numbers").tolist() == [[1, 2]]


async def test_what_does_not_belong_together_is_refused() -> None:
    server = RpcServer(name="trainer-0")
    GatherService(attempt=2, world=2).attach(server)
    await server.start()
    client = RpcClient(name="rank", resolve=server.address)

    async def share(**other: object) -> None:
        fields = {"attempt": 2, "round": 1, "rank": 0, "dtype": "<i8", "shape": [1]} | other
        await client.call_frames("trainer.gather", GatherCall(**fields), GatherReply, timeout=20, frames=[bytes(8)])

    with pytest.raises(Fenced, match="attempt 1"):
        await share(attempt=1)
    with pytest.raises(ProtocolError, match="world of 2"):
        await share(rank=2)
    waiting = asyncio.create_task(share())
    await asyncio.sleep(0.1)
    with pytest.raises(ProtocolError, match="does not fit"):
        await share(rank=1, shape=[2])
    await share(rank=1)
    await waiting
    await client.close()
    await server.close()


async def test_a_rank_that_leaves_does_not_wait_for_a_rank_0_that_is_gone() -> None:
    group = HostProcessGroup(rank=1, world=2, attempt=0, leader=lambda: None, loop=asyncio.get_running_loop())
    waiting = asyncio.create_task(asyncio.to_thread(group.gather, np.zeros(1), what="numbers"))
    await asyncio.sleep(0.1)
    group.leave()
    with pytest.raises(GroupLeft):
        await waiting
    with pytest.raises(GroupLeft):
        await asyncio.to_thread(group.gather, np.zeros(1), what="numbers")
    await group.close()


def rounds_of(group: HostProcessGroup) -> int:
    """Gather until somebody leaves; give how many rounds came about."""
    for done in itertools.count():
        try:
            group.gather(np.array([group.rank, done]), what=f"round {done}")
        except GroupLeft:
            break
    return done


@asynccontextmanager
async def gathering_ranks(world: int) -> AsyncIterator[tuple[list[HostProcessGroup], list[asyncio.Task[int]]]]:
    """Ranks that gather until somebody leaves."""
    loop, server = asyncio.get_running_loop(), RpcServer(name="trainer-0")
    GatherService(attempt=0, world=world).attach(server)
    address = await server.start()
    groups = [
        HostProcessGroup(rank=rank, world=world, attempt=0, leader=lambda: address, loop=loop) for rank in range(world)
    ]
    yield groups, [asyncio.create_task(asyncio.to_thread(rounds_of, group)) for group in groups]
    for group in groups:
        await group.close()
    await server.close()


@pytest.mark.parametrize("seed", range(12))
async def test_whenever_ranks_leave_all_have_had_the_same_rounds(seed: int) -> None:
    rng = random.Random(seed)
    async with gathering_ranks(3) as (groups, rounds):
        for group in rng.sample(groups, rng.randint(1, 3)):
            await asyncio.sleep(rng.uniform(0.0, 0.03))
            group.leave()
        assert len({await done for done in rounds}) == 1


@pytest.mark.parametrize("seed", range(4))
async def test_rounds_beside_the_others_come_about_whether_ranks_leave_or_not(seed: int) -> None:
    rng = random.Random(seed)

    def part(group: ProcessGroup) -> list[list[int]]:
        return [group.gather(np.array([group.rank, n]), what="the last words")[:, 0].tolist() for n in range(5)]

    async with gathering_ranks(3) as (groups, rounds):
        ranks = [group.background() for group in groups]
        assert await asyncio.gather(*(asyncio.to_thread(part, rank) for rank in ranks)) == [[[0, 1, 2]] * 5] * 3
        waiting = [asyncio.create_task(asyncio.to_thread(part, rank)) for rank in ranks[1:]]
        await asyncio.sleep(rng.uniform(0.0, 0.03))
        rng.choice(groups).leave()
        for done in rounds:
            await done
        assert [await group.left() for group in groups] == [True] * 3
        for group in groups:
            group.leave()
        assert await asyncio.to_thread(part, ranks[0]) == [[0, 1, 2]] * 5
        assert [await done for done in waiting] == [[[0, 1, 2]] * 5] * 2


async def test_a_round_beside_the_others_outlasts_their_first_and_the_first_outlasts_it() -> None:
    service = GatherService(attempt=0, world=2, progress_s=3600)

    def give(number: int, *, rank: int) -> asyncio.Task[tuple[GatherReply, Sequence[bytes]]]:
        share = GatherCall(attempt=0, round=number, rank=rank, dtype="<i8", shape=[1])
        return asyncio.create_task(service._on_gather(share, [memoryview(bytes([rank] * 8))]))

    for early, other in ((-1, 1), (1, -1)):
        service._rounds.clear()
        waiting = [give(early, rank=0)]
        await asyncio.sleep(0)
        await asyncio.gather(give(other, rank=0), give(other, rank=1))
        answers = await asyncio.wait_for(asyncio.gather(*waiting, give(early, rank=1)), 10)
        assert [frames for _, frames in answers] == [[bytes(8), b"\x01" * 8]] * 2


async def test_a_rank_in_a_hurry_does_not_wait_long_for_one_that_is_dead() -> None:
    server, ranks = await two_ranks(lambda: 0, patience_s=3600)
    beside = ranks[0].background()
    waiting = asyncio.create_task(asyncio.to_thread(beside.gather, np.zeros(1), what="the last words"))
    await asyncio.sleep(0.3)
    ranks[0].leave()
    beside.limit_patience(patience_s=0.5)
    with pytest.raises(DeadlineExceeded, match="the last words"):
        await asyncio.wait_for(waiting, 10)
    await close(server, ranks)


async def test_what_goes_wrong_on_one_rank_is_raised_on_all() -> None:
    server, ranks = await two_ranks(lambda: 0)

    def work(group: HostProcessGroup, wrong: tuple[int, ...]) -> str:
        try:
            with jointly(group, what="the work"):
                if group.rank in wrong:
                    raise DiskError(f"rank {group.rank} has no room", where="/disk")
        except DiskError as error:
            return str(error)
        return ""

    async def all_work(*wrong: int) -> list[str]:
        return await asyncio.gather(*(asyncio.to_thread(work, rank, wrong) for rank in ranks))

    assert await all_work() == ["", ""]
    assert await all_work(1) == ["/disk: rank 1 has no room"] * 2
    assert await all_work(0, 1) == ["/disk: rank 0 has no room"] * 2
    await close(server, ranks)


async def two_ranks(progress: Callable[[], int], *, patience_s: float = 1) -> tuple[RpcServer, list[HostProcessGroup]]:
    """Two ranks; rank 0's progress is asked for ten times a second."""
    server = RpcServer(name="trainer-0")
    GatherService(attempt=0, world=2, progress=progress, progress_s=0.1).attach(server)
    address, loop = await server.start(), asyncio.get_running_loop()
    ranks = [
        HostProcessGroup(rank=rank, world=2, attempt=0, leader=lambda: address, loop=loop, patience_s=patience_s)
        for rank in (0, 1)
    ]
    return server, ranks


async def close(server: RpcServer, ranks: list[HostProcessGroup]) -> None:
    for rank in ranks:
        await rank.close()
    await server.close()


async def test_a_rank_waits_for_rank_0_as_long_as_that_gets_on() -> None:
    written = itertools.count()
    server, ranks = await two_ranks(lambda: next(written))
    waiting = asyncio.create_task(asyncio.to_thread(ranks[1].gather, np.array([1]), what="the samples of a step"))
    await asyncio.sleep(2.5)
    gathered = await asyncio.to_thread(ranks[0].gather, np.array([0]), what="the samples of a step")
    assert gathered.tolist() == (await waiting).tolist() == [[0], [1]]
    await close(server, ranks)


async def test_a_rank_gives_up_when_rank_0_does_not_get_on() -> None:
    server, ranks = await two_ranks(lambda: 7)
    with pytest.raises(DeadlineExceeded, match="the samples of a step of 2 ranks: nothing came from rank 0 for 1 s"):
        await asyncio.to_thread(ranks[1].gather, np.array([1]), what="the samples of a step")
    await close(server, ranks)
