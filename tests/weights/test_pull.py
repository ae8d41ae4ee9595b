"""Publishing and pulling over real sockets in one process."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest
from msgspec.structs import replace
from weights_world import bulk, until

from asyncflow.errors import DeadlineExceeded, Fenced, PeerLost, ProtocolError, Refused, StaleHandle
from asyncflow.identity import Version
from asyncflow.rpc.client import RpcClient
from asyncflow.weights.host_transport import HostTransport
from asyncflow.weights.manifest import ManifestPart
from asyncflow.weights.messages import WHOLE, Locate, Located, Published, VersionsHeld, VersionsHeldReply
from asyncflow.weights.sender import PublishedSlice, copy_aside, entries_of
from asyncflow.weights.slices import Box

SOON = 20.0


def same(left, right) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and np.array_equal(left[name], right[name]) for name in left
    )


async def test_a_published_version_reaches_every_receiver(world, weights):
    sender = await world.sender()
    receivers = [await world.receiver() for _ in range(3)]
    tensors = weights(1)
    assert await sender.publish(Version(0, 0), tensors, timeout=SOON)
    for receiver in receivers:
        assert await receiver.ensure(0, timeout=SOON) == Version(0, 0)
        version, taken = receiver.take(0)
        assert version == receiver.current == Version(0, 0)
        assert same(dict(taken), tensors)
        assert receiver.staged is None
        assert not any(array.flags.writeable for array in taken.values())
        assert receiver.transfers[0].nbytes == sum(array.nbytes for array in tensors.values())
        assert sum(receiver.transfers[0].holders.values()) == receiver.transfers[0].nbytes


async def test_who_waits_for_a_new_version_is_told_when_it_is_complete_and_once(world):
    told: list[int] = []
    world.service.on_newest.append(lambda: told.append(world.service.catalogue.newest.step))
    ranks = [await world.sender(f"rank{part}", part=part, parts=2) for part in range(2)]
    tensors = {"w": np.zeros(8, np.float32)}
    for step in range(2):
        halves = [
            {"w": PublishedSlice(array=tensors["w"][4 * part : 4 * part + 4], offset=(4 * part,), shape=(8,))}
            for part in range(2)
        ]
        await ranks[0].publish(Version(0, step), halves[0], timeout=SOON)
        assert told == list(range(step)), "half a version is none"
        await ranks[1].publish(Version(0, step), halves[1], timeout=SOON)
        assert told == list(range(step + 1))
    receiver = await world.receiver()
    await receiver.ensure(1, timeout=SOON)
    assert told == [0, 1]


async def test_what_was_published_does_not_change_with_the_trainers_tensors(world, weights):
    sender, tensors = await world.sender(), weights(1)
    await sender.publish(Version(0, 0), tensors, timeout=SOON)
    expected = {name: array.copy() for name, array in tensors.items()}
    for array in tensors.values():
        array[...] = 0
    receiver = await world.receiver()
    await receiver.ensure(0, timeout=SOON)
    assert same(dict(receiver.take(0)[1]), expected)


async def test_any_sharding_feeds_any_other(world):
    rng = np.random.default_rng(0)
    whole = {"w": rng.standard_normal((12, 10)).astype(np.float32), "b": rng.standard_normal(10).astype(np.float32)}
    for part in range(3):
        sender = await world.sender(f"rank{part}", part=part, parts=3)
        rows = PublishedSlice(array=whole["w"][4 * part : 4 * part + 4], offset=(4 * part, 0), shape=(12, 10))
        complete = await sender.publish(Version(0, 0), {"w": rows, "b": whole["b"]}, timeout=SOON)
        assert complete == (part == 2)

    def columns(half: int):
        def layout(name: str, shape: tuple[int, ...]) -> Box | None:
            return Box((0, 5 * half), (12, 5)) if name == "w" else Box.whole(shape) if half else None

        return layout

    halves = [await world.receiver(f"half{half}", layout=columns(half)) for half in range(2)]
    for half, receiver in enumerate(halves):
        await receiver.ensure(0, timeout=SOON)
        taken = receiver.take(0)[1]
        assert np.array_equal(taken["w"], whole["w"][:, 5 * half : 5 * half + 5])
        assert ("b" in taken) == bool(half)
    everything = await world.receiver("all")
    await everything.ensure(0, timeout=SOON)
    assert same(dict(everything.take(0)[1]), whole)


async def test_sharded_receivers_together_keep_a_version_alive(world):
    whole = {"w": np.arange(60, dtype=np.int32).reshape(6, 10)}
    sender = await world.sender()
    await sender.publish(Version(0, 3), whole, timeout=SOON)
    for half in range(2):
        part = await world.receiver(f"half{half}", layout=lambda _name, _shape, at=5 * half: Box((0, at), (6, 5)))
        await part.ensure(3, timeout=SOON)
    halves = {"half0", "half1"}
    await world.service.wait_for(
        lambda known: halves <= {holding.worker for holding in known.holders(Version(0, 3))},
        what="halves",
        timeout=SOON,
    )
    await sender.close()
    late = await world.receiver("late")
    await late.ensure(3, timeout=SOON)
    assert same(dict(late.take(3)[1]), whole)
    assert late.transfers[0].holders.keys() == halves


async def test_a_newcomer_catches_up_from_a_peer_when_the_trainer_is_gone(world, weights):
    sender, early = await world.sender(), await world.receiver("early")
    await sender.publish(Version(0, 7), weights(7), timeout=SOON)
    await early.ensure(7, timeout=SOON)
    await world.service.wait_for(
        lambda known: any(holding.worker == "early" for holding in known.holders(Version(0, 7))), what="-", timeout=SOON
    )
    await sender.close()
    late = await world.receiver("late")
    await late.ensure(7, timeout=SOON)
    assert same(dict(late.take(7)[1]), weights(7))
    assert late.transfers[0].holders.keys() == {"early"}


async def test_the_newest_version_is_staged_while_another_is_in_use(world, weights):
    sender, receiver = await world.sender(), await world.receiver()
    await sender.publish(Version(0, 0), weights(0), timeout=SOON)
    await receiver.ensure(0, timeout=SOON)
    _, old = receiver.take(0)
    await sender.publish(Version(0, 1), weights(1), timeout=SOON)
    await receiver.wait_for(lambda: receiver.staged == Version(0, 1), what="θ1", timeout=SOON)
    assert receiver.current == Version(0, 0)
    told = receiver.status()
    assert (told["version"], told["newest"]) == (Version(0, 0).packed, Version(0, 1).packed)
    assert same(dict(old), weights(0))
    receiver.take(1)
    assert receiver.staged is None


async def test_versions_are_released_when_no_step_needs_them(world, weights):
    sender, receiver = await world.sender(), await world.receiver()
    for step in range(5):
        await sender.publish(Version(0, step), weights(step), timeout=SOON)
        await receiver.ensure(step, timeout=SOON)
    receiver.take(0)
    assert len(sender.versions) == 5
    world.service.require({1})
    await receiver.wait_for(lambda: receiver.held == [0, 1, 3, 4], what="release of θ2", timeout=SOON)
    receiver.take(3)
    await receiver.wait_for(lambda: receiver.held == [1, 3, 4], what="release of θ0", timeout=SOON)
    late = await world.receiver("late", want=lambda view: None)
    await late.wait_for(lambda: late.available() == [1, 3, 4], what="the catalogue", timeout=SOON)
    await late.ensure(1, timeout=SOON)
    assert same(dict(late.take(1)[1]), weights(1))
    assert [version.step for version in sender.versions] == [1, 3, 4]


async def test_taken_arrays_outlive_the_receiver(world, weights):
    sender, receiver = await world.sender(), await world.receiver()
    await sender.publish(Version(0, 0), weights(0), timeout=SOON)
    await receiver.ensure(0, timeout=SOON)
    _, taken = receiver.take(0)
    await receiver.close()
    assert receiver.nbytes == 0
    assert same(dict(taken), weights(0))


async def test_an_older_attempt_is_fenced_and_a_repeated_publication_is_not(world, weights):
    old, new = await world.sender("old"), await world.sender("new")
    await old.publish(Version(0, 4), weights(4), timeout=SOON)
    assert await old.publish(Version(0, 4), weights(4), timeout=SOON)
    with pytest.raises(Refused, match="other content"):
        await old.publish(Version(0, 4), weights(5), timeout=SOON)
    assert old.versions == [Version(0, 4)]
    await new.publish(Version(1, 2), weights(2), timeout=SOON)
    with pytest.raises(Fenced, match="attempt 0 publishes θ5, but attempt 1"):
        await old.publish(Version(0, 5), weights(5), timeout=SOON)
    assert Version(0, 5) not in old.versions


async def test_a_step_published_again_by_a_newer_attempt_is_not_moved_again(world, weights):
    receiver = await world.receiver()
    for attempt in range(2):
        sender = await world.sender(f"trainer@{attempt}")
        await sender.publish(Version(attempt, 4), weights(4), timeout=SOON)
        await receiver.wait_for(lambda at=attempt: receiver.staged == Version(at, 4), what="θ4", timeout=SOON)
    assert receiver.transfers[1].reused == receiver.transfers[1].nbytes
    assert receiver.take(4)[0] == Version(1, 4)


async def test_who_needs_one_tensor_gets_it_of_every_version_and_moves_it_only_when_it_changed(world):
    sender = await world.sender()
    receiver = await world.receiver(layout=lambda name, shape: Box.whole(shape) if name == "small" else None)
    for step, seed in enumerate((0, 0, 1)):
        tensors = bulk(step, 1) | {"small": bulk(seed, 1)["small"]}
        await sender.publish(Version(0, step), tensors, timeout=SOON)
        await receiver.ensure(step, timeout=SOON)
        assert same(dict(receiver.take(step)[1]), {"small": tensors["small"]})
    nbytes = tensors["small"].nbytes
    assert [record.nbytes for record in receiver.transfers] == [nbytes] * 3
    assert [record.reused for record in receiver.transfers] == [0, nbytes, 0]


async def test_wrong_bytes_of_one_holder_are_noticed_and_pulled_elsewhere(world, weights):
    sender = await world.sender("honest")
    await sender.publish(Version(0, 0), weights(0), timeout=SOON)
    corrupt = await world.receiver("corrupt")
    await corrupt.ensure(0, timeout=SOON)
    await world.service.wait_for(lambda known: len(known.holders(Version(0, 0))) == 2, what="two holders", timeout=SOON)
    corrupt._holder.copies[Version(0, 0)].arena.arrays["embed"][3, 3] += 1
    receivers = [await world.receiver(f"rollout-{index}") for index in range(6)]
    for receiver in receivers:
        await receiver.ensure(0, timeout=SOON)
        assert same(dict(receiver.take(0)[1]), weights(0))
    assert any(receiver.transfers[0].faults for receiver in receivers)


async def test_what_is_missing_is_named(world):
    receiver = await world.receiver()
    with pytest.raises(StaleHandle, match="step 3 is not held"):
        receiver.take(3)
    with pytest.raises(DeadlineExceeded, match="weights of step 3 did not come"):
        await receiver.ensure(3, timeout=0.05)
    sender = await world.sender()
    with pytest.raises(Refused, match="complex64"):
        await sender.publish(Version(0, 0), {"w": np.zeros(3, np.complex64)}, timeout=SOON)


async def test_a_restarted_driver_is_told_again(world, weights):
    sender, receiver = await world.sender(), await world.receiver("rollout")
    for step in (4, 5):
        await sender.publish(Version(1, step), weights(step), timeout=SOON)
        await receiver.ensure(step, timeout=SOON)
    await sender.close()
    await world.stop_driver()
    service = await world.start_driver()
    await service.wait_for(
        lambda known: known.find(4) is not None and known.find(5) is not None, what="both versions", timeout=SOON
    )
    assert service.catalogue.newest == Version(1, 5)
    assert service.catalogue.releasable == []
    late = await world.receiver("late")
    await late.ensure(4, timeout=SOON)
    assert same(dict(late.take(4)[1]), weights(4))


async def test_who_uses_what_the_next_driver_knows_with_other_content_ends(world, weights):
    sender, receiver = await world.sender(), await world.receiver("rollout")
    await sender.publish(Version(0, 1), weights(1), timeout=SOON)
    await receiver.ensure(1, timeout=SOON)
    receiver.take(1)
    await sender.close()
    await world.stop_driver()
    service = await world.start_driver()
    other = entries_of(copy_aside(Version(0, 1), weights(7)), worker="other")
    service.catalogue.publish(
        ManifestPart(version=1, part=0, parts=1, worker="other", address="tcp://127.0.0.1:1", tensors=other)
    )
    service.require([])
    with pytest.raises(Refused, match="two different θ1 exist"):
        await receiver.wait_for(lambda: False, what="its end", timeout=SOON)
    assert [holding.worker for holding in service.catalogue.holders(Version(0, 1))] == ["other"]


async def test_publishing_goes_through_when_the_driver_comes_back(world, weights):
    sender = await world.sender()
    await world.stop_driver()
    with pytest.raises(DeadlineExceeded, match="publishing θ2"):
        await sender.publish(Version(0, 2), weights(2), timeout=0.2)
    publishing = asyncio.create_task(sender.publish(Version(0, 3), weights(3), timeout=SOON))
    service = await world.start_driver()
    assert await publishing
    await service.wait_for(lambda known: known.find(2) is not None, what="θ2", timeout=SOON)


async def test_a_worker_that_was_believed_dead_announces_again(world, weights):
    sender = await world.sender()
    await sender.publish(Version(0, 2), weights(2), timeout=SOON)
    world.service.leave("trainer")
    assert world.service.catalogue.find(2) is None
    await world.service.wait_for(lambda known: known.find(2) is not None, what="θ2", timeout=SOON)


async def test_the_want_of_the_worker_decides(world, weights):
    sender, wanted = await world.sender(), [None]
    receiver = await world.receiver(want=lambda view: wanted[0])
    for step in range(3):
        await sender.publish(Version(0, step), weights(step), timeout=SOON)
    await receiver.wait_for(lambda: receiver.available() == [0, 1, 2], what="the catalogue", timeout=SOON)
    assert receiver.held == []
    wanted[0] = 1
    receiver.notify()
    await receiver.wait_for(lambda: receiver.held == [1], what="θ1", timeout=SOON)


async def test_large_tensors_come_in_bounded_chunks(world):
    tensors = {"w": np.random.default_rng(0).standard_normal((2048, 300))}
    sender = await world.sender()
    await sender.publish(Version(0, 0), tensors, timeout=SOON)
    largest = 0
    transport = HostTransport(name="rollout", chunk_bytes=1 << 18, window=3)
    pull = transport.pull

    async def spying(*args, sink, **options):
        def measure(region, data, **sent):
            nonlocal largest
            largest = max(largest, data.nbytes)
            sink(region, data, **sent)

        await pull(*args, sink=measure, **options)

    transport.pull = spying
    receiver = await world.receiver(transport=transport)
    await receiver.ensure(0, timeout=SOON)
    assert same(dict(receiver.take(0)[1]), tensors)
    assert 1 << 17 < largest <= 1 << 18


async def test_a_large_tensor_is_published_in_slices_that_every_rank_cuts_alike(world):
    rng = np.random.default_rng(0)
    tensors = {"big": rng.integers(0, 2**16, (3000, 1000), dtype=np.uint16), "small": np.ones(3, np.float32)}
    huge = rng.integers(0, 2**16, (40_000, 500), dtype=np.uint16)
    for rank in range(2):
        sender = await world.sender(f"rank{rank}", part=rank, parts=2)
        complete = await sender.publish(Version(0, 0), tensors | ({"huge": huge} if rank else {}), timeout=SOON)
        assert complete == bool(rank)
    slices = {entry.name: entry.slices for entry in world.service.catalogue.manifest(Version(0, 0)).tensors}
    assert len(slices["small"]) == 1
    assert 5 < len(slices["big"]) <= 6
    assert all(each.nbytes <= 1 << 20 for each in slices["big"])
    assert 16 <= len(slices["huge"]) <= 17
    receiver = await world.receiver()
    await receiver.ensure(0, timeout=SOON)
    assert same(dict(receiver.take(0)[1]), tensors | {"huge": huge})


async def test_the_catalogue_of_the_next_driver_is_heard(world):
    receiver = await world.receiver()
    await receiver.wait_for(lambda: receiver.view == world.service.view(), what="the catalogue", timeout=SOON)
    await world.stop_driver()
    service = await world.start_driver()
    service.require([7])
    await receiver.wait_for(lambda: receiver.view.required == (7,), what="that of the next driver", timeout=SOON)


async def beats_in(world, seconds: float) -> int:
    """Return how many heartbeats come in so many seconds."""
    before = world.server.counters.calls["directory.heartbeat"]
    await asyncio.sleep(seconds)
    return world.server.counters.calls["directory.heartbeat"] - before


async def test_a_version_that_the_catalogue_does_not_want_is_told_of_once_and_dropped_when_it_is_free(world):
    sender, follower = await world.sender(), await world.receiver("follower-7-a")
    world.service.require([])
    await sender.publish(Version(0, 1), bulk(1, 1), timeout=SOON)
    await follower.ensure(1, timeout=SOON)
    follower.take(1)
    await sender.close()
    await world.stop_driver()
    await world.start_driver()
    calls = world.server.counters.calls
    await until(lambda: calls["weights.held"], "the follower has told of it")
    assert await beats_in(world, 1.0) < 10
    assert calls["weights.held"] == 1
    newer = await world.sender("newer")
    await newer.publish(Version(0, 2), bulk(2, 1), timeout=SOON)
    await follower.ensure(2, timeout=SOON)
    follower.take(2)
    await follower.wait_for(lambda: follower.held == [2], what="only what is wanted", timeout=SOON)


async def test_versions_after_the_first_are_pulled_from_the_same_source_and_nobody_is_asked(world):
    sender = await world.sender()
    world.service.require([])
    receivers = [await world.receiver(f"r{index}") for index in range(5)]
    calls = world.server.counters.calls
    for step in range(4):
        await sender.publish(Version(0, step), bulk(step, 1), timeout=SOON)
        for receiver in receivers:
            await receiver.ensure(step, timeout=SOON)
        await world.service.wait_for(
            lambda known, step=step: len(known.holders(Version(0, step))) == 6, what="all holders", timeout=SOON
        )
        if step == 0:
            before = Counter(calls)
    made = calls - before
    assert (made["weights.held"], made["weights.locate"], made["weights.publish"]) == (0, 3 * 2, 3)
    for receiver in receivers:
        sources = [set(record.holders) for record in list(receiver.transfers)[1:]]
        assert sources == [sources[0]] * 3
        assert [record.faults for record in receiver.transfers] == [0] * 4


async def test_who_is_no_member_is_placed_nowhere(world):
    sender, driver = await world.sender(), RpcClient(name="ghost", resolve=world.address)
    await sender.publish(Version(0, 1), bulk(1, 1), timeout=SOON)
    asked = Locate(worker="ghost", address="tcp://127.0.0.1:1", version=Version(0, 1).packed, layout=WHOLE)
    try:
        with pytest.raises(StaleHandle, match="ghost is not registered"):
            await driver.call("weights.locate", asked, Located, timeout=SOON)
    finally:
        await driver.close()


async def test_who_is_no_member_holds_and_publishes_nothing_and_who_is_one_nothing_malformed(world):
    sender, driver = await world.sender(), RpcClient(name="ghost", resolve=world.address)
    await sender.publish(Version(0, 1), bulk(1, 1), timeout=SOON)
    copied = copy_aside(Version(0, 2), bulk(2, 1))
    part = ManifestPart(
        version=Version(0, 2).packed,
        part=0,
        parts=1,
        worker="ghost",
        address="tcp://127.0.0.1:1",
        tensors=entries_of(copied, worker="ghost"),
    )
    held = VersionsHeld(worker="ghost", address="tcp://127.0.0.1:1", version=Version(0, 1).packed)
    try:
        with pytest.raises(PeerLost, match="ghost is not registered"):
            await driver.call("weights.publish", part, Published, timeout=SOON)
        with pytest.raises(PeerLost, match="ghost is not registered"):
            await driver.call("weights.held", held, VersionsHeldReply, timeout=SOON)
        with pytest.raises(ProtocolError, match="'big' is not of trainer alone"):
            await driver.call("weights.publish", replace(part, worker="trainer"), Published, timeout=SOON)
    finally:
        await driver.close()
    known = world.service.catalogue
    assert known.newest == Version(0, 1)
    assert [holding.worker for holding in known.holders(Version(0, 1))] == ["trainer"]


def nothing_of_it(name: str, _shape: tuple[int, ...]) -> Box:
    raise KeyError(f"no layout of {name}")


def too_much_of_it(_name: str, shape: tuple[int, ...]) -> Box:
    return Box.whole([2 * size for size in shape])


@pytest.mark.parametrize(
    ("layout", "error", "said"),
    [
        (nothing_of_it, KeyError, "no layout of big"),
        (too_much_of_it, ValueError, r"the layout requests .* of 'big', which has the shape \(1024, 255\)"),
    ],
)
async def test_a_layout_that_is_wrong_is_told_to_whoever_waits(world, layout, error, said):
    sender, receiver = await world.sender(), await world.receiver(layout=layout)
    waiting = asyncio.create_task(receiver.ensure(1, timeout=SOON))
    await sender.publish(Version(0, 1), bulk(1, 1), timeout=SOON)
    with pytest.raises(error, match=said):
        await waiting
    with pytest.raises(error, match=said):
        await receiver.wait_for(lambda: False, what="nothing", timeout=SOON)


async def test_receivers_leave_a_source_that_hears_of_no_version_and_nobody_else_is_blamed(world):
    sender = await world.sender()
    receivers = {f"r{index}": await world.receiver(f"r{index}") for index in range(8)}
    await sender.publish(Version(0, 1), bulk(1, 1), timeout=SOON)
    for receiver in receivers.values():
        await receiver.ensure(1, timeout=SOON)
    placed = world.service.catalogue._spread._receivers
    deaf = next(name for name in receivers if placed[name].parent is None and placed[name].children)
    receivers[deaf]._holder.receive = lambda broadcast, unknown: None
    below = [name for name in receivers if placed[name].parent == deaf]
    world.service.catalogue.leave(deaf)
    await sender.publish(Version(0, 2), bulk(2, 1), timeout=SOON)
    hearing = [receiver for name, receiver in receivers.items() if name != deaf]
    for receiver in hearing:
        await receiver.ensure(2, timeout=SOON)
    assert below
    assert all(receiver.transfers[-1].faults == 0 for receiver in hearing)
    assert not world.service.catalogue._spread._doubted
    assert all(placed[name].parent != deaf for name in below)
