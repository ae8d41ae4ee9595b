"""Who clears rows and has the answer finds the room that they had."""

from asyncflow.queue.controller import sessions
from asyncflow.queue.partition import Partition
from asyncflow.rpc.columns import Jagged

P = "open"
VALUES = {"x": Jagged.from_rows([[1] * 1000] * 4, "int64")}


def held(cluster):
    return [unit.holdings.budget.used for unit in cluster.units.values()]


async def test_what_was_cleared_is_free_when_the_answer_comes(cluster):
    async with cluster(units=2) as made:
        for _ in range(5):
            rows = (await made.client.put(P, VALUES, timeout=20)).rows + (
                await made.client.put(P, VALUES, timeout=20)
            ).rows
            assert held(made) == [32_000, 32_000]
            assert await Partition(made.client, P).clear(rows, timeout=20) == 8
            assert (held(made), made.controller.stats().bytes) == ([0, 0], 0)
            await made.client.put(P, VALUES, timeout=20)
            await made.client.clear_partition(partition=P, timeout=20)
            assert held(made) == [0, 0]


async def test_a_unit_that_frees_nothing_holds_up_nobody_for_long(cluster, monkeypatch):
    monkeypatch.setattr(sessions, "_FREE_S", 0.05)
    async with cluster(units=1) as made:
        rows = (await made.client.put(P, VALUES, timeout=20)).rows
        await made.units[0].close()
        assert await Partition(made.client, P).clear(rows, timeout=20) == 4
