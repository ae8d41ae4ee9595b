"""Measure the cost of a version for the driver, in CPU time and sent bytes, for any number of receivers.

The driver is a separate process with only a directory and a catalogue. A sender and the receivers run in a few other
processes. The receivers are members that make all calls of real receivers, with the real ``Membership`` and ``Holder``,
but move no weights, so that a small machine can run a thousand of them. With ``--pull`` they are complete receivers
that pull from one another. After each publication the required steps advance, as in a run, so that versions are
released.

Bytes are those of replies, without frames, TLS and TCP; CPU time is that of the whole process. The cost of a version is
the difference between a window of ``--window`` seconds with a publication and one without; both alternate, since
heartbeats cost far more than a version. The mean leaves out the first version, at which all receivers get their place.

    python benchmarks/weights/catalogue.py --receivers 1000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator

import numpy as np
from msgspec.structs import replace

from asyncflow.identity import Version
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.directory import Directory
from asyncflow.rpc.membership import Member, Membership
from asyncflow.rpc.server import Caller, RpcServer
from asyncflow.weights.holder import Copy, Holder
from asyncflow.weights.host_transport import HostTransport
from asyncflow.weights.manifest import Manifest
from asyncflow.weights.messages import WHOLE, Locate, Located
from asyncflow.weights.receiver import WeightReceiver
from asyncflow.weights.sender import WeightSender
from asyncflow.weights.service import CatalogueService
from asyncflow.weights.slices import Arena, Box
from asyncflow.weights.transport import Read, Transport, Until, at_once

SOON = 300.0


def say(**words: object) -> None:
    """Write one line of JSON."""
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


async def commands() -> AsyncIterator[list[str]]:
    """Yield the lines of standard input."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line.decode().split()


async def drive() -> None:
    """Serve a catalogue and commands on standard input.

    ``mark`` prints the cost since the last mark; ``held V N`` prints a line once N workers hold version V; ``require``
    sets the required steps.
    """
    sent = 0
    send = Caller.send_answer

    def counting(self: Caller, call: int, parts: list[bytes]) -> None:
        nonlocal sent
        sent += sum(len(part) for part in parts)
        send(self, call, parts)

    Caller.send_answer = counting
    server = RpcServer(name="driver")
    directory = Directory()
    directory.attach(server)
    service = CatalogueService(server, directory=directory)
    say(address=await server.start())
    cpu, before, calls = time.process_time(), 0, Counter[str]()
    async for command, *words in commands():
        match command:
            case "require":
                service.require(map(int, words))
            case "held":
                version, number = Version(0, int(words[0])), int(words[1])
                await service.wait_for(
                    lambda known, v=version, n=number: len(known.holders(v)) >= n, what="all receivers", timeout=SOON
                )
                say(held=True)
            case "mark":
                made = Counter(server.counters.calls)
                say(cpu_s=time.process_time() - cpu, sent=sent - before, calls=dict(made - calls))
                cpu, before, calls = time.process_time(), sent, made


class Still(Transport):
    """A transport that moves no bytes."""

    async def start(self, read: Read, *, until: Until = at_once) -> str:
        """Return an address at which nothing listens."""
        del read, until
        return "tcp://127.0.0.1:1"

    async def pull(self, *_: object, **__: object) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


async def follow(holder: Holder, driver: RpcClient, manifests: dict[int, Manifest], alone: asyncio.Lock) -> None:
    """Register each new version as soon as it is available, with the ``locate`` calls of a real receiver.

    Like a real receiver, it locates a source again only if the last source is a publisher, or if it has none.
    """
    source = None
    while True:
        changed, newest = holder.changed, max(holder.view.available, default=None)
        if newest is None or newest in holder.copies:
            await changed.wait()
            continue
        request = Locate(
            worker=holder.worker, address=holder.address, version=newest.packed, layout=WHOLE, manifest=True
        )
        if source is None or source.published:
            source = await driver.call("weights.locate", request, Located, timeout=SOON)
            if source.manifest is not None:
                manifests[newest.packed] = source.manifest
        async with alone:
            if newest.packed not in manifests:  # real receivers get it from one another
                request = replace(request, layout=None)
                located = await driver.call("weights.locate", request, Located, timeout=SOON)
                manifests[newest.packed] = located.manifest
        manifest = manifests[newest.packed]
        arena = Arena({entry.name: (entry.dtype, Box.whole(entry.shape)) for entry in manifest.tensors})
        holder.add(newest, Copy(arena=arena, origin=manifest))


async def member_of(driver: str, role: str, index: int) -> Membership:
    """Join the driver's directory."""
    member = Member(role=role, index=index, incarnation=f"{role}-{index}-0")
    membership = Membership(driver=driver, member=member)
    await membership.join(SOON)
    return membership


async def announce(address: str, first: int, number: int) -> None:
    """Run ``number`` receivers that only make the calls of real receivers."""
    manifests: dict[int, Manifest] = {}
    alone = asyncio.Lock()
    for index in range(first, first + number):
        membership = await member_of(address, "rollout", index)
        holder = Holder(membership=membership, worker=membership.member.incarnation, transport=Still())
        await holder.start()
        holder.spawn(follow(holder, membership.driver, manifests, alone))
    say(ready=number)
    async for _ in commands():
        say(taken=number)


async def receive(address: str, first: int, number: int) -> None:
    """Run ``number`` real receivers."""
    receivers = []
    for index in range(first, first + number):
        membership = await member_of(address, "rollout", index)
        name = membership.member.incarnation
        receiver = WeightReceiver(
            membership=membership, worker=name, transport=HostTransport(name=name, patience_s=60.0)
        )
        await receiver.start()
        receivers.append(receiver)
    say(ready=number)
    async for _ in commands():
        for receiver in receivers:
            receiver.take(receiver.held[-1])
        say(taken=number)


class Child:
    """A child process that runs this file."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, *words: object) -> Child:
        """Start a child with ``--play`` and these words."""
        pipe = asyncio.subprocess.PIPE
        made = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--play", *map(str, words), stdin=pipe, stdout=pipe
        )
        return cls(made)

    async def ask(self, *words: object) -> dict[str, object]:
        """Send a command and return its answer."""
        self.send(*words)
        return await self.receive()

    def send(self, *words: object) -> None:
        """Send a command."""
        assert self._process.stdin is not None
        self._process.stdin.write((" ".join(map(str, words)) + "\n").encode())

    async def receive(self) -> dict[str, object]:
        """Return the next line that the child prints."""
        assert self._process.stdout is not None
        async with asyncio.timeout(SOON):
            return dict(json.loads(await self._process.stdout.readline()))

    async def end(self) -> None:
        """Kill the child and wait for its end."""
        self._process.kill()
        await self._process.wait()


async def measure(receivers: int, *, kind: str, processes: int, versions: int, tensors: int, window: float) -> None:
    """Publish versions and print the cost of each for the driver."""
    driver = await Child.start("driver")
    address = str((await driver.receive())["address"])
    share = -(-receivers // processes)
    groups = [await Child.start(kind, address, at, min(share, receivers - at)) for at in range(0, receivers, share)]
    for group in groups:
        await group.receive()
    membership = await member_of(address, "trainer", 0)
    worker = membership.member.incarnation
    sender = WeightSender(membership=membership, worker=worker, transport=HostTransport(name="trainer"))
    await sender.start()
    rng = np.random.default_rng(0)
    costs: list[dict[str, float]] = []
    try:
        for step in range(versions):
            await driver.ask("mark")
            began = time.monotonic()
            weights = {f"model.layers.{at}.weight": rng.standard_normal(64).astype(np.float32) for at in range(tensors)}
            await sender.publish(Version(0, step), weights, timeout=SOON)
            driver.send("require", step, step + 1)
            await driver.ask("held", step, receivers + 1)
            for group in groups:
                await group.ask("take")
            took = time.monotonic() - began
            await asyncio.sleep(max(0.0, window - took))
            spent = await driver.ask("mark")
            await asyncio.sleep(max(window, took))
            idle = await driver.ask("mark")
            extra = {name: float(spent[name]) - float(idle[name]) for name in ("cpu_s", "sent")}
            costs += [extra] if step else []
            say(
                version=step,
                seconds=round(took, 2),
                cpu_ms=round(1e3 * float(spent["cpu_s"]), 1),
                idle_ms=round(1e3 * float(idle["cpu_s"]), 1),
                bytes_more=round(extra["sent"]),
                calls={name: count - idle["calls"].get(name, 0) for name, count in spent["calls"].items()},
            )
        milliseconds = [1e3 * cost["cpu_s"] for cost in costs]
        say(
            receivers=receivers,
            versions=len(costs),
            milliseconds=round(statistics.fmean(milliseconds), 1),
            standard_error=round(statistics.stdev(milliseconds) / len(costs) ** 0.5, 1),
            bytes=round(statistics.fmean(cost["sent"] for cost in costs)),
        )
    finally:
        await sender.close()
        await membership.close()
        for child in (*groups, driver):
            await child.end()


def main() -> None:
    """Parse the command line."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--receivers", type=int, default=1000)
    options.add_argument("--processes", type=int, default=2)
    options.add_argument("--versions", type=int, default=16)
    options.add_argument("--window", type=float, default=4.0, help="seconds of a window, with or without a version")
    options.add_argument("--tensors", type=int, default=100, help="tensors in the manifest, which is sent twice")
    options.add_argument("--pull", action="store_true", help="also pull the weights")
    options.add_argument("--play", nargs="+", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    match chosen.play:
        case ["driver"]:
            asyncio.run(drive())
        case ["pull", address, first, number]:
            asyncio.run(receive(address, int(first), int(number)))
        case ["announce", address, first, number]:
            asyncio.run(announce(address, int(first), int(number)))
        case _:
            asyncio.run(
                measure(
                    chosen.receivers,
                    kind="pull" if chosen.pull else "announce",
                    processes=chosen.processes,
                    versions=chosen.versions,
                    tensors=chosen.tensors,
                    window=chosen.window,
                )
            )


if __name__ == "__main__":
    main()
