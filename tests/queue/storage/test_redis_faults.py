"""A backend whose Redis server dies, is full, or is not what it should be."""

import asyncio
import signal

import numpy as np
import pytest
from store_world import MIB, Child, RedisWorld

from asyncflow.errors import ManifestError
from asyncflow.queue.storage.backend import BytesLost, Place
from asyncflow.queue.storage.redis import RedisStore
from asyncflow.rpc.columns import Jagged

pytestmark = [pytest.mark.process, pytest.mark.timeout(90)]


@pytest.fixture
def make_world(stores):
    made = []

    def make(**words):
        made.append(RedisWorld(**words))
        return made[-1]

    yield make
    for world in made:
        world.close()


def rows(count, *, size=1000):
    return {"x": Jagged.from_rows([np.full(size, row) for row in range(count)], "int64")}


def places(blob, count):
    return [Place(blob, row) for row in range(count)]


async def test_a_server_that_starts_again_has_lost_everything(make_world):
    world = make_world()
    backend = await world.backend()
    await backend.put(1, rows(10))
    await backend.put(2, rows(3))
    await asyncio.to_thread(world.restart)
    with pytest.raises(BytesLost) as lost:
        await backend.get(places(1, 2), ["x"])
    assert set(lost.value.places) == {*places(1, 10), *places(2, 3)}
    await backend.free(places(1, 10), ["x"])
    await backend.put(3, rows(10))
    assert await backend.get(places(3, 10), ["x"]) == rows(10)
    await backend.close()


async def test_while_the_server_hangs_nothing_is_given_up(make_world):
    world = make_world()
    backend = await world.backend()
    await backend.put(1, rows(10))
    world.server.signal(signal.SIGSTOP)
    reading = asyncio.create_task(backend.get(places(1, 10), ["x"]))
    putting = asyncio.create_task(backend.put(2, rows(10)))
    await asyncio.sleep(2)
    world.server.signal(signal.SIGCONT)
    assert await reading == rows(10)
    await putting
    await backend.close()


async def test_a_full_server_makes_writers_wait(make_world):
    world = make_world(size=24 * MIB)
    backend = await world.backend()
    large = rows(16, size=MIB // 8)
    await backend.put(1, large)
    waiting = asyncio.create_task(backend.put(2, large))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    assert await backend.get(places(1, 16), ["x"]) == large
    await backend.free(places(1, 16), ["x"])
    await asyncio.wait_for(waiting, 30)
    assert await backend.get(places(2, 16), ["x"]) == large
    await backend.close()


async def test_who_does_not_know_the_password_is_refused(make_world):
    world = make_world(password="open-sesame")
    backend = await world.backend(password="open-sesame")
    await backend.put(1, rows(2))
    assert await backend.get(places(1, 2), ["x"]) == rows(2)
    await backend.close()
    for wrong in ("open-barley", ""):
        with pytest.raises(ManifestError, match="Redis refuses this job"):
            await world.backend(password=wrong)


async def test_a_server_that_may_forget_is_refused(stores):
    server = Child("redis", 0).wait()
    store = RedisStore(lambda: server.address, unit="u0-")
    try:
        with pytest.raises(ManifestError, match="maxmemory 0"):
            await store.open()
    finally:
        await store.close()
        server.end()


async def test_a_unit_removes_what_its_predecessor_left_and_nothing_else(make_world):
    world = make_world(size=24 * MIB)
    other = await world.backend(unit=70)
    await other.put(1, rows(10))
    for _ in range(3):
        backend = await world.backend(unit=7)
        await asyncio.wait_for(backend.put(1, rows(10, size=MIB // 8)), 30)
        await backend.close()
    assert await other.get(places(1, 10), ["x"]) == rows(10)
    await other.close()
