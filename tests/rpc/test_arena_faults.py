"""Peers that share memory and are killed while they move bytes: nothing is left, of either, anywhere."""

import asyncio
import gc
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import Struct

from asyncflow.errors import PeerLost
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.server import RpcServer

pytestmark = pytest.mark.process

BIND = "tcp://127.0.0.1:*"
FRAME = np.arange(2_000_000, dtype=np.float64).data


class Number(Struct, frozen=True, kw_only=True):
    value: float


def is_left(address: str) -> bool:
    """Return whether a file of AsyncFlow lies in /dev/shm, or a server's name is still taken."""
    named = f"@asyncflow/{address.removeprefix('tcp://')}" in Path("/proc/net/unix").read_text()
    return named or any("asyncflow" in name for name in os.listdir("/dev/shm"))


def shared_memory(process: int) -> str:
    status = Path(f"/proc/{process}/status").read_text()
    return next(line for line in status.splitlines() if line.startswith("RssShmem"))


async def test_callers_that_are_killed_while_they_move_bytes_leave_nothing_behind(spawn: Any, arenas: Any) -> None:
    server = spawn("echo", BIND)
    seed = random.Random(7)
    before = shared_memory(server.process.pid)
    for _ in range(8):
        mover = await asyncio.to_thread(spawn, "mover", server.said)
        assert mover.said == "moving"
        assert arenas(server.process.pid) > 0
        await asyncio.sleep(seed.random() * 0.03)
        mover.kill()
        await arenas.until_none(server.process.pid)
        async with asyncio.timeout(10):
            while shared_memory(server.process.pid) != before:
                await asyncio.sleep(0.01)
    client = RpcClient(name="client", resolve=server.said)
    _, frames = await client.call_frames("add", Number(value=1), Number, timeout=20, frames=[FRAME])
    assert frames[0] == FRAME.cast("B")
    await client.close()
    await arenas.until_none(server.process.pid)
    assert is_left(server.said)
    server.kill()
    assert not is_left(server.said)


async def test_servers_that_are_killed_while_they_move_bytes_leave_nothing_behind(spawn: Any, arenas: Any) -> None:
    seed = random.Random(8)
    for _ in range(4):
        server = await asyncio.to_thread(spawn, "echo", BIND)
        client = RpcClient(name="client", resolve=server.said)
        await client.call("add", Number(value=1), Number, timeout=20)
        other = RpcClient(name="other", resolve=server.said)
        await other.call_frames("add", Number(value=1), Number, timeout=20, frames=[FRAME])
        moving = [
            asyncio.create_task(client.call_frames("add", Number(value=1), Number, timeout=30, frames=[FRAME] * 20)),
            asyncio.create_task(keep_moving(other)),
        ]
        await asyncio.sleep(0.02 + seed.random() * 0.03)
        assert arenas() > 0
        server.kill()
        async with asyncio.timeout(10):
            for task in moving:
                with pytest.raises(PeerLost):
                    await task
        await other.close()
        await client.close()
        await arenas.until_none()
        assert not is_left(server.said)


async def test_what_came_outlives_a_server_that_is_killed_and_the_connection(spawn: Any, arenas: Any) -> None:
    server = await asyncio.to_thread(spawn, "echo", BIND)
    client = RpcClient(name="client", resolve=server.said)
    _, (came,) = await client.call_frames("add", Number(value=1), Number, timeout=20, frames=[FRAME])
    server.kill()
    assert came == FRAME.cast("B")
    await client.close()
    del client
    assert came == FRAME.cast("B")
    came[:8] = bytes(8)
    row = came[8_000_000:8_000_080]
    del came
    assert row == FRAME.cast("B")[8_000_000:8_000_080]
    assert arenas() > 0
    del row
    await arenas.until_none()


async def test_what_callers_brought_outlives_them_and_nothing_else_does(spawn: Any, arenas: Any) -> None:
    kept: list[memoryview] = []
    before = shared_kb()

    async def keep(request: Number, frames: Sequence[memoryview]) -> tuple[Number, Sequence[memoryview]]:
        kept.append(frames[1])
        return Number(value=request.value), frames

    server = RpcServer(name="keeper", bind=BIND)
    server.route("add", Number, keep)
    await server.start()
    seed = random.Random(9)
    for _ in range(4):
        mover = await asyncio.to_thread(spawn, "mover", server.address)
        assert mover.said == "moving"
        await asyncio.sleep(seed.random() * 0.03)
        mover.kill()
    expected = np.arange(9_000, dtype=np.float64).tobytes()
    async with asyncio.timeout(10):
        while shared_kb() - before > len(kept) * (len(expected) + 2 * 4096) / 1024:
            await asyncio.sleep(0.01)
    assert len(kept) >= 4
    assert all(bytes(frame) == expected for frame in kept)
    assert arenas() > 0
    kept.clear()
    await arenas.until_none()
    await server.close()


def shared_kb() -> int:
    gc.collect()
    return int(shared_memory(os.getpid()).split()[1])


async def keep_moving(client: RpcClient) -> None:
    for _ in range(10_000):
        await client.call_frames("add", Number(value=1), Number, timeout=20, frames=[FRAME])
