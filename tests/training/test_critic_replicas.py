"""Several replicas of a critic: where each meets the others, learns its share, and obeys the first rank."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncflow.errors import PeerLost, ProtocolError, Refused
from asyncflow.identity import SampleKey
from asyncflow.rpc.columns import Jagged
from asyncflow.rpc.server import RpcServer
from asyncflow.training.batch import MicroBatch
from asyncflow.training.checkpoint import Checkpoints
from asyncflow.training.critic import NORM, CriticLink, CriticService, Meeting
from asyncflow.training.ranks import SingleProcess

FILE = "critic-of-this-test"


class Model:
    """Values every state as its own number, and writes down what it is told."""

    files = (FILE,)

    def __init__(self, number: int) -> None:
        self.number = number
        self.meeting: Meeting | None = None
        self.learned: list[int] = []
        self.updates: list[tuple[int, float, bool]] = []
        self.loses: list[PeerLost] = []

    def load(self, checkpoint: Path | None, meeting: Meeting | None = None) -> None:
        assert checkpoint is None
        self.meeting = meeting

    def values(self, batch: MicroBatch) -> Jagged:
        return Jagged(np.full(len(batch.responses.values), self.number, np.float32), batch.responses.offsets)

    def learn(self, batch: MicroBatch) -> None:
        self.learned += [key.serial for key in batch.keys]

    def forget(self) -> None:
        self.learned.clear()

    def settle(self) -> dict[str, float]:
        if self.loses:
            raise self.loses.pop()
        return {"samples": len(self.learned), NORM: 2.5}

    def update(self, step: int, *, divisor: float, moves: bool) -> None:
        self.updates.append((step, divisor, moves))

    def copy(self) -> Callable[[Path], None]:
        learned = list(self.learned)
        return lambda folder: (folder / FILE).write_text(f"{self.number}: {learned}")


def batch(*serials: int) -> MicroBatch:
    ids = Jagged.from_rows([[serial, 7] for serial in serials], np.int32)
    of_tokens = Jagged.from_rows([[0.5, 0.5] for _ in serials], np.float32)
    return MicroBatch(
        keys=[SampleKey(serial, 0) for serial in serials],
        prompts=ids,
        responses=ids,
        logprobs=of_tokens,
        versions=Jagged.from_rows([[0, 0] for _ in serials], np.int64),
        values=of_tokens,
        returns=of_tokens,
    )


class Replicas:
    """Two replicas behind sockets, and links of three ranks of a trainer to them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models = [Model(number) for number in range(2)]
        self.addresses: list[str] = []
        self.links: list[CriticLink] = []
        self._closing: list[Callable[[], Awaitable[None]]] = []
        self._services: list[CriticService] = []

    async def start(self) -> None:
        checkpoints = Checkpoints(self.folder)
        checkpoints.group = SingleProcess()
        checkpoints.claim(0)
        for model in self.models:
            service = CriticService(lambda model=model: model, checkpoints=self.folder, rank=model.number)
            server = RpcServer(name=f"critic-{model.number}")
            service.attach(server)
            self.addresses.append(await server.start())
            self._closing.append(server.close)
            self._services.append(service)
        loop, find = asyncio.get_running_loop(), self.addresses.__getitem__
        for rank in range(3):
            link = CriticLink(rank=rank, attempt=0, find=find, loop=loop, replicas=2, patience_s=10)
            self.links.append(link)
            self._closing.insert(0, link.close)

    async def close(self) -> None:
        for close in self._closing:
            await close()
        for service in self._services:
            service.close()


@pytest.fixture
async def replicas(tmp_path: Path) -> AsyncIterator[Replicas]:
    found = Replicas(tmp_path)
    await found.start()
    await asyncio.to_thread(found.links[0].load, None)
    yield found
    await found.close()


def there(meeting: Meeting | None) -> tuple[Any, ...]:
    assert meeting is not None
    return meeting.rank, meeting.world, meeting.host, meeting.port


async def test_replicas_meet_at_the_first_of_them(replicas: Replicas) -> None:
    first, second = (model.meeting for model in replicas.models)
    assert first is not None
    assert second is not None
    assert first.listener is not None
    assert there(first) == (0, 2, *first.listener.getsockname())
    assert there(second) == (1, 2, first.host, first.port)
    assert second.listener is None
    first.listener.close()


async def test_each_rank_has_its_replica_and_the_orders_of_the_first_go_to_all(replicas: Replicas) -> None:
    links, (first, second) = replicas.links, replicas.models
    for rank, link in enumerate(links):
        values = await asyncio.to_thread(link.values, batch(rank))
        assert values.values.tolist() == [rank % 2] * 2
        await asyncio.to_thread(link.learn, batch(rank, 10 + rank))
    sums = await asyncio.to_thread(links[0].settle, 1)
    assert (first.learned, second.learned) == ([0, 10, 2, 12], [1, 11])
    assert sums == {"samples": 6, NORM: 2.5}, "the norm is of all of them already"
    await asyncio.to_thread(lambda: links[0].update(1, divisor=4.0, moves=False))
    await asyncio.to_thread(links[0].copy)
    await asyncio.to_thread(links[1].values, batch(1))  # comes after the update, which nobody waits for
    assert first.updates == second.updates == [(1, 4.0, False)]
    folder = replicas.folder / "step-000001"
    folder.mkdir()
    await asyncio.to_thread(links[1].forget)
    await asyncio.to_thread(links[0].write, folder)
    assert (folder / FILE).read_text() == "0: [0, 10, 2, 12]"
    await asyncio.to_thread(links[0].settle, 2)
    assert (first.learned, second.learned) == ([0, 10, 2, 12], [])


@pytest.mark.parametrize("lengths", [[2, 2], [1], []], ids=["more samples", "fewer tokens", "nothing"])
async def test_values_are_one_a_response_token(replicas: Replicas, lengths: list[int]) -> None:
    found = Jagged.from_rows([[0.0] * length for length in lengths], np.float32)
    replicas.models[0].values = lambda _: found  # type: ignore[method-assign]
    with pytest.raises(ProtocolError, match="did not return one value per response token"):
        await asyncio.to_thread(replicas.links[0].values, batch(1))


@pytest.mark.parametrize("folder", ["step-000001/..", "/", "."])
async def test_a_critic_writes_only_what_it_set_aside_and_only_into_a_checkpoint(
    replicas: Replicas, folder: str
) -> None:
    link = replicas.links[0]
    with pytest.raises(Refused, match="there is no copy of the critic to write to 'step-000001'"):
        await asyncio.to_thread(link.write, replicas.folder / "step-000001")
    await asyncio.to_thread(link.copy)
    with pytest.raises(Refused, match="is not the name of a checkpoint"):
        await asyncio.to_thread(link.write, Path(folder))


async def test_a_copy_that_is_written_takes_no_more_memory(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    link, (model, _), copies = replicas.links[0], replicas.models, []
    copy = model.copy

    def watched() -> Callable[[Path], None]:
        write = copy()
        copies.append(weakref.ref(write))
        return write

    monkeypatch.setattr(model, "copy", watched)
    await asyncio.to_thread(link.copy)
    folder = replicas.folder / "step-000001"
    folder.mkdir()
    await asyncio.to_thread(link.write, folder)
    gc.collect()
    assert copies[0]() is None
    await asyncio.to_thread(link.write, folder)  # the same call again
    with pytest.raises(Refused, match="no copy of the critic to write to 'step-000002'"):
        await asyncio.to_thread(link.write, replicas.folder / "step-000002")


async def test_a_critic_begins_with_a_checkpoint_and_with_no_other_folder(replicas: Replicas) -> None:
    with pytest.raises(Refused, match=r"'\.\.' is not the name of a checkpoint"):
        await asyncio.to_thread(replicas.links[0].load, Path("step-000001/.."))


async def test_replicas_that_lost_one_another_answer_only_who_has_them_start_again(replicas: Replicas) -> None:
    link, (first, second) = replicas.links[0], replicas.models
    second.loses = [PeerLost("the first replica is gone")]
    with pytest.raises(Refused, match="was not loaded by attempt 0"):
        await asyncio.to_thread(link.settle, 1)
    await asyncio.to_thread(link.load, None)
    assert (await asyncio.to_thread(link.settle, 1))[NORM] == 2.5
    assert there(first.meeting)[1:] == there(second.meeting)[1:]
