"""Mooncake's processes that die, hang, restart or are full affect a backend only as documented."""

import asyncio
import signal
import time

import numpy as np
import pytest
from store_world import MIB, MooncakeWorld

from asyncflow.errors import PeerLost
from asyncflow.queue.storage.backend import BytesLost, Outcome, Place
from asyncflow.queue.storage.mooncake import MooncakeConnection, MooncakeStore
from asyncflow.rpc.columns import Jagged

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]


@pytest.fixture
def make_world(tmp_path, stores):
    made = []

    def make(**words):
        made.append(MooncakeWorld(tmp_path, **words))
        return made[-1]

    yield make
    for world in made:
        world.close()


def rows(count, *, size=1000):
    return {"x": Jagged.from_rows([np.full(size, row) for row in range(count)], "int64")}


def places(blob, count):
    return [Place(blob, row) for row in range(count)]


async def read(backend, blob, count):
    """Return the rows that are there, after telling which are lost."""
    left = places(blob, count)
    try:
        await backend.get(left, ["x"])
    except BytesLost as lost:
        left = [place for place in left if place not in set(lost.places)]
        if left:
            got = await backend.get(left, ["x"])
            assert [int(row[0]) for row in got["x"].rows()] == [place.row for place in left]
    return left


async def test_a_holder_is_killed(make_world):
    world = make_world(holders=2)
    backend = await world.backend()
    await backend.put(1, rows(60))
    world.holders[0].signal(signal.SIGKILL)
    left = await read(backend, 1, 60)
    assert 0 < len(left) < 60
    putting = asyncio.create_task(backend.put(2, rows(60)))
    await backend.free(places(1, 60), ["x"])
    await putting
    assert await backend.get(places(2, 60), ["x"]) == rows(60)
    world.replace_holder(0)
    await backend.put(3, rows(60))
    assert await backend.get(places(3, 60), ["x"]) == rows(60)
    await backend.close()


async def test_a_holder_hangs(make_world):
    world = make_world()
    backend = await world.backend()
    await backend.put(1, rows(10))
    world.holders[0].signal(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises((BytesLost, PeerLost)):
        await backend.get(places(1, 10), ["x"])
    assert time.monotonic() - began < 120
    world.holders[0].signal(signal.SIGCONT)
    putting = asyncio.create_task(backend.put(2, rows(10)))
    await asyncio.wait_for(putting, 60)
    assert await backend.get(places(2, 10), ["x"]) == rows(10)
    await backend.close()


async def test_the_master_starts_again(make_world):
    world = make_world()
    backend = await world.backend()
    await backend.put(1, rows(10))
    await asyncio.to_thread(world.restart_master)
    assert await read(backend, 1, 10) == []
    await backend.free(places(1, 10), ["x"])
    await asyncio.wait_for(backend.put(2, rows(10)), 60)
    assert await backend.get(places(2, 10), ["x"]) == rows(10)
    await backend.close()


async def test_while_the_master_hangs_nothing_is_given_up(make_world):
    world = make_world()
    backend = await world.backend()
    await backend.put(1, rows(10))
    world.master.signal(signal.SIGSTOP)
    reading = asyncio.create_task(backend.get(places(1, 10), ["x"]))
    putting = asyncio.create_task(backend.put(2, rows(10)))
    await asyncio.sleep(6)
    world.master.signal(signal.SIGCONT)
    assert await reading == rows(10)
    await putting
    assert await backend.get(places(2, 10), ["x"]) == rows(10)
    await backend.close()


async def test_who_begins_while_the_master_hangs_waits_for_it_and_goes_on_with_all_else(make_world):
    world = make_world()
    world.master.signal(signal.SIGSTOP)
    opening = asyncio.create_task(world.backend())
    await asyncio.sleep(3)
    assert not opening.done()
    world.master.signal(signal.SIGCONT)
    backend = await opening
    await backend.put(1, rows(10))
    assert await backend.get(places(1, 10), ["x"]) == rows(10)
    await backend.close()


async def test_a_full_store_makes_writers_wait(make_world):
    world = make_world(size=32 * MIB)
    backend = await world.backend()
    large = rows(20, size=MIB // 8)
    await backend.put(1, large)
    waiting = asyncio.create_task(backend.put(2, large))
    given_up = asyncio.create_task(backend.put(3, large))
    await asyncio.sleep(0.5)
    given_up.cancel()
    await asyncio.wait([given_up])
    assert not waiting.done()
    assert await backend.get(places(1, 20), ["x"]) == large
    await backend.free(places(1, 20), ["x"])
    await asyncio.wait_for(waiting, 30)
    assert await backend.get(places(2, 20), ["x"]) == large
    await backend.free(places(2, 20), ["x"])
    await asyncio.wait_for(backend.put(4, large), 30)
    await backend.close()


async def test_a_value_that_somebody_else_changed_is_lost(make_world):
    world = make_world()
    backend = await world.backend()
    await backend.put(1, rows(3))
    connection = MooncakeConnection(host="127.0.0.1", master=lambda: world.master.address)
    other = MooncakeStore(connection, stale="^nothing$")
    key = backend._samples[Place(1, 1)].key
    assert await other.remove([key]) == [Outcome.DONE]
    assert await other.write([key], [8000], np.full(8000, 7, np.uint8)) == [Outcome.DONE]
    assert await read(backend, 1, 3) == [Place(1, 0), Place(1, 2)]
    await other.close()
    await backend.close()


async def test_a_unit_removes_what_its_predecessor_left(make_world):
    world = make_world(size=32 * MIB)
    large = rows(16, size=MIB // 8)
    for _ in range(4):
        backend = await world.backend(unit=7)
        await asyncio.wait_for(backend.put(1, large), 30)
        await backend.get(places(1, 16), ["x"])
        await backend.close()


async def test_a_sample_of_which_little_is_needed_takes_little_room(make_world):
    world = make_world(size=32 * MIB)
    backend = await world.backend()
    small = {"y": Jagged.from_rows([[row] for row in range(16)], "int32")}
    for blob in range(4):
        await asyncio.wait_for(backend.put(blob, rows(16, size=MIB // 8) | small), 30)
        await backend.free(places(blob, 16), ["x"])
    for blob in range(4):
        assert await backend.get(places(blob, 16), ["y"]) == small
    await backend.close()
