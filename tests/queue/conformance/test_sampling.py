"""Behaviours 31 to 36: who gets which rows together, and what handles are made of; 20 and 21 of a trainer's rows."""

import asyncio
import random

import msgspec
import numpy as np
import pytest

from asyncflow.errors import Refused, StaleHandle
from asyncflow.queue.partition import Partition
from asyncflow.queue.protocol.messages import LeasedRow, Samples, TaskSpec
from asyncflow.rpc.columns import Jagged

P = "train"
WORLD = 4
GROUPS, SIZE = 32, 4


@pytest.fixture
async def gang(two_units):
    """A step of groups of lognormal length, ready for a trainer of four ranks."""
    client = two_units.client
    await client.declare([TaskSpec(partition=P, name="train", needs=["it"], kind="gang", groups=True)], timeout=10)
    rng = random.Random(5)
    tokens = [max(1, int(rng.lognormvariate(5, 1))) for _ in range(GROUPS * SIZE)]
    columns = {"it": Jagged.from_rows([[s, j] for s in range(GROUPS) for j in range(SIZE)], "int32")}
    samples = Samples(serials=list(range(GROUPS)), step=1, tokens=tokens)
    assert all((await client.put(P, columns, group_size=SIZE, samples=samples, timeout=10)).new)
    await client.open_step(partition=P, step=1, groups=GROUPS, group_size=SIZE, timeout=10)
    await client.begin(partition=P, attempt=0, step=0, world=WORLD, timeout=10)
    return client


async def slot(client, number, rank, *, tokens=20_000, attempt=0):
    return await client.slot(partition=P, attempt=attempt, step=1, slot=number, rank=rank, tokens=tokens, timeout=10)


async def all_slots(client, **how):
    """Return the rows of every slot by rank."""
    slots = []
    while not slots or not slots[-1][0].last:
        slots.append([await slot(client, len(slots), rank, **how) for rank in range(WORLD)])
        assert len({given.last for given in slots[-1]}) == 1
    return [[given.rows for given in ranks] for ranks in slots]


async def commit(client, *, attempt=0):
    """Take all slots of the step, and have a checkpoint hold it."""
    await all_slots(client, attempt=attempt)
    for rank in range(WORLD):
        await client.step_done(partition=P, attempt=attempt, step=1, rank=rank, timeout=10)
    await client.commit(partition=P, attempt=attempt, step=1, timeout=10)


async def grade(client):
    """Complete all rows in another task than the trainer's; return their ids."""
    await client.declare([TaskSpec(partition=P, name="grade", needs=["it"])], timeout=10)
    leased = (await client.claim(partition=P, task="grade", max_rows=1000, timeout=10)).rows
    assert all(await client.complete(leased, {}, timeout=10))
    return sorted(row.row for row in leased)


async def test_20_what_a_step_has_bound_is_not_reset_unless_the_trainer_starts_again_nor_what_is_committed(gang):
    rows = await grade(gang)
    assert await Partition(gang, P).reset(task="grade", timeout=10) == len(rows) == GROUPS * SIZE
    assert await grade(gang) == rows
    await all_slots(gang)
    for task in ("grade", None):
        assert await Partition(gang, P).reset(task=task, timeout=10) == 0
    await gang.begin(partition=P, attempt=1, step=0, world=WORLD, timeout=10)
    assert await Partition(gang, P).reset(task="grade", timeout=10) == len(rows)
    await commit(gang, attempt=1)
    assert await Partition(gang, P).reset(timeout=10) == 0
    assert (await gang.claim(partition=P, task="grade", max_rows=1000, timeout=0)).rows == []
    report = await gang.audit(timeout=10)
    assert (report.ok, report.trained, report.resets) == (True, len(rows), 2 * len(rows))


async def test_21_a_look_shows_what_a_step_has_bound_where_it_is_named_and_nothing_that_is_committed(gang):
    rows = await grade(gang)

    async def seen(*named):
        sight = await Partition(gang, P).peek(task="grade", rows=named, most=1000, timeout=10)
        assert set(sight.done) <= {True}
        return sorted(sight.rows)

    assert await seen() == rows
    await all_slots(gang)
    assert await seen() == []
    assert await seen(*rows) == rows
    await gang.begin(partition=P, attempt=1, step=0, world=WORLD, timeout=10)
    assert await seen() == rows
    await commit(gang, attempt=1)
    assert await seen() == []
    with pytest.raises(StaleHandle):
        await seen(*rows)
    assert (await gang.audit(timeout=10)).peeked == 3 * len(rows)


async def test_31_who_asks_for_the_same_slot_gets_the_same_rows_and_other_ranks_get_others(two_units, gang):
    others = [two_units.connect(f"rank 0 of {n}") for n in range(3)]
    first = [[row.row for row in (await slot(client, 0, 0)).rows] for client in (gang, *others)]
    assert first[0]
    assert all(rows == first[0] for rows in first)
    ranks = [row.row for rank in range(1, WORLD) for row in (await slot(gang, 0, rank)).rows]
    assert not set(ranks) & set(first[0])
    await two_units.restart_controller()
    assert [row.row for row in (await slot(gang, 0, 0)).rows] == first[0]


async def test_32_a_claim_gives_whole_groups_only(scores):
    await scores.declare("whole", ["text"], groups=True)
    rows = await scores.put({"text": [str(n) for n in range(12)]}, group_size=3)
    assert [row.row for row in await scores.claim("whole", 7, timeout=5)] == rows[:6]
    assert [row.row for row in await scores.claim("whole", 2, timeout=5)] == rows[6:9]
    assert [row.row for row in await scores.claim("whole", 3, timeout=5)] == rows[9:]


@pytest.mark.parametrize("tokens", [20_000, 2_000, 500])
async def test_33_ranks_get_equal_work_whole_groups_and_every_row_once(gang, tokens):
    slots = await all_slots(gang, tokens=tokens)
    rows = [row for ranks in slots for given in ranks for row in given]
    assert len({row.row for row in rows}) == len(rows) == GROUPS * SIZE
    parts = [given for ranks in slots for given in ranks]
    assert ([] in parts) is (tokens < 20_000)
    for given in parts:
        serials = [row.meta.serial for row in given]
        assert all(serials.count(serial) == SIZE for serial in serials)
        assert sum(row.meta.tokens for row in given) <= tokens or len(given) == SIZE
    loads = [sum(row.meta.tokens for ranks in slots for row in ranks[rank]) for rank in range(WORLD)]
    assert max(loads) * WORLD <= 1.05 * sum(loads)


async def test_w10_a_rank_that_is_faster_causes_no_duplicates(gang):
    ahead = [await slot(gang, number, 0, tokens=3_000) for number in range(3)]
    behind = [[await slot(gang, number, rank, tokens=3_000) for rank in range(1, WORLD)] for number in range(3)]
    rows = [row.row for given in [*ahead, *(each for ranks in behind for each in ranks)] for row in given.rows]
    assert len(rows) == len(set(rows))
    assert [row.row for row in (await slot(gang, 0, 0, tokens=3_000)).rows] == [row.row for row in ahead[0].rows]


async def test_34_a_rank_that_cannot_be_is_refused(gang):
    for rank in (-1, WORLD):
        with pytest.raises(Refused):
            await slot(gang, 0, rank)
    for world in (0, -2):
        with pytest.raises(Refused):
            await gang.begin(partition=P, attempt=1, step=0, world=world, timeout=5)
    with pytest.raises(Refused):
        await gang.claim(partition=P, task="train", max_rows=4, timeout=5)


async def test_35_handles_are_plain_data_that_cannot_be_changed(scores):
    await scores.declare("grade", ["text"])
    rows = await scores.put({"text": ["a", "b", "c"]}, tags=[{"n": n} for n in range(3)])
    leased = await scores.claim("grade", 8, timeout=5)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(leased), type=list[LeasedRow])
    assert again == leased
    assert [row.row for row in again] == rows
    with pytest.raises(AttributeError):
        leased[0].row = 7
    found = await scores.get(leased[1:] + leased[:1], ["text"])
    assert found["text"] == ["b", "c", "a"]


def test_35_cut_and_joined_again_a_column_is_what_it_was():
    column = Jagged.from_rows([range(n % 5) for n in range(20)], "int16")
    parts = [column.take(range(start, start + 5)) for start in range(0, 20, 5)]
    assert Jagged.concat(parts) == column
    parts[0].values[:] = 0
    assert Jagged.concat(parts) != column


async def test_36_micro_batches_cover_a_batch_in_order_and_the_last_may_be_smaller(scores):
    await scores.declare("train", ["dense", "jagged"])
    ragged = [np.arange(n % 7) for n in range(40)]
    rows = await scores.put({"dense": np.arange(80).reshape(40, 2), "jagged": ragged})
    seen, sizes = [], []
    while part := await scores.claim("train", 16, timeout=0.2):
        found = await scores.get(part, ["dense", "jagged"])
        start = len(seen)
        assert found["dense"].tolist() == [[2 * n, 2 * n + 1] for n in range(start, start + len(part))]
        assert [row.tolist() for row in found["jagged"]] == [row.tolist() for row in ragged[start : start + len(part)]]
        seen += [row.row for row in part]
        sizes.append(len(part))
        assert all(await scores.complete(part))
    assert (seen, sizes) == (rows, [16, 16, 8])


async def test_36_a_waiting_consumer_gets_rows_as_they_come(scores):
    await scores.declare("train", ["n"])

    async def consume():
        seen = []
        while len(seen) < 12:
            part = await scores.claim("train", 5, timeout=10)
            seen += (await scores.get(part, ["n"]))["n"].tolist()
            assert all(await scores.complete(part))
        return seen

    consuming = asyncio.create_task(consume())
    for start in range(0, 12, 3):
        await scores.put({"n": np.arange(start, start + 3)})
    assert await consuming == list(range(12))
