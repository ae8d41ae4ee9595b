"""One pull whose peers and whose driver are unreachable for a while."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from msgspec.structs import replace

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, PeerLost, StaleHandle
from asyncflow.identity import Version
from asyncflow.weights.manifest import ManifestPart, digest_of, merge
from asyncflow.weights.messages import PeerView
from asyncflow.weights.sender import copy_aside, entries_of
from asyncflow.weights.slices import Arena, Box
from asyncflow.weights.transfer import Transfer
from asyncflow.weights.transport import Pull, Region, Sink, Transport

PEER = PeerView(worker="peer", address="tcp://127.0.0.1:1", whole=True)
TENSORS = {name: np.arange(64, dtype=np.float32) + at for at, name in enumerate("abcd")}


class Fragile(Transport):
    """A transport that brings two regions and loses the peer then, ``losses`` times. given: the tensors, in order."""

    def __init__(self, *, losses: int) -> None:
        self.given: list[str] = []
        self.left = losses

    async def start(self, read: object, **_: object) -> str:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    async def pull(self, pull: Pull, *, sink: Sink) -> None:
        regions = pull.regions if not self.left else pull.regions[: 2 - len(self.given)]
        for region in regions:
            self.given.append(region.tensor)
            sink(region, TENSORS[region.tensor].view(np.uint8).data)
        if self.left:
            self.left -= 1
            raise PeerLost("the peer is gone", where=pull.source.address)


def transfer_of(
    transport: Transport, *answers: AsyncFlowError | list[PeerView], size: int = 64
) -> tuple[Transfer, list[str]]:
    """Return a transfer that is told these answers when it asks for sources; and the failed ones that it tells of.

    size: elements that it needs of each tensor.
    """
    copied, left, told = copy_aside(Version(0, 1), TENSORS), iter(answers), []
    part = ManifestPart(
        version=Version(0, 1).packed,
        part=0,
        parts=1,
        worker="peer",
        address=PEER.address,
        tensors=entries_of(copied, worker="peer"),
    )

    async def sources(failed: frozenset[str]) -> list[PeerView]:
        told.extend(failed)
        answer = next(left)
        if isinstance(answer, AsyncFlowError):
            raise answer
        return answer

    transfer = Transfer(
        manifest=merge([part]),
        arena=Arena(dict.fromkeys(copied.arena.boxes, ("float32", Box((0,), (size,))))),
        receiver="receiver",
        transport=transport,
        peers=[PEER],
        sources=sources,
        changed=asyncio.Event,
        known={},
        review_s=60.0,
        base=None,
        executor=ThreadPoolExecutor(1),
    )
    return transfer, told


@pytest.mark.parametrize("away", [PeerLost, DeadlineExceeded])
async def test_what_has_come_is_kept_while_neither_the_source_nor_the_driver_answers(away):
    transport = Fragile(losses=2)
    transfer, told = transfer_of(transport, away("the driver is unreachable"), [PEER])
    record = await transfer.run()
    assert transport.given == ["a", "b", "c", "d"]
    assert (record.faults, told) == (2, ["peer", "peer"])


class Lying(Fragile):
    """A transport that gives other bytes of one tensor at first.

    pulls: base and tensors of each pull; doubted: the workers that it was told of.
    """

    def __init__(self) -> None:
        super().__init__(losses=0)
        self.pulls: list[tuple[Version | None, list[str]]] = []
        self.doubted: list[str] = []

    def doubt(self, worker: str) -> None:
        self.doubted.append(worker)

    async def pull(self, pull: Pull, *, sink: Sink) -> None:
        self.pulls.append((pull.base, [region.tensor for region in pull.regions]))
        for region in pull.regions:
            wrong = region.tensor == "b" and len(self.pulls) == 1
            sink(region, (TENSORS[region.tensor] + wrong).view(np.uint8).data)


@pytest.mark.parametrize("small", [0, 1 << 16])
async def test_what_is_wrong_is_pulled_again_whole_and_whoever_gave_it_is_doubted(monkeypatch, small):
    """small: bytes of what is compared at once, and not in another thread."""
    monkeypatch.setattr("asyncflow.weights.transfer._SMALL", small)
    transport = Lying()
    transfer, told = transfer_of(transport, [PEER])
    transfer._base = Version(0, 0)
    record = await transfer.run()
    assert transport.pulls == [(Version(0, 0), ["a", "b", "c", "d"]), (None, ["b"])]
    assert (record.faults, told, transport.doubted) == (1, ["peer"], ["peer"])
    for name, tensor in TENSORS.items():
        box = transfer._arena.boxes[name]
        assert transfer.read(name, box) == tensor.view(np.uint8).data


async def test_a_version_that_the_catalogue_does_not_know_any_more_is_given_up():
    transfer, _ = transfer_of(Fragile(losses=1), StaleHandle("it is not in the catalogue"))
    with pytest.raises(StaleHandle):
        await transfer.run()


class Halving(Fragile):
    """A transport that brings regions in halves. served: what ``transfer`` serves of each, before and after it came."""

    def __init__(self) -> None:
        super().__init__(losses=0)
        self.transfer: Transfer | None = None
        self.served: list[list[bool]] = []

    def serves(self, tensor: str, box: Box) -> bool:
        try:
            return self.transfer.read(tensor, box).nbytes == 4 * box.volume
        except StaleHandle:
            return False

    async def pull(self, pull: Pull, *, sink: Sink) -> None:
        for region in pull.regions:
            data, half = TENSORS[region.tensor].view(np.uint8).data, region.box.extent[0] // 2
            for first in (0, half):
                box = Box((first,), (half,))
                before = self.serves(region.tensor, box)
                sink(Region(tensor=region.tensor, box=box, itemsize=4), data[4 * first : 4 * (first + half)])
                self.served.append([before, self.serves(region.tensor, box)])
                await asyncio.sleep(0.005)
            await self.transfer.until(region.tensor, region.box)
            assert self.transfer.read(region.tensor, region.box) == data[: 8 * half]


@pytest.mark.parametrize("size", [64, 32])
async def test_a_whole_slice_is_served_when_it_was_compared_and_a_part_as_it_comes(size):
    transport = Halving()
    transport.transfer, _ = transfer_of(transport, size=size)
    record = await transport.transfer.run()
    assert (record.sent, record.faults) == (4 * 4 * size, 0)
    assert transport.served == [[False, size < 64]] * 8


class Slow(Fragile):
    """A transport that brings what ``PEER`` has after ``seconds``, or has a fault of its own then where ``broken``.

    pulls: how many began.
    """

    def __init__(self, *, seconds: float, broken: bool = False) -> None:
        super().__init__(losses=0)
        self.seconds = seconds
        self.broken = broken
        self.pulls = 0

    async def pull(self, pull: Pull, *, sink: Sink) -> None:
        self.pulls += 1
        await asyncio.sleep(self.seconds if pull.source.worker == PEER.worker else 0)
        if self.broken:
            raise ZeroDivisionError
        await super().pull(pull, sink=sink)


async def test_a_source_that_gets_the_version_itself_is_kept_while_there_is_no_better_one():
    transport, part = Slow(seconds=0.05), replace(PEER, whole=False)
    transfer, told = transfer_of(transport, *[[part]] * 20)
    transfer._peers, transfer._review_s = [part], 0.01
    await transfer.run()
    assert (transport.pulls, told) == (1, [])


async def test_a_source_that_gets_the_version_itself_is_left_for_one_that_has_it():
    transport, part, whole = Slow(seconds=60), replace(PEER, whole=False), replace(PEER, worker="whole")
    transfer, told = transfer_of(transport, [whole])
    transfer._peers, transfer._review_s = [part], 0.01
    record = await transfer.run()
    assert (list(record.holders), transport.pulls, told, record.faults) == (["whole"], 2, [], 0)


async def test_what_is_at_hand_already_is_served_and_asked_of_nobody():
    transport = Fragile(losses=0)
    transfer, _ = transfer_of(transport)
    transfer._known = {digest_of(TENSORS["a"]): TENSORS["a"]}
    record = await transfer.run()
    assert (transport.given, record.reused, record.sent) == (["b", "c", "d"], 256, 3 * 256)
    assert transfer.read("a", Box((0,), (64,))) == TENSORS["a"].view(np.uint8).data


async def test_a_fault_of_a_transport_is_raised_and_no_peer_is_blamed():
    transport = Slow(seconds=0, broken=True)
    transfer, told = transfer_of(transport)
    with pytest.raises(ZeroDivisionError):
        await transfer.run()
    assert (transport.pulls, told) == (1, [])
