"""Differences between versions: by themselves, and over real sockets."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from weights_world import small_steps

from asyncflow.errors import ManifestError, ProtocolError
from asyncflow.identity import Version
from asyncflow.rpc.server import RpcServer
from asyncflow.weights.deltas import difference, restored
from asyncflow.weights.host_transport import Bucket, ChunkReply, ChunkRequest, HostTransport
from asyncflow.weights.slices import Arena, Box
from asyncflow.weights.transport import Pull, Region, Source

SOON = 20.0
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def octets(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


@given(st.data(), st.sampled_from([1, 2, 4, 8]), st.integers(0, 3000), st.floats(0.0, 0.6), st.integers(0, 2**32 - 1))
def test_what_is_restored_is_what_was_compared(data, itemsize, size, share, seed):
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, size * itemsize, dtype=np.uint8).view(UNSIGNED[itemsize])
    new = old.copy()
    changed = rng.random(size) < share
    step = data.draw(st.sampled_from([1, 127, 128, 2 ** (8 * itemsize - 1), 2 ** (8 * itemsize) - 1]))
    new[changed] += np.array(step % 2 ** (8 * itemsize), np.uint64).astype(UNSIGNED[itemsize])
    delta = difference(octets(old), octets(new), itemsize=itemsize)
    if delta is not None:
        assert len(delta) < new.nbytes
        assert bytes(restored(octets(old), memoryview(delta), itemsize=itemsize)) == new.tobytes()


@given(arrays.arrays(np.uint8, st.integers(0, 80)), st.sampled_from([1, 2, 4, 8]), st.integers(0, 600))
def test_whatever_bytes_come_nothing_is_written_outside(noise, itemsize, size):
    old = np.zeros(size, UNSIGNED[itemsize])
    head = np.frombuffer(noise[:2].tobytes().ljust(8, b"\0"), np.uint8) if noise.size else np.zeros(0, np.uint8)
    for delta in (noise, np.concatenate([head, noise])):
        try:
            assert restored(octets(old), octets(delta), itemsize=itemsize).nbytes == old.nbytes
        except ValueError:
            continue
    assert not old.any()


def test_elements_far_apart_and_the_very_last_one_are_found():
    old = np.zeros(100_000, np.uint16)
    new = old.copy()
    new[[0, 254, 255, 256, 511, 40_000, 99_999]] = [1, 2, 0xFFFF, 4, 5, 0x8000, 7]
    delta = difference(octets(old), octets(new), itemsize=2)
    assert bytes(restored(octets(old), memoryview(delta), itemsize=2)) == new.tobytes()
    assert len(delta) < 8 + 100_000 / 255 + 7 * 4 + 7
    with pytest.raises(ValueError, match="the gaps are not those"):
        restored(octets(old[:99_999]), memoryview(delta), itemsize=2)


def test_contents_that_differ_everywhere_are_not_searched():
    rng = np.random.default_rng(0)
    old, new = (octets(rng.standard_normal(4096).astype(np.float32)) for _ in range(2))
    assert difference(old, new, itemsize=4) is None


@pytest.mark.parametrize("chunk_bytes", [1 << 14, 1 << 20])
async def test_a_small_step_in_bfloat16_travels_as_what_changed(world, chunk_bytes):
    sender = await world.sender()
    receiver = await world.receiver("rollout", transport=HostTransport(name="rollout", chunk_bytes=chunk_bytes))
    plain = await world.receiver("plain", transport=HostTransport(name="plain", delta=False))
    versions = small_steps(0, steps=2)
    for step, tensors in enumerate(versions):
        await sender.publish(Version(0, step), tensors, timeout=SOON)
        for each in (receiver, plain):
            await each.ensure(step, timeout=SOON)
            taken = each.take(step)[1]
            assert all(np.array_equal(taken[name], array) for name, array in tensors.items())
    first, *later = receiver.transfers
    assert first.sent == first.nbytes
    assert all(record.sent <= 0.1 * record.nbytes and record.faults == 0 for record in later)
    assert all(record.sent + record.reused == record.nbytes for record in plain.transfers)


async def test_receivers_send_each_other_what_changed_once_the_trainer_is_gone(world):
    sender, early = await world.sender(), await world.receiver("early")
    late = await world.receiver("late", want=lambda view: None)
    versions = small_steps(1, steps=1)
    await sender.publish(Version(0, 0), versions[0], timeout=SOON)
    for receiver in (early, late):
        await receiver.ensure(0, timeout=SOON)
    await sender.publish(Version(0, 1), versions[1], timeout=SOON)
    await early.ensure(1, timeout=SOON)
    await sender.close()
    await late.ensure(1, timeout=SOON)
    record = late.transfers[-1]
    assert record.holders.keys() == {"early"}
    assert record.sent <= 0.1 * record.nbytes
    taken = late.take(1)[1]
    assert all(np.array_equal(taken[name], array) for name, array in versions[1].items())


async def test_a_base_whose_bytes_are_not_the_holders_is_noticed_and_the_whole_comes(world):
    sender, receiver = await world.sender(), await world.receiver()
    versions = small_steps(2, steps=1)
    await sender.publish(Version(0, 0), versions[0], timeout=SOON)
    await receiver.ensure(0, timeout=SOON)
    receiver._holder.copies[Version(0, 0)].arena.arrays["up"][7] ^= 1
    await sender.publish(Version(0, 1), versions[1], timeout=SOON)
    await receiver.ensure(1, timeout=SOON)
    assert all(np.array_equal(receiver.take(1)[1][name], array) for name, array in versions[1].items())
    assert receiver.transfers[-1].faults == 1


@pytest.mark.parametrize(
    ("frame", "deltas", "match"),
    [
        (bytes(8), (0,), None),
        (bytes(3), (0,), "is invalid"),
        (b"\x01\0\0\0\x01\0\0\0\x04\x01", (0,), "is invalid"),
        (bytes(8), (1,), "do not match the request"),
        (bytes(7), (), "sizes"),
    ],
)
async def test_a_liar_gets_nothing_written(frame, deltas, match):
    server = RpcServer(name="liar")
    server.route("weights.fetch", ChunkRequest, lambda *_: (ChunkReply(digests=(), deltas=deltas), [frame]))
    source = Source(worker="liar", address=await server.start())
    base = Arena({"w": ("bfloat16", Box.whole((4,)))})
    puller = HostTransport(name="puller")
    await puller.start(lambda _, tensor, box: base.read(tensor, box))
    got = []
    region = Region(tensor="w", box=Box.whole((4,)), itemsize=2)

    def pull():
        sink = lambda region, data, *, sent: got.append((bytes(data), sent))  # noqa: E731
        return puller.pull(Pull(source, Version(0, 1), [region], checked=False, base=Version(0, 0)), sink=sink)

    if match is None:
        await pull()
        assert got == [(bytes(8), 8)]
    else:
        with pytest.raises(ProtocolError, match=match):
            await pull()
        assert got == []
    await puller.close()
    await server.close()


def test_a_bandwidth_at_which_peers_would_give_up_is_refused():
    with pytest.raises(ManifestError, match="fewer than 1048576"):
        HostTransport(name="holder", bandwidth=1000)


async def test_what_is_sent_stays_below_the_bandwidth_over_all_peers():
    bucket, loop = Bucket(1_000_000), asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(*(bucket.take(20_000) for _ in range(10)))
    assert loop.time() - began >= 0.2


async def test_bytes_of_a_request_that_was_cancelled_keep_nobody_waiting():
    bucket = Bucket(1_000_000)
    cancelled = asyncio.create_task(bucket.take(1_000_000_000))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    async with asyncio.timeout(20):
        await bucket.take(1000)
