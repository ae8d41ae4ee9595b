"""One pull whose peers and whose driver are away for a while."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, PeerLost, StaleHandle
from asyncflow.identity import Version
from asyncflow.weights.manifest import ManifestPart, merge
from asyncflow.weights.messages import PeerView
from asyncflow.weights.sender import copy_aside, entries_of
from asyncflow.weights.slices import Arena
from asyncflow.weights.transfer import Transfer
from asyncflow.weights.transport import Pull, Sink, Transport

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


def transfer_of(transport: Transport, *answers: AsyncFlowError | list[PeerView]) -> tuple[Transfer, list[str]]:
    """Return a transfer that is told these answers when it asks for sources; and the failed ones that it tells of."""
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
        arena=Arena({name: ("float32", box) for name, box in copied.arena.boxes.items()}),
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
    transfer, told = transfer_of(transport, away("the driver is away"), [PEER])
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


async def test_what_is_wrong_is_pulled_again_whole_and_whoever_gave_it_is_doubted():
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
