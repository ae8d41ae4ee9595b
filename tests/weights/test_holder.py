"""A holder by itself: what it serves, drops and says of what it holds, to a catalogue and peers that are made up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

import msgspec
import numpy as np
import pytest

from asyncflow.errors import DeadlineExceeded, PeerLost, Refused, StaleHandle
from asyncflow.identity import Version
from asyncflow.weights.holder import Copy, Holder
from asyncflow.weights.manifest import MANIFEST, Manifest, ManifestPart, encoded, merge
from asyncflow.weights.messages import CatalogueView, Published, VersionsHeld, VersionsHeldReply, VersionView
from asyncflow.weights.sender import copy_aside, entries_of
from asyncflow.weights.slices import Arena, Box
from asyncflow.weights.transport import Region

V0, V1, V2, V3 = (Version(0, step) for step in range(4))
ROWS, ALL = 6, Box((0,), (6,))
SOON = 10.0


def part_of(version: Version, *, content: int | None = None) -> tuple[Arena, ManifestPart]:
    copied = copy_aside(version, {"w": np.full(ROWS, version.step if content is None else content, np.float32)})
    tensors = entries_of(copied, worker="trainer")
    return copied.arena, ManifestPart(
        version=version.packed, part=0, parts=1, worker="trainer", address="tcp://trainer", tensors=tensors
    )


def copy_of(version: Version) -> tuple[Copy, Manifest]:
    """Return a copy that was pulled, and the manifest of it."""
    arena, part = part_of(version)
    manifest = merge([part])
    return Copy(arena=arena, origin=manifest), manifest


class Driver:
    """Answers by method: a reply, or an error, or what makes one of the request; ``calls`` are those that came."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {
            "weights.publish": Published(complete=True),
            "weights.held": VersionsHeldReply(known=True),
        }
        self.calls: list[tuple[str, Any]] = []

    async def call(self, method: str, request: Any, reply: type, *, timeout: float) -> Any:
        del timeout
        self.calls.append((method, request))
        answer = self.answers[method]
        answer = answer(request) if callable(answer) else answer
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, reply)
        return answer


class Membership:
    subscriber: Any = None

    def __init__(self) -> None:
        self.driver = Driver()
        self.nudges = 0

    def report_soon(self) -> None:
        self.nudges += 1


class Transport:
    closed = False

    async def start(self, read: Callable[..., memoryview], *, until: Callable[..., Any]) -> str:
        self.read, self.until = read, until
        return "tcp://holder"

    async def close(self) -> None:
        self.closed = True


class Arriving:
    """A version on its way. asked: what is waited for."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.asked: list[str] = []

    def read(self, tensor: str, box: Box) -> memoryview:
        del box
        raise StaleHandle(f"{tensor} has not come yet")

    async def until(self, tensor: str, box: Box) -> None:
        del box
        self.asked.append(tensor)


class Holding:
    """A holder and what is around it."""

    def __init__(self) -> None:
        self.membership, self.transport = Membership(), Transport()
        self.used: Collection[Version] = ()
        self.holder = Holder(
            membership=self.membership,  # type: ignore[arg-type]
            worker="rollout-0-a",
            transport=self.transport,  # type: ignore[arg-type]
            node="n",
            in_use=lambda: self.used,
        )
        self.calls = self.membership.driver.calls

    def receive(self, *available: Manifest, releasable: Collection[Version] = (), unknown: Collection[Version] = ()):
        known = (VersionView(version=m.version, digest=m.digest, available=True, nbytes=1) for m in available)
        view = CatalogueView(
            required=(), releasable=tuple(version.packed for version in releasable), versions=tuple(known)
        )
        told = msgspec.Raw(msgspec.msgpack.encode(view))
        self.holder.receive(told, tuple(version.packed for version in unknown))

    def says(self) -> list[Version]:
        return [Version.unpack(packed) for packed in self.holder.holds()]

    async def until(self, predicate: Callable[[], bool]) -> None:
        async with asyncio.timeout(SOON):
            while not predicate():
                await asyncio.sleep(0)

    async def rest(self) -> None:
        """Let it do all that it does by itself now."""
        for _ in range(20):
            await asyncio.sleep(0)


@pytest.fixture
async def holding() -> AsyncIterator[Holding]:
    holding = Holding()
    await holding.holder.start()
    yield holding
    await holding.holder.close()


def region(tensor: str) -> list[Region]:
    return [Region(tensor=tensor, box=ALL, itemsize=4)]


async def test_a_copy_is_served_with_its_manifest_in_parts_and_nothing_else_is(holding):
    copy, manifest = copy_of(V1)
    assert (holding.holder.address, holding.membership.subscriber) == ("tcp://holder", holding.holder)
    before = holding.membership.nudges
    holding.holder.add(V1, copy)
    assert holding.membership.nudges > before > 0, "the catalogue hears of it at once"
    data = encoded(manifest)
    read = holding.transport.read
    assert bytes(read(V1, MANIFEST, Box((3,), (len(data) - 3,)))) == data[3:]
    assert np.array_equal(np.frombuffer(read(V1, "w", Box((1,), (2,))), np.float32), [1, 1])
    with pytest.raises(StaleHandle, match="is no part of"):
        read(V1, MANIFEST, Box((3,), (len(data),)))
    with pytest.raises(StaleHandle, match="θ2 is no longer held"):
        read(V2, "w", ALL)
    await holding.holder.publish(V2, *part_of(V2), timeout=SOON)
    with pytest.raises(StaleHandle):
        read(V2, MANIFEST, Box((0,), (1,)))
    before = holding.membership.nudges
    await holding.holder.close()
    assert (holding.transport.closed, holding.says()) == (True, [])
    assert holding.membership.nudges > before
    with pytest.raises(StaleHandle):
        read(V1, "w", ALL)


async def test_of_a_version_on_its_way_the_manifest_is_served_and_what_has_come(holding):
    arriving = Arriving(copy_of(V1)[1])
    holding.holder.arriving[V1] = arriving
    data = encoded(arriving.manifest)
    assert bytes(holding.transport.read(V1, MANIFEST, Box((0,), (len(data),)))) == data
    with pytest.raises(StaleHandle, match="has not come yet"):
        holding.transport.read(V1, "w", ALL)
    for tensor in (MANIFEST, "w"):
        await holding.transport.until(V1, region(tensor))
    assert arriving.asked == ["w"]


async def test_a_request_waits_for_a_version_that_is_not_heard_of_yet_and_for_its_manifest(holding):
    copy, manifest = copy_of(V2)
    early = asyncio.create_task(holding.transport.until(V2, region("w")))
    holding.receive(copy_of(V1)[1])
    await holding.rest()
    assert not early.done(), "θ2 is newer than all that was heard of"
    await asyncio.wait_for(holding.transport.until(V1, region("w")), SOON)
    holding.holder.arriving[V2] = None
    holding.receive(manifest)
    await holding.rest()
    assert not early.done(), "θ2 is on its way, and nothing is known of it"
    arriving = holding.holder.arriving[V2] = Arriving(manifest)
    holding.holder.notify()
    await asyncio.wait_for(early, SOON)
    assert arriving.asked == ["w"]
    holding.holder.add(V3, copy)
    await asyncio.wait_for(holding.transport.until(V3, region("w")), SOON)


async def test_what_is_releasable_is_dropped_once_it_is_not_in_use(holding):
    for version in (V1, V2, V3):
        holding.holder.add(version, copy_of(version)[0])
    holding.used = {V2}
    before = holding.membership.nudges
    holding.receive(releasable=[V0, V1, V2])
    await holding.until(lambda: holding.says() == [V2, V3])
    assert holding.membership.nudges > before, "the catalogue hears of the drop at once"
    holding.used = ()
    holding.holder.notify()
    await holding.until(lambda: holding.says() == [V3])
    assert holding.calls == []


@pytest.mark.parametrize("wanted", [True, False])
async def test_what_the_catalogue_cannot_believe_is_told_with_its_manifest_where_that_is_wanted(holding, wanted):
    copy, manifest = copy_of(V1)
    holding.used = {V1}
    holding.holder.add(V1, copy)
    answer = VersionsHeldReply(known=False, wanted=wanted)
    holding.membership.driver.answers["weights.held"] = lambda told: (
        answer if told.manifest is None else VersionsHeldReply(known=True)
    )
    holding.receive(unknown=[V0, V1])
    await holding.until(lambda: len(holding.calls) == 1 + wanted)
    await holding.rest()
    told = VersionsHeld(worker="rollout-0-a", address="tcp://holder", version=V1.packed, node="n")
    told_in_full = msgspec.structs.replace(told, manifest=manifest)
    holding.holder.notify()
    await holding.rest()
    assert [request for _, request in holding.calls] == [told, told_in_full][: 1 + wanted]
    assert holding.says() == ([V1] if wanted else []), "what is not wanted is not told of"
    holding.used = ()
    holding.holder.notify()
    await holding.rest()
    assert (V1 in holding.holder.copies) == wanted
    if not wanted:
        holding.holder.add(V1, copy)
        assert holding.says() == [V1], "another copy is told of again"


async def test_what_is_not_wanted_is_told_of_again_to_a_catalogue_that_has_changed(holding):
    copy, manifest = copy_of(V1)
    holding.used = {V1}
    holding.holder.add(V1, copy)
    holding.membership.driver.answers["weights.held"] = Refused("not now")
    holding.receive(unknown=[V1])
    await holding.until(lambda: holding.says() == [])
    assert V1 in holding.holder.copies, "it is in use"
    holding.receive(manifest)
    assert holding.says() == [V1]


async def test_it_is_told_again_until_the_driver_answers(holding):
    answers = iter([PeerLost("away"), PeerLost("away"), VersionsHeldReply(known=True)])
    holding.membership.driver.answers["weights.held"] = lambda _: next(answers)
    holding.holder.add(V1, copy_of(V1)[0])
    holding.receive(unknown=[V1])
    await holding.until(lambda: len(holding.calls) == 3)
    await holding.rest()
    assert len(holding.calls) == 3


async def test_a_part_of_the_boxes_is_told_as_such(holding):
    copied = copy_aside(V1, {"w": np.zeros(2, np.float32)})
    copied.arena.boxes = half = {"w": Box((0,), (2,))}
    holding.holder.add(V1, Copy(arena=copied.arena, origin=copy_of(V1)[1]))
    holding.receive(unknown=[V1])
    await holding.until(lambda: len(holding.calls) == 1)
    assert holding.calls[0][1].regions == half


async def test_a_publication_that_is_refused_changes_nothing_and_one_that_is_not_answered_is_held(holding):
    arena, part = part_of(V1)
    driver = holding.membership.driver
    assert await holding.holder.publish(V1, arena, part, timeout=SOON)
    for version in (V1, V2):
        driver.answers["weights.publish"] = Refused("published before with other content")
        with pytest.raises(Refused):
            await holding.holder.publish(version, *part_of(version, content=7), timeout=SOON)
    assert holding.says() == [V1]
    assert holding.holder.copies[V1].arena is arena
    driver.answers["weights.publish"] = PeerLost("away")
    with pytest.raises(DeadlineExceeded, match="publishing θ2"):
        await holding.holder.publish(V2, *part_of(V2), timeout=0.0)
    assert holding.says() == [V1, V2]
    driver.answers["weights.publish"] = Published(complete=False)
    driver.calls.clear()
    holding.receive(copy_of(V1)[1], unknown=[V2])
    await holding.until(lambda: driver.calls == [("weights.publish", part_of(V2)[1])])
    await holding.rest()
    assert holding.says() == [V1, V2]
    driver.answers["weights.publish"] = Refused("published before with other content")
    holding.receive(unknown=[V2])
    await holding.until(lambda: holding.says() == [V1])
    assert V2 not in holding.holder.copies


async def test_content_that_is_not_that_of_the_catalogue_is_dropped_or_ends_who_uses_it(holding):
    other = merge([part_of(V1, content=7)[1]])
    for version in (V1, V2):
        holding.holder.add(version, copy_of(version)[0])
    holding.receive(other, copy_of(V2)[1], unknown=[V1, V2])
    await holding.until(lambda: holding.says() == [V2])
    await holding.until(lambda: [told.version for _, told in holding.calls] == [V2.packed])
    holding.used = {V1}
    holding.holder.add(V1, copy_of(V1)[0])
    with pytest.raises(Refused, match="two different θ1 exist"):
        await holding.holder.wait_for(lambda: False, what="nothing", timeout=SOON)


async def test_what_is_waited_for_is_named_with_what_there_is(holding):
    with pytest.raises(DeadlineExceeded, match=r"θ9 did not come within 0 s") as late:
        await holding.holder.wait_for(lambda: False, what="θ9", timeout=0.0)
    assert "offers no version" in str(late.value)
    holding.receive(copy_of(V1)[1], copy_of(V2)[1])
    with pytest.raises(DeadlineExceeded, match="offers θ1, θ2"):
        await holding.holder.wait_for(lambda: False, what="θ9", timeout=0.0)
