"""Behaviours 37 to 39: restarts, and bytes that mean nothing."""

import numpy as np
import pytest

from asyncflow.errors import LedgerCorrupt, ProtocolError
from asyncflow.queue.ledger.log import newest
from asyncflow.queue.protocol import calls
from asyncflow.rpc.client import RpcClient


async def test_37_a_restarted_controller_knows_everything(two_units, scores):
    for task in ("grade", "count"):
        await scores.declare(task, ["text"], lease_s=600)
    rows = await scores.put(
        {"text": ["a", "b", "c", "d"]}, keys=list("wxyz"), tags=[{"n": n, "of": "me"} for n in range(4)]
    )
    await scores.write(rows[:1], {"note": [{"any": "thing"}]})
    await scores.expect(9)
    assert all(await scores.complete(await scores.claim("grade", 1, timeout=5)))
    held = await scores.claim("grade", 1, timeout=5)
    await scores.clear(["z"])
    before = [await scores.rows(), await scores.peek("grade"), await scores.consumed("count")]
    for _ in range(2):
        await two_units.restart_controller()
        assert [await scores.rows(), await scores.peek("grade"), await scores.consumed("count")] == before
    assert (await scores.get(["w"], ["note"]))["note"] == [{"any": "thing"}]
    assert await scores.complete(held) == [True]
    assert [row.row for row in await scores.claim("grade", 8, timeout=5)] == rows[2:3]
    assert [row.row for row in await scores.claim("count", 8, timeout=5)] == rows[:3]
    assert not set(await scores.put({"text": ["e"]})) & set(rows)


async def test_38_a_compaction_that_failed_leaves_the_ledger_as_it_was(two_units, scores):
    rows = await scores.put({"text": ["a", "b"]})
    await two_units.controller.close()
    (two_units.folder / "000000000099.draft").write_bytes(b"half of a new generation")
    await two_units.start_controller()
    await two_units.until(lambda: two_units.controller.stats().units == 2)
    assert (await scores.rows()).rows == rows


async def test_38_a_damaged_ledger_is_refused_and_not_changed(two_units, scores):
    for n in range(20):
        await scores.put({"n": np.array([n])})
    await two_units.controller.close()
    path = newest(two_units.folder)
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    path.write_bytes(damaged)
    with pytest.raises(LedgerCorrupt, match="damaged"):
        await two_units.start_controller()
    assert path.read_bytes() == bytes(damaged)
    two_units.controller = None


@pytest.mark.parametrize("whom", ["controller", "unit"])
async def test_39_bytes_that_mean_nothing_get_an_error_or_nothing_and_service_goes_on(
    two_units, scores, whom, raw_peer_at
):
    server = two_units.controller.server if whom == "controller" else two_units.units[0].server
    async with raw_peer_at(server.address) as peer:
        for parts in ([b""], [b"\xc1" * 50], [b"a", b"b", b"c"], [b"\x80\x04\x95", b"pickle"], [bytes(1 << 20)] * 3):
            await peer.send(parts)
        rows = await scores.put({"text": ["still", "here"]})
        assert (await scores.get(rows, ["text"]))["text"] == ["still", "here"]
    client = RpcClient(name="test", resolve=server.address)
    with pytest.raises(ProtocolError, match="there is no method"):
        await client.call("no.such", calls.Nothing(), calls.Done, timeout=5)
    with pytest.raises(ProtocolError):
        await client.call("queue.claim" if whom == "controller" else "unit.put", calls.Nothing(), calls.Done, timeout=5)
    await client.close()
    assert await scores.put({"text": ["and on"]})
    assert sum(server.counters.dropped.values()) == 5
    assert server.counters.errors == {"protocol": 2}
