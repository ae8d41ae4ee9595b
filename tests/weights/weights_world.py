"""A driver with a catalogue, workers that dial it over real sockets, and a relay to hold up what they send."""

from __future__ import annotations

import asyncio
import uuid
import zlib
from asyncio.subprocess import Process
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from asyncflow.identity import Version
from asyncflow.rpc.addresses import host_and_port
from asyncflow.rpc.directory import Directory
from asyncflow.rpc.membership import Member, Membership
from asyncflow.rpc.server import RpcServer
from asyncflow.weights.host_transport import HostTransport
from asyncflow.weights.receiver import WeightReceiver
from asyncflow.weights.sender import WeightSender
from asyncflow.weights.service import CatalogueService
from asyncflow.weights.transfer import preference

SOON = 40.0


async def member_of(driver: Any, worker: str) -> Membership:
    """Return a worker as a member of whoever listens at ``driver``, which may come later."""
    member = Member(role="rollout", index=zlib.crc32(worker.encode()), incarnation=worker)
    membership = Membership(driver=driver, member=member)
    await membership.join(SOON)
    return membership


def catalogue_of(server: RpcServer) -> CatalogueService:
    """Return the catalogue of a driver that is not started yet, with the directory that tells all of it."""
    directory = Directory()
    directory.attach(server)
    return CatalogueService(server, directory=directory)


@dataclass
class World:
    server: RpcServer | None = None
    service: CatalogueService | None = None
    address: str | None = None
    _close: list[Callable[[], Any]] = field(default_factory=list)

    async def start_driver(self) -> CatalogueService:
        self.server = RpcServer(name="driver")
        self.service = catalogue_of(self.server)
        self.address = await self.server.start()
        return self.service

    async def stop_driver(self) -> None:
        assert self.server is not None
        self.address = None
        await self.server.close()

    async def member(self, worker: str) -> Membership:
        membership = await member_of(lambda: self.address, worker)
        self._close.append(membership.close)
        return membership

    async def sender(self, worker: str = "trainer", **options: Any) -> WeightSender:
        transport = options.pop("transport", None) or HostTransport(name=worker)
        sender = WeightSender(membership=await self.member(worker), worker=worker, transport=transport, **options)
        await sender.start()
        self._close.append(sender.close)
        return sender

    async def receiver(self, worker: str = "", **options: Any) -> WeightReceiver:
        worker = worker or f"rollout-{uuid.uuid4().hex[:6]}"
        transport = options.pop("transport", None) or HostTransport(name=worker)
        receiver = WeightReceiver(membership=await self.member(worker), worker=worker, transport=transport, **options)
        await receiver.start()
        self._close.append(receiver.close)
        return receiver

    async def close(self) -> None:
        for close in reversed(self._close):
            await close()
        await self.stop_driver()


class Relay:
    """Stands between a transport and its peers: lets ``limit`` bytes pass, then nothing until ``resume``.

    passed: bytes, with all that frames them, that went to peers so far.
    """

    def __init__(self, *, limit: int | None = None, bytes_per_s: float | None = None) -> None:
        self.passed = 0
        self._left = limit
        self._rate = bytes_per_s
        self._open = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def resume(self) -> None:
        self._left = None
        self._open.set()

    async def start(self, address: str) -> str:
        there = host_and_port(address)

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            upstream, downstream = await asyncio.open_connection(*there, limit=1 << 16)
            for work in (self._pump(reader, downstream, False), self._pump(upstream, writer, True)):
                task = asyncio.create_task(work)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

        self._server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=1 << 16)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, capped: bool) -> None:
        try:
            while data := await reader.read(1 << 14):
                if capped and self._left is not None:
                    self._left -= len(data)
                    if self._left < 0:
                        await self._open.wait()
                if capped and self._rate is not None:
                    await asyncio.sleep(len(data) / self._rate)
                writer.write(data)
                self.passed += len(data) if capped else 0
                await writer.drain()
        except ConnectionError:
            return
        finally:
            writer.close()


class RelayedTransport(HostTransport):
    """The host network with a relay before what this worker serves."""

    def __init__(self, *, relay: Relay, **options: Any) -> None:
        super().__init__(**options)
        self._relay = relay

    async def start(self, read: Any, **options: Any) -> str:
        return await self._relay.start(await super().start(read, **options))

    async def close(self) -> None:
        await self._relay.close()
        await super().close()


class Worker:
    """A ``worker_process.py`` and its conversation."""

    def __init__(self, process: Process) -> None:
        self.process = process

    async def says(self, expected: str) -> str:
        async with asyncio.timeout(SOON):
            while line := (await self.process.stdout.readline()).decode().strip():
                if line.startswith(expected):
                    return line
        raise AssertionError(f"it ended before it said {expected!r}")

    def tell(self, *words) -> None:
        self.process.stdin.write((" ".join(map(str, words)) + "\n").encode())


def receiver_that_prefers(first: str, others: list[str], version: Version) -> str:
    names = (f"rollout-{index}" for index in range(1000))
    return next(
        name for name in names if preference([first, *others], version=version, receiver=name, faults={})[0] == first
    )


async def until(predicate: Callable[[], bool], what: str) -> None:
    """Wait for something that nobody announces."""
    try:
        async with asyncio.timeout(30):
            while not predicate():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"did not happen: {what}") from None


def bulk(seed: int, mebibytes: int = 4) -> dict[str, np.ndarray]:
    """Weights of a few mebibytes in two tensors, made of a seed."""
    rng = np.random.default_rng(seed)
    return {
        "big": rng.integers(0, 2**32, (mebibytes * 1024, 255), dtype=np.uint32).view(np.float32),
        "small": rng.integers(0, 2**32, mebibytes * 1024, dtype=np.uint32).view(np.int32),
    }


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Bits of the nearest bfloat16 of each float32."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def small_steps(seed: int, *, steps: int, scale: float = 0.02, learning_rate: float = 1e-6) -> list[dict[str, Any]]:
    """Return versions in bfloat16 of two matrices and a norm, each after one more Adam-like step of float32 weights."""
    rng = np.random.default_rng(seed)
    weights = {name: rng.standard_normal((512, 384)).astype(np.float32) * scale for name in ("up", "down")}
    weights["norm"] = np.ones(384, np.float32)
    versions = [{name: bfloat16(array) for name, array in weights.items()}]
    for _ in range(steps):
        for array in weights.values():
            array += learning_rate * np.clip(rng.standard_normal(array.shape), -1, 1).astype(np.float32)
        versions.append({name: bfloat16(array) for name, array in weights.items()})
    return versions
