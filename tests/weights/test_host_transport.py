"""The host transport by itself, and the memory that it serves."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from asyncflow.errors import ManifestError, PeerLost, ProtocolError, RemoteError, StaleHandle
from asyncflow.identity import Version
from asyncflow.local.issuer import Issuer
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.server import RpcServer
from asyncflow.weights.host_transport import ChunkReply, ChunkRequest, HostTransport
from asyncflow.weights.slices import Arena, Box
from asyncflow.weights.transport import Pull, Region, Source, open_transport

VERSION = Version(0, 1)
WHOLE = Box.whole((300, 200))


@pytest.fixture
def arena():
    arena = Arena({"w": ("float64", WHOLE), "b": ("bfloat16", Box((7,), (5,)))})
    arena.arrays["w"][...] = np.random.default_rng(0).standard_normal((300, 200))
    arena.arrays["b"][...] = np.arange(5)
    return arena


@pytest.fixture
async def served(arena):
    transport = HostTransport(name="holder")

    def read(version, tensor, box):
        if version != VERSION:
            raise StaleHandle(f"no {version}")
        return arena.read(tensor, box)

    yield Source(worker="holder", address=await transport.start(read))
    await transport.close()


async def pull(source, regions, *, checked=False, version=VERSION, **options) -> list[tuple[Region, bytes]]:
    got: list[tuple[Region, bytes]] = []
    transport = HostTransport(name="puller", **options)
    await transport.pull(
        Pull(source, version, regions, checked), sink=lambda region, data, **_: got.append((region, bytes(data)))
    )
    return got


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("chunk_bytes", [1, 4096, 1 << 20])
async def test_chunks_tile_what_was_asked_for(served, arena, checked, chunk_bytes):
    box = Box((10, 20), (20, 3) if chunk_bytes == 1 else (250, 150))
    target = Arena({"w": ("float64", WHOLE)})
    chunks = await pull(
        served, [Region(tensor="w", box=box, itemsize=8)], checked=checked, chunk_bytes=chunk_bytes, window=3
    )
    for region, data in chunks:
        target.write("w", region.box, memoryview(data))
    assert sum(region.nbytes for region, _ in chunks) == box.volume * 8
    assert all(len(data) <= max(chunk_bytes, 8) for _, data in chunks)
    expected = np.zeros((300, 200))
    inside = np.s_[box.offset[0] : box.offset[0] + box.extent[0], box.offset[1] : box.offset[1] + box.extent[1]]
    expected[inside] = arena.arrays["w"][inside]
    assert np.array_equal(target.arrays["w"], expected)


@pytest.mark.parametrize(
    ("version", "region"),
    [
        (Version(0, 2), Region(tensor="w", box=Box((0, 0), (1, 1)), itemsize=8)),
        (VERSION, Region(tensor="nothing", box=Box((0, 0), (1, 1)), itemsize=8)),
        (VERSION, Region(tensor="w", box=Box((0, 0), (301, 1)), itemsize=8)),
        (VERSION, Region(tensor="w", box=Box((0,), (1,)), itemsize=8)),
        (VERSION, Region(tensor="b", box=Box((6,), (2,)), itemsize=2)),
    ],
)
async def test_what_is_not_held_is_refused(served, version, region):
    with pytest.raises(StaleHandle):
        await pull(served, [region], version=version)


async def test_requests_that_make_no_sense_are_refused_and_do_no_harm(served):
    client = RpcClient(name="bad", resolve=served.address)
    small = Region(tensor="w", box=Box((0, 0), (1, 1)), itemsize=8)
    for regions in (
        (small,) * 2000,
        (Region(tensor="w", box=Box((0, 0), (1 << 20, 1 << 20)), itemsize=8),),
        (Region(tensor="w", box=Box((-5, -5), (-1, -1)), itemsize=8),),
        (Region(tensor="w", box=Box((0, 0), (1, 1, 1)), itemsize=8),),
    ):
        with pytest.raises((ProtocolError, StaleHandle)):
            await client.call(
                "weights.fetch", ChunkRequest(version=1, regions=regions, checked=False), ChunkReply, timeout=5
            )
    await client.close()
    assert await pull(served, [small])


async def test_bytes_that_are_not_what_was_asked_for_are_refused():
    server = RpcServer(name="liar")

    async def lie(request: ChunkRequest, _frames):
        nbytes = sum(region.nbytes for region in request.regions)
        return ChunkReply(digests=("0" * 32,)), [bytes(nbytes if request.checked else nbytes - 1)]

    server.route("weights.fetch", ChunkRequest, lie)
    source = Source(worker="liar", address=await server.start())
    region = Region(tensor="w", box=Box((0, 0), (1, 4)), itemsize=8)
    for checked, match in ((False, "sizes"), (True, "changed during transfer")):
        with pytest.raises(ProtocolError, match=match):
            await pull(source, [region], checked=checked)
    await server.close()


async def test_a_holder_that_closes_is_lost_at_once(served):
    transport = HostTransport(name="holder")
    source = Source(worker="holder", address=await transport.start(lambda *_: memoryview(bytes(8))))

    async def close_then_answer(*_):
        await transport.close()

    route = transport._server._routes["weights.fetch"]
    transport._server._routes["weights.fetch"] = route._replace(
        handler=lambda call, frames: asyncio.ensure_future(close_then_answer(call, frames))
    )
    with pytest.raises((PeerLost, RemoteError)):
        await pull(source, [Region(tensor="w", box=Box((0, 0), (1, 1)), itemsize=8)])


async def test_weights_travel_under_the_key_of_the_job(arena, tmp_path):
    credentials = Issuer(tmp_path / "tls").credentials("rollout")
    transport = HostTransport(name="holder", credentials=credentials)
    source = Source(worker="holder", address=await transport.start(lambda _, tensor, box: arena.read(tensor, box)))
    region = Region(tensor="w", box=WHOLE, itemsize=8)
    chunks = await pull(source, [region], credentials=credentials)
    assert sum(len(data) for _, data in chunks) == region.nbytes
    await transport.close()


def test_an_arena_serves_in_place_and_returns_read_only_views(arena):
    rows = arena.read("w", Box((5, 0), (10, 200)))
    arena.arrays["w"][5, 0] = 42.0
    assert np.frombuffer(rows, np.float64)[0] == 42.0
    assert rows.readonly
    columns = arena.read("w", Box((0, 3), (300, 2)))
    assert np.array_equal(np.frombuffer(columns, np.float64).reshape(300, 2), arena.arrays["w"][:, 3:5])
    with pytest.raises(ValueError, match="read-only"):
        arena.tensors["w"][0, 0] = 1.0
    with pytest.raises(ValueError, match="reshape"):
        arena.write("b", Box((7,), (5,)), memoryview(bytes(8)))
    assert arena.nbytes == 300 * 200 * 8 + 5 * 2
    assert all(array.ctypes.data % 64 == 0 for array in arena.arrays.values())


def test_transports_are_found_by_name():
    assert isinstance(open_transport("host", name="x"), HostTransport)
    with pytest.raises(ManifestError, match="no installed package offers 'pigeon'"):
        open_transport("pigeon")
