"""A TCP proxy in front of a server, which cuts streams or holds back all data for a while."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from asyncflow.rpc.addresses import host_and_port

T = TypeVar("T")
_CHUNK = 1 << 14


class Proxy:
    """A proxy that listens at ``self.address`` and forwards to ``address``, in a thread of its own.

    cut_every: mean number of bytes after which a stream is cut; 0 cuts none.
    """

    def __init__(self, address: str, dice: random.Random, *, cut_every: int = 0) -> None:
        self._to = host_and_port(address)
        self._dice = dice
        self._loop = asyncio.new_event_loop()
        self._passes = asyncio.Event()
        self._passes.set()
        self.cuts = 0
        self.cut_every = cut_every
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._server = self._run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        server_name = address.rpartition("/")[2] if address.count("/") > 2 else ""
        port = self._server.sockets[0].getsockname()[1]
        self.address = f"tcp://127.0.0.1:{port}" + (f"/{server_name}" if server_name else "")

    def hold(self) -> None:
        """Stop forwarding data."""
        self._loop.call_soon_threadsafe(self._passes.clear)

    def go_on(self) -> None:
        """Resume forwarding data."""
        self._loop.call_soon_threadsafe(self._passes.set)

    def close(self) -> None:
        """End all streams."""
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, job: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(job, self._loop).result(10)

    async def _end(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection(*self._to)
        except OSError:
            writer.close()
            return
        pair = (writer, up_writer)
        budget = self._dice.randint(1, 2 * self.cut_every) if self.cut_every else 1 << 60
        ways = [self._pump(reader, up_writer, budget), self._pump(up_reader, writer, budget)]
        tasks = [asyncio.create_task(way) for way in ways]
        with contextlib.suppress(asyncio.CancelledError):  # by ``close``: asyncio's stream protocol logs it
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for end in pair:
            end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, budget: int) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                await self._passes.wait()
                if len(data) >= budget:
                    writer.write(data[:budget])
                    await writer.drain()
                    self.cuts += 1
                    return
                budget -= len(data)
                writer.write(data)
                await writer.drain()
