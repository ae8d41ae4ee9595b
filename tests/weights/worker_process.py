"""A worker of its own process: reads commands from standard input, says on standard output what it did.

Run as ``worker_process.py KIND ADDRESS NAME [LIMIT [TRANSPORT]]``; KIND is driver (ADDRESS is where to listen), sender
(what it serves stops after LIMIT bytes, or it serves by a fast TRANSPORT) or receiver. Ends at the end of its input.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from weights_world import Relay, RelayedTransport, bulk, catalogue_of, member_of

from asyncflow.identity import Version
from asyncflow.rpc.membership import Membership
from asyncflow.rpc.server import RpcServer
from asyncflow.weights.host_transport import HostTransport
from asyncflow.weights.manifest import digest_of
from asyncflow.weights.receiver import WeightReceiver
from asyncflow.weights.sender import WeightSender
from asyncflow.weights.transport import Transport, open_transport


def say(*words: Any) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def lines() -> Any:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line.decode().split()


async def drive(address: str) -> None:
    server = RpcServer(name="driver", bind=address)
    service = catalogue_of(server)
    say("ready", await server.start())
    async for _, *steps in lines():
        service.require(map(int, steps))


async def send(membership: Membership, name: str, transport: Transport) -> None:
    sender = WeightSender(membership=membership, worker=name, transport=transport)
    await sender.start()
    say("ready")
    async for attempt, step in lines():
        await sender.publish(Version(int(attempt), int(step)), bulk(int(step)), timeout=30)
        say("published", step, sender.address)


async def receive(membership: Membership, name: str) -> None:
    receiver = WeightReceiver(membership=membership, worker=name, transport=HostTransport(name=name))
    await receiver.start()
    say("ready")

    async def report() -> None:
        while True:
            await receiver.wait_for(lambda: receiver.staged is not None, what="a version", timeout=60)
            version, tensors = receiver.take(receiver.staged.step)
            say("took", version.step, digest_of(tensors["big"]))

    task = asyncio.create_task(report())
    async for _ in lines():
        pass
    task.cancel()


async def main(kind: str, address: str, name: str, limit: str = "", fast: str = "") -> None:
    if kind == "driver":
        await drive(address)
        return
    membership = await member_of(address, name)
    if kind == "sender":
        relayed = RelayedTransport(relay=Relay(limit=int(limit) if limit else None), name=name)
        await send(membership, name, open_transport(fast, name=name) if fast else relayed)
    else:
        await receive(membership, name)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
