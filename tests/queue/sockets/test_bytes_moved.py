"""Bytes on the wire are those of the columns that are named, and little else."""

import asyncio
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import numpy as np
import pytest

from asyncflow.local.issuer import Issuer
from asyncflow.queue.client import QueueClient
from asyncflow.rpc.columns import Jagged

P = "wide"
MOST = 1.03


class Relay:
    """Passes on what goes between clients and a unit, and counts its bytes both ways."""

    def __init__(self, address):
        self.moved = 0
        self._target = urlsplit(address)

    @asynccontextmanager
    async def running(self):
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            host, port = server.sockets[0].getsockname()
            self.address = f"{self._target.scheme}://{host}:{port}"
            yield self

    async def _serve(self, reader, writer):
        there = await asyncio.open_connection(self._target.hostname, self._target.port)
        await asyncio.gather(self._pass(reader, there[1]), self._pass(there[0], writer))

    async def _pass(self, reader, writer):
        while data := await reader.read(1 << 16):
            self.moved += len(data)
            writer.write(data)
            await writer.drain()
        writer.close()


@pytest.mark.parametrize("certified", [False, True], ids=["plain", "tls"])
async def test_a_reader_moves_the_columns_that_it_names_and_a_writer_what_it_writes(cluster, tmp_path, certified):
    issuer = Issuer(tmp_path / "tls") if certified else None
    rng = np.random.default_rng(1)
    columns = {
        name: Jagged.from_rows([rng.integers(0, 1 << 40, length) for length in rng.integers(500, 4000, 64)], "int64")
        for name in ("a", "b", "c")
    }
    async with (
        cluster(units=1, limit=32 << 20, issuer=issuer) as made,
        Relay(made.address(made.units[0])).running() as relay,
    ):
        client = QueueClient(
            find=lambda role, _: made.address(made.controller) if role == "controller" else relay.address,
            units=lambda: [0],
            worker="w",
            credentials=made.credentials("client"),
        )
        rows = (await client.put(P, columns, timeout=10)).rows
        everything = sum(column.values.nbytes for column in columns.values())
        assert everything < relay.moved <= MOST * everything
        relay.moved = 0
        assert await client.fetch(rows, ["b"], timeout=10) == {"b": columns["b"]}
        assert columns["b"].values.nbytes < relay.moved <= MOST * columns["b"].values.nbytes
        await client.close()
