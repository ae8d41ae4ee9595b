"""Tests of what every transport has to do, over real sockets and memory, with holders that die as real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket

import numpy as np
import pytest
from transports_world import FAST, QUICK_S, fast, spoil, strike, with_host
from weights_world import SOON, bulk, receiver_that_prefers

import debian
from asyncflow.errors import DeadlineExceeded, ManifestError, PeerLost, ProtocolError, Refused, StaleHandle
from asyncflow.identity import Version
from asyncflow.local.issuer import Issuer
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.shm import SHARED_MEMORY_ENV
from asyncflow.weights.fast_transport import MOST_REGIONS, WithHost, chunks_of
from asyncflow.weights.host_transport import HostTransport
from asyncflow.weights.manifest import digest_of
from asyncflow.weights.placed_transport import PlaceRequest, Pointers
from asyncflow.weights.sender import PublishedSlice
from asyncflow.weights.slices import Arena, Box, anonymous
from asyncflow.weights.transport import Pull, Region, Source, open_transport

VERSION = Version(0, 1)
WHOLE = Box.whole((300, 200))

kinds = pytest.mark.parametrize("kind", ["host", *FAST])
fast_kinds = pytest.mark.parametrize("kind", list(FAST))


@pytest.fixture(scope="module", autouse=True)
def libraries():
    debian.prepare()


@pytest.fixture
async def opened():
    """Makes transports that are closed at the end; a holder serves an arena in its own memory."""
    made = []

    async def open_one(kind, name, arena_of=None, **options):
        transport = HostTransport(name=name, **options) if kind == "host" else fast(kind, name, **options)
        made.append(transport)
        held = {}

        def read(version, tensor, box):
            if version != VERSION:
                raise StaleHandle(f"no {version}")
            return held["arena"].read(tensor, box)

        address = await transport.start(read)
        if arena_of is not None:
            held["arena"] = arena_of(transport.allocate)
        return transport, Source(worker=name, address=address), held.get("arena")

    yield open_one
    for transport in made:
        await transport.close()


def filled(allocate) -> Arena:
    boxes = {"w": ("float64", WHOLE), "b": ("bfloat16", Box((7,), (5,))), "one": ("float32", Box.whole(()))}
    arena = Arena(boxes, allocate=allocate)
    rng = np.random.default_rng(0)
    arena.arrays["w"][...] = rng.standard_normal((300, 200))
    arena.arrays["b"][...] = np.arange(5)
    arena.arrays["one"][...] = 42.0
    return arena


async def pulled(transport, source, regions, *, checked=False, version=VERSION) -> Arena:
    """Return what came, in an arena; every element came once."""
    boxes = {region.tensor: (_DTYPES[region.tensor], region.box) for region in regions}
    target = Arena(boxes, allocate=transport.allocate)
    counts = Arena({name: ("uint8", box) for name, (_, box) in boxes.items()})

    def sink(region, data, *, sent=None):
        target.write(region.tensor, region.box, data)
        counts.write(region.tensor, region.box, memoryview(bytes([1] * region.box.volume)))
        sizes.append(data.nbytes)

    sizes: list[int] = []
    await transport.pull(Pull(source, version, regions, checked), sink=sink)
    assert sum(sizes) == sum(region.nbytes for region in regions)
    assert all((array == 1).all() for array in counts.arrays.values())
    return target


_DTYPES = {"w": "float64", "b": "bfloat16", "one": "float32"}
_SIZES = {"w": 8, "b": 2, "one": 4}


def region_of(tensor: str, box: Box) -> Region:
    return Region(tensor=tensor, box=box, itemsize=_SIZES[tensor])


@kinds
@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize(("box", "chunk_bytes"), [(Box((10, 20), (250, 150)), 8192), (WHOLE, 1 << 20)])
async def test_chunks_tile_what_was_asked_for_and_are_equal_bit_for_bit(opened, kind, checked, box, chunk_bytes):
    _, source, arena = await opened(kind, "holder", filled)
    puller, _, _ = await opened(kind, "puller", chunk_bytes=chunk_bytes)
    regions = [region_of("w", box), region_of("b", Box((8,), (3,))), region_of("one", Box.whole(()))]
    target = await pulled(puller, source, regions, checked=checked)
    rows, columns = (slice(start, start + size) for start, size in zip(box.offset, box.extent, strict=True))
    assert np.array_equal(target.arrays["w"], arena.arrays["w"][rows, columns])
    assert np.array_equal(target.arrays["b"], arena.arrays["b"][1:4])
    assert target.arrays["one"] == 42.0


async def test_memory_is_handed_over_again_when_descriptors_are_given_back(opened):
    holder, source, _ = await opened("ipc", "holder", filled)
    puller, _, _ = await opened("ipc", "puller")
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    callers = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (callers[-1].fileno() + 1, most[1]))
    try:
        with contextlib.suppress(OSError):
            while True:  # holes below the limit
                callers.append(socket.socket(socket.AF_UNIX))
        for caller in callers[:3]:
            caller.setblocking(False)
            caller.connect(f"\0{holder.door}".encode())
        await asyncio.sleep(0)  # the holder looks at its door, and has no descriptor left
        await asyncio.sleep(0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
        for caller in callers:
            caller.close()
    target = await pulled(puller, source, [region_of("w", WHOLE)])
    assert target.arrays["w"].shape == (300, 200)


@kinds
async def test_what_is_not_held_is_refused_and_does_no_harm(opened, kind):
    _, source, _ = await opened(kind, "holder", filled)
    puller, _, _ = await opened(kind, "puller")
    small = region_of("w", Box((0, 0), (1, 1)))
    with pytest.raises(StaleHandle):
        await pulled(puller, source, [small], version=Version(0, 2))
    for box in (Box((0, 0), (301, 1)), Box((-1, 0), (1, 1)), Box((0,), (1,))):
        with pytest.raises(StaleHandle):
            await puller.pull(Pull(source, VERSION, [region_of("w", box)], checked=False), sink=lambda *_: None)
    assert await pulled(puller, source, [small])


@fast_kinds
async def test_what_a_holder_is_still_getting_is_waited_for_and_not_for_ever(kind):
    came = asyncio.Event()
    holder, puller = fast(kind, "holder"), fast(kind, "puller", deadline_s=QUICK_S)
    asked = asyncio.Event()

    async def until(_version, _regions):
        asked.set()
        await came.wait()

    def read(version, tensor, box):
        if not came.is_set():
            raise StaleHandle(f"{version} has not come yet")
        return arena.read(tensor, box)

    source = Source(worker="holder", address=await holder.start(read, until=until))
    await puller.start(read)
    arena = filled(holder.allocate)
    region = region_of("w", WHOLE)
    with pytest.raises(StaleHandle, match="has not come yet"):
        await pulled(puller, source, [region])
    asked.clear()
    pulling = asyncio.create_task(pulled(puller, source, [region]))
    await asked.wait()
    came.set()
    assert np.array_equal((await pulling).arrays["w"], arena.arrays["w"])
    await puller.close()
    await holder.close()


@fast_kinds
async def test_wrong_bytes_are_found_where_nobody_else_can(opened, kind):
    _, source, _ = await opened(kind, "holder", filled)
    puller, _, _ = await opened(kind, "puller")
    spoil(puller)
    with pytest.raises(ProtocolError, match="changed during transfer"):
        await pulled(puller, source, [region_of("w", WHOLE)], checked=True)


@kinds
@pytest.mark.parametrize(("there", "here"), [("trainer", "rollout"), ("follower", "follower")])
async def test_calls_go_under_the_certificate_of_the_job(opened, monkeypatch, kind, there, here, tmp_path):
    monkeypatch.setenv(SHARED_MEMORY_ENV, "off")  # as between two hosts, where certificates alone say who calls
    issuer = Issuer(tmp_path / "tls")
    _, source, arena = await opened(kind, "holder", filled, credentials=issuer.credentials(there))
    puller, _, _ = await opened(kind, "puller", credentials=issuer.credentials(here, 1))
    stranger, _, _ = await opened(kind, "stranger", credentials=issuer.credentials("storage"))
    target = await pulled(puller, source, [region_of("w", WHOLE)])
    assert np.array_equal(target.arrays["w"], arena.arrays["w"])
    with pytest.raises(Refused, match="may not call"):
        await pulled(stranger, source, [region_of("w", WHOLE)])


@fast_kinds
async def test_a_fast_way_that_changes_bytes_loses_no_version(world, kind):
    sender = await world.sender(transport=with_host(kind, "trainer"))
    transport = with_host(kind, "rollout")
    spoil(transport._fast)
    receiver = await world.receiver(transport=transport)
    await sender.publish(VERSION, bulk(1, 1), timeout=SOON)
    await receiver.ensure(1, timeout=SOON)
    record = receiver.transfers[0]
    assert record.fallbacks >= 1
    assert record.faults >= 1
    same(receiver.take(1)[1], bulk(1, 1))


@fast_kinds
async def test_sharded_layouts_feed_one_another(world, kind):
    """Rows of four ranks, as FSDP cuts them, become columns of two, as tensor parallelism does."""
    whole = np.random.default_rng(3).standard_normal((640, 480)).astype(np.float32)
    for part in range(4):
        sender = await world.sender(f"trainer-{part}", transport=with_host(kind, f"t{part}"), part=part, parts=4)
        rows = slice(160 * part, 160 * part + 160)
        await sender.publish(
            VERSION, {"w": PublishedSlice(array=whole[rows], offset=(160 * part, 0), shape=(640, 480))}, timeout=SOON
        )
    for half in range(2):
        box = Box((0, 240 * half), (640, 240))
        transport = with_host(kind, f"r{half}")
        receiver = await world.receiver(transport=transport, layout=lambda _name, _shape, box=box: box)
        await receiver.ensure(1, timeout=SOON)
        assert np.array_equal(receiver.take(1)[1]["w"], whole[:, 240 * half : 240 * half + 240])
        assert receiver.transfers[0].fallbacks == 0


@pytest.mark.process
@fast_kinds
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_holder_that_dies_in_the_middle_is_replaced_by_another(world, spawn, kind, fault):
    victim = await spawn("sender", world.address, "victim", "", kind)
    victim.tell(0, 1)
    await victim.says("published")
    peer = await world.sender("peer", transport=with_host(kind, "peer"))
    await peer.publish(VERSION, bulk(1), timeout=SOON)
    transport = with_host(kind, "rollout", chunk_bytes=1 << 17, deadline_s=QUICK_S)
    ended = strike(transport._fast, after=5, blow=lambda: os.kill(victim.process.pid, fault))
    receiver = await world.receiver(receiver_that_prefers("victim", ["peer"], VERSION), transport=transport)
    await receiver.ensure(1, timeout=SOON)
    record = receiver.transfers[0]
    (seconds, error), *_ = ended
    assert isinstance(error, PeerLost | DeadlineExceeded)
    assert seconds < SOON / 2
    assert record.fallbacks >= 1
    assert record.faults >= 1
    assert 4 << 17 <= record.holders["victim"] < record.nbytes
    assert sum(record.holders.values()) == record.nbytes
    same(receiver.take(1)[1], bulk(1))


async def test_a_fast_way_that_cannot_start_leaves_the_host_network(world, monkeypatch):
    transport = with_host("ipc", "trainer")
    reasons = iter([OSError("no sockets left")])

    async def prepare():
        raise next(reasons)

    monkeypatch.setattr(transport._fast, "prepare", prepare)
    sender = await world.sender(transport=transport)
    assert transport.allocate is anonymous
    receiver = await world.receiver(transport=with_host("ipc", "rollout"))
    await sender.publish(VERSION, bulk(1, 1), timeout=SOON)
    await receiver.ensure(1, timeout=SOON)
    assert receiver.transfers[0].fallbacks == 1
    same(receiver.take(1)[1], bulk(1, 1))


async def test_a_source_that_was_doubted_is_asked_over_the_host_network(world):
    sender = await world.sender(transport=with_host("ipc", "trainer"))
    transport = with_host("ipc", "rollout")
    transport.doubt("trainer")
    ended = strike(transport._fast, after=1, blow=lambda: None)
    receiver = await world.receiver(transport=transport)
    await sender.publish(VERSION, bulk(1, 1), timeout=SOON)
    await receiver.ensure(1, timeout=SOON)
    assert (receiver.transfers[0].fallbacks, receiver.transfers[0].faults) == (1, 0)
    assert not ended


async def test_a_pair_that_the_devices_library_refuses_goes_over_the_host_network(world):
    """No device is here, as NCCL says; on one device it refuses, too."""
    given = {"device": "cuda:0", "collective": "nccl"}
    sender = await world.sender(transport=with_host("pairs", "trainer", **given))
    receiver = await world.receiver(transport=with_host("pairs", "rollout", **given))
    await sender.publish(VERSION, bulk(1, 1), timeout=SOON)
    await receiver.ensure(1, timeout=SOON)
    assert (receiver.transfers[0].fallbacks, receiver.transfers[0].faults) == (1, 0)
    same(receiver.take(1)[1], bulk(1, 1))


async def test_memory_is_used_again_and_only_when_nobody_reads_it(opened):
    """A lease keeps the memory of a version that its holder has dropped, until the peer is done."""
    holder, source, arena = await opened("ipc", "holder", filled)
    client = RpcClient(name="peer", resolve=source.address)
    asked = PlaceRequest(version=VERSION.packed, regions=(region_of("w", WHOLE),), checked=True)
    placed = await client.call("weights.place", asked, Pointers, timeout=5)
    assert placed.digests == (digest_of(arena.arrays["w"]),)
    data = arena.read("w", WHOLE)
    assert holder.pool.find(data) == placed.pointers[0]
    arena.arrays.clear()
    del arena, data
    first = holder.pool.take(WHOLE.volume * 8)
    assert holder.pool.find(first).block != placed.pointers[0].block
    done = PlaceRequest(version=VERSION.packed, regions=(), checked=False, done=(placed.lease,))
    await client.call("weights.place", done, Pointers, timeout=5)
    assert not holder._leases
    await client.close()


@fast_kinds
async def test_requests_that_make_no_sense_are_refused(opened, kind):
    holder, _, _ = await opened(kind, "holder", filled)
    small = region_of("w", Box((0, 0), (1, 1)))
    huge = Region(tensor="w", box=Box((0, 0), (1 << 20, 1 << 20)), itemsize=8)
    for regions in ([small] * (MOST_REGIONS + 1), [huge], [Region(tensor="w", box=small.box, itemsize=0)]):
        with pytest.raises(ProtocolError, match="may have up to"):
            await holder.read(VERSION.packed, regions, wait_s=0.0)
    with pytest.raises(ProtocolError, match="another element size"):
        await holder.read(VERSION.packed, [Region(tensor="w", box=small.box, itemsize=4)], wait_s=0.0)


def test_chunks_keep_to_their_size_and_number():
    regions = [region_of("w", WHOLE), *[region_of("b", Box((7,), (1,)))] * 600]
    chunks = list(chunks_of(regions, most=10_000))
    assert all(sum(piece.nbytes for piece in chunk) <= 10_000 for chunk in chunks)
    assert all(1 <= len(chunk) <= MOST_REGIONS for chunk in chunks)
    assert sum(piece.nbytes for chunk in chunks for piece in chunk) == sum(region.nbytes for region in regions)


def test_transports_are_found_by_name_and_have_the_host_network_behind_them():
    assert isinstance(open_transport("host", device="cuda:0", collective="nccl", name="x"), HostTransport)
    for kind, made in FAST.items():
        opened = open_transport(kind, device="cuda:0", collective="nccl", name="x", delta=False)
        assert isinstance(opened, WithHost)
        assert isinstance(opened._fast, made)
    with pytest.raises(ManifestError, match="no installed package offers 'pigeon'"):
        open_transport("pigeon")


def same(left, right) -> None:
    assert left.keys() == right.keys()
    assert all(np.array_equal(left[name].view(np.uint8), right[name].view(np.uint8)) for name in right)
