"""A client that asks for too much at once is refused before anything is gathered, and service goes on."""

import numpy as np
import pytest

from asyncflow.errors import ProtocolError, Refused
from asyncflow.queue.protocol import unit_calls
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.columns import BatchHeader

MIB = 1 << 20
ROOM = 48 * MIB


async def put(served, rows):
    """Put rows of 1 MiB, which differ; give their ids."""
    return [row for n in range(rows) for row in await served.partition.put({"blob": [bytes([n]) * MIB]})]


async def test_one_row_that_is_named_thousands_of_times_takes_no_memory(served):
    (row,) = await put(served, 1)
    greedy_client = RpcClient(name="greedy", resolve=served.unit)
    greedy = unit_calls.FetchRows([row] * 1500, ["blob"])
    async with served.growing_by_less_than(ROOM):
        for _ in range(3):
            with pytest.raises(ProtocolError, match="1500 rows, of which 1 differ"):
                await greedy_client.call("unit.fetch", greedy, BatchHeader, timeout=20)
    await greedy_client.close()
    assert (await served.partition.get([row], ["blob"]))["blob"] == [bytes(MIB)]


async def test_one_column_that_is_named_thousands_of_times_is_given_once(served):
    row, *_ = await put(served, 5)
    greedy_client = RpcClient(name="greedy", resolve=served.unit)
    greedy = unit_calls.FetchRows([row], ["blob"] * 1500)
    async with served.growing_by_less_than(ROOM):
        given, frames = await greedy_client.call_frames("unit.fetch", greedy, BatchHeader, timeout=20)
    await greedy_client.close()
    assert [column.name for column in given.columns] == ["blob"]
    assert sum(map(len, frames)) < 2 * MIB


async def test_more_than_goes_in_one_answer_is_refused_before_it_is_gathered(served):
    rows = await put(served, 128)
    await served.partition.get(rows[:2], ["blob"])
    async with served.growing_by_less_than(ROOM):
        for _ in range(3):
            with pytest.raises(Refused, match=rf"{128 * MIB} bytes .* 128 rows.* Fetch fewer rows at a time: at most"):
                await served.partition.get(rows, ["blob"])
    for first in (0, 77, 125):
        found = (await served.partition.get(rows[first : first + 3], ["blob"]))["blob"]
        assert found == [bytes([n]) * MIB for n in range(first, first + 3)]
    await served.partition.clear(rows)
    assert len(await served.partition.put({"n": np.arange(5)})) == 5
