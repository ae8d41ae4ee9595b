"""A server in a process of its own, to be stopped and killed: ``peer_process.py KIND [BIND]`` prints its address."""

import asyncio
import itertools
import sys
import uuid
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.directory import Directory
from asyncflow.rpc.membership import Member, Membership
from asyncflow.rpc.server import RpcServer


class Number(Struct, frozen=True, kw_only=True):
    value: float


async def echo(bind: str) -> None:
    server = RpcServer(name="peer", bind=bind)

    async def add(request: Number, frames: Sequence[memoryview]) -> tuple[Number, Sequence[memoryview]]:
        return Number(value=request.value + 1), frames

    async def park(request: Number, frames: Sequence[memoryview]) -> Number:
        await asyncio.sleep(request.value)
        return request

    server.route("add", Number, add)
    server.route("park", Number, park)
    sys.stdout.write(await server.start() + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


async def directory(bind: str) -> None:
    server = RpcServer(name="driver", bind=bind)
    members = Directory(heartbeat_s=0.1, lost_after_s=1.2)
    members.attach(server)
    sys.stdout.write(await server.start() + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


async def member(driver: str) -> None:
    me = Member(role="rollout", index=7, incarnation=uuid.uuid4().hex)
    membership = Membership(driver=driver, member=me, status=lambda: {"state": "working"})
    await membership.join(10)
    sys.stdout.write(me.incarnation + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


async def mover(address: str) -> None:
    client = RpcClient(name="mover", resolve=address)
    frames = [np.arange(count, dtype=np.float64).data for count in (2_000_000, 9_000, 400_000)]
    for number in itertools.count():
        _, came = await client.call_frames("add", Number(value=1), Number, timeout=30, frames=frames)
        assert all(bytes(mine) == bytes(theirs) for mine, theirs in zip(frames, came, strict=True))
        if number == 0:
            sys.stdout.write("moving\n")
            sys.stdout.flush()


if __name__ == "__main__":
    kinds = {"echo": echo, "directory": directory, "member": member, "mover": mover}
    asyncio.run(kinds[sys.argv[1]](sys.argv[2]))
