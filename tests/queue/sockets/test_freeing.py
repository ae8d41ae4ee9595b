"""Rows that are cleared give back their room."""

import asyncio

from asyncflow.queue.partition import Partition
from asyncflow.rpc.columns import Jagged

P = "open"
VALUES = {"x": Jagged.from_rows([[1] * 1000] * 4, "int64")}


def held(cluster):
    return [unit.holdings.budget.used for unit in cluster.units.values()]


async def until_free(cluster):
    async with asyncio.timeout(10):
        while any(held(cluster)) or cluster.controller.stats().bytes:
            await asyncio.sleep(0.001)


async def test_what_was_cleared_is_free_soon(cluster):
    async with cluster(units=2) as made:
        for _ in range(5):
            rows = (await made.client.put(P, VALUES, timeout=20)).rows + (
                await made.client.put(P, VALUES, timeout=20)
            ).rows
            assert held(made) == [32_000, 32_000]
            assert await Partition(made.client, P).clear(rows, timeout=20) == 8
            await until_free(made)
            await made.client.put(P, VALUES, timeout=20)
            await made.client.clear_partition(partition=P, timeout=20)
            await until_free(made)
