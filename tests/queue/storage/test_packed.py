"""The blobs of a store that fails in every way that it may, at random: nothing is lost that is there."""

import asyncio
import random
from collections import Counter

import numpy as np
import pytest

from asyncflow.errors import PeerLost, Refused
from asyncflow.queue.storage import packed
from asyncflow.queue.storage.backend import BytesLost, Outcome, Place, Store, split
from asyncflow.queue.storage.packed import PackedBackend
from asyncflow.queue.values import encode
from asyncflow.rpc.columns import Jagged
from asyncflow.rpc.retry import delays


class Flaky(Store):
    """A dict. faults: outcomes of which some come instead of what was asked; what is written then may be there.

    No read of a key fails so often that it is to be given up.
    """

    most_keys = 5
    most_bytes = 600

    def __init__(self, rng, faults=()):
        self.rng, self.faults = rng, faults
        self.values = {}
        self.room = 10**9
        self.ever, self.failed = Counter(), Counter()
        self.closed = False

    async def open(self):
        pass

    async def write(self, keys, sizes, values):
        assert len(keys) <= self.most_keys
        await asyncio.sleep(0)
        return [self._write(key, value.tobytes()) for key, value in zip(keys, split(values, sizes), strict=True)]

    def _write(self, key, value):
        self.ever[key] += 1
        if sum(map(len, self.values.values())) + len(value) > self.room:
            return Outcome.FULL
        fault = self._fault()
        if fault is None or self.rng.random() < 0.5:
            self.values[key] = value
        return fault or Outcome.DONE

    async def read(self, keys, sizes, values):
        assert len(set(keys)) == len(keys)
        await asyncio.sleep(0)
        return [self._read(key, place) for key, place in zip(keys, split(values, sizes), strict=True)]

    def _read(self, key, place):
        if (fault := self._fault()) is not None:
            self.failed[key] += fault is Outcome.FAILED
            if self.failed[key] % packed.TRIES or fault is not Outcome.FAILED:
                return fault
        value = self.values.get(key)
        if value is None or len(value) != len(place):
            return Outcome.LOST
        place.data[:] = value
        return Outcome.DONE

    async def find_lost(self, unmoved, others):
        return [key for key in others if key not in self.values]

    async def remove(self, keys):
        await asyncio.sleep(0)
        outcomes = [self._fault() or Outcome.DONE for _ in keys]
        for key, outcome in zip(keys, outcomes, strict=True):
            if outcome is Outcome.DONE:
                self.values.pop(key, None)
        return outcomes

    async def close(self):
        self.closed = True

    def _fault(self):
        return self.rng.choice(self.faults) if self.faults and self.rng.random() < 0.2 else None


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(packed, "delays", lambda **_: delays(first=0.0001, longest=0.001))


async def opened(store):
    backend = PackedBackend(store, prefix="u0-")
    await backend.open()
    return backend


def columns(rng, rows):
    lengths = [rng.choice((0, 1, 7, 90)) for _ in range(rows)]
    return {
        "a": Jagged.from_rows([np.arange(n) for n in lengths], "int64"),
        "b": encode([bytes(n) for n in reversed(lengths)]),
        "c": Jagged.from_rows(list(range(rows)), "int16", inner=None),
    }


@pytest.mark.parametrize("seed", range(20))
async def test_what_a_failing_store_is_given_comes_back(seed):
    rng = random.Random(seed)
    store = Flaky(rng, [Outcome.FAILED, Outcome.AWAY, Outcome.AWAY])
    backend = await opened(store)
    put = {blob: columns(rng, rng.randrange(1, 20)) for blob in range(8)}
    await asyncio.gather(*(backend.put(blob, given) for blob, given in put.items()))
    for blob, given in put.items():
        places = [Place(blob, row) for row in range(len(given["a"]))]
        assert await backend.get(places, ["c", "a"]) == {name: given[name] for name in ("c", "a")}
        await backend.free(places, ["a"])
        assert await backend.get(places, ["b"]) == {"b": given["b"]}
        await backend.free(places, ["b", "c"])
    while backend._jobs:
        await asyncio.sleep(0.001)
    assert not store.values
    assert max(store.ever.values()) == 1
    await backend.close()
    assert store.closed


@pytest.mark.parametrize("seed", range(5))
async def test_puts_that_are_given_up_leave_nothing(seed):
    rng = random.Random(seed)
    store = Flaky(rng, [Outcome.FAILED, Outcome.AWAY])
    store.room = 3000
    backend = await opened(store)
    puts = [asyncio.create_task(backend.put(blob, columns(rng, 20))) for blob in range(6)]
    for put in puts:
        for _ in range(rng.randrange(6)):
            await asyncio.sleep(0)
        put.cancel()
    await asyncio.wait(puts)
    while backend._jobs:
        await asyncio.sleep(0.001)
    for blob, put in enumerate(puts):
        if not put.cancelled():
            await backend.free([Place(blob, row) for row in range(20)], ["a", "b", "c"])
    assert not store.values
    store.room = 10**9
    await backend.put(99, columns(rng, 3))
    await backend.close()


async def test_what_the_store_lost_is_named_with_all_that_went_with_it():
    store = Flaky(random.Random(1))
    backend = await opened(store)
    await backend.put(1, columns(random.Random(1), 6))
    await backend.put(2, {"x": Jagged.from_rows([[1], [2], [3]], "int8")})
    for place in (Place(1, 0), Place(2, 2)):
        del store.values[backend._samples[place].key]
    with pytest.raises(BytesLost) as lost:
        await backend.get([Place(1, 0), Place(1, 1)], ["c"])
    assert set(lost.value.places) == {Place(1, 0), Place(2, 2)}
    await backend.close()


async def test_other_bytes_are_never_given():
    store = Flaky(random.Random(1))
    backend = await opened(store)
    await backend.put(1, {"x": Jagged.from_rows([[1, 2], [3, 4]], "int8")})
    store.values[backend._samples[Place(1, 1)].key] = b"\x07\x07"
    with pytest.raises(BytesLost) as lost:
        await backend.get([Place(1, 0), Place(1, 1)], ["x"])
    assert lost.value.places == [Place(1, 1)]
    await backend.close()


async def test_a_store_that_never_answers_loses_nothing(monkeypatch):
    monkeypatch.setattr(packed, "PATIENCE_S", 0.05)
    store = Flaky(random.Random(1))
    backend = await opened(store)
    put = columns(random.Random(2), 4)
    await backend.put(1, put)
    places = [Place(1, row) for row in range(4)]
    store._fault = lambda: Outcome.AWAY
    with pytest.raises(PeerLost):
        await backend.get(places, ["c"])
    del store._fault
    assert await backend.get(places, ["c"]) == {"c": put["c"]}
    await backend.close()


async def test_a_sample_that_cannot_be_read_to_be_made_smaller_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(packed, "PATIENCE_S", 0.01)

    class Hanging(Flaky):
        async def read(self, keys, sizes, values):
            await asyncio.Event().wait()

    backend = await opened(Hanging(random.Random(1)))
    await backend.put(1, {"x": Jagged.from_rows([[1] * 9], "int8"), "y": Jagged.from_rows([[1]], "int8")})
    await backend.free([Place(1, 0)], ["x"])
    async with asyncio.timeout(10):
        while backend._jobs:
            await asyncio.sleep(0.01)
    await backend.close()


async def test_a_sample_is_made_smaller_when_less_than_half_of_it_is_needed():
    store = Flaky(random.Random(1))
    backend = await opened(store)
    await backend.put(1, {name: encode([np.arange(items)]) for name, items in (("a", 1), ("b", 2), ("c", 1))})
    for freed, left in (("b", 32), ("c", 8)):
        await backend.free([Place(1, 0)], [freed])
        async with asyncio.timeout(10):
            while backend._jobs:
                await asyncio.sleep(0)
        assert [len(value) for value in store.values.values()] == [left]
        assert (await backend.get([Place(1, 0)], ["a"]))["a"].values.tolist() == [0]


async def test_a_put_of_which_the_store_refuses_a_part_leaves_nothing():
    class Refusing(Flaky):
        async def write(self, keys, sizes, values):
            if not self.ever:
                self.ever.update(keys)
                raise Refused("not this one", where="test")
            await asyncio.sleep(0.01)
            return await super().write(keys, sizes, values)

    rng = random.Random(0)
    store = Refusing(rng)
    backend = await opened(store)
    with pytest.raises(Refused):
        await backend.put(1, columns(rng, 20))
    while backend._jobs:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)
    assert not store.values
    await backend.close()
