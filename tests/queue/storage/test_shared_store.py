"""Several queues in one store that outlives them: none touches what another has, and none leaves anything behind."""

import numpy as np
import pytest
import redis
from store_world import RedisWorld

from asyncflow.queue.storage.backend import Place
from asyncflow.rpc.columns import Jagged

pytestmark = [pytest.mark.process, pytest.mark.timeout(90)]


def rows(count):
    return {"x": Jagged.from_rows([np.full(1000, row) for row in range(count)], "int64")}


def places(count):
    return [Place(1, row) for row in range(count)]


@pytest.mark.parametrize("name", ["mooncake", "redis"])
async def test_queues_of_other_owners_are_left_alone(stores, name):
    world = stores(name)
    ours = await world.backend(unit=900, owner="3f-a.b", lasting=True)
    await ours.put(1, rows(10))
    for owner in ("3f-a", "3f-a.b2", "3fxa.b"):
        theirs = await world.backend(unit=900, owner=owner, lasting=True)
        await theirs.put(1, rows(3))
        assert await theirs.get(places(3), ["x"]) == rows(3)
        await theirs.close()
    assert await ours.get(places(10), ["x"]) == rows(10)
    await ours.close()


async def test_a_unit_that_ends_leaves_nothing_in_a_store_that_stays(stores):
    world = RedisWorld()
    try:
        mine = await world.backend(unit=1, owner="mine", lasting=True)
        other = await world.backend(unit=1, owner="other", lasting=True)
        for backend in (mine, other):
            await backend.put(1, rows(10))
        await mine.close()
        assert keys_of(world) == {"other"}
        await other.close()
        assert keys_of(world) == set()
    finally:
        world.close()


def keys_of(world):
    """Return the owners of the keys that are there."""
    host, port = world.server.address.removeprefix("tcp://").split(":")
    with redis.Redis(host=host, port=int(port)) as client:
        return {key.decode().split(".")[0] for key in client.scan_iter()}
