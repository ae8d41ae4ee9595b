"""A storage unit's process: the cells themselves, behind three calls (create, write, fetch).

A put is answered when the controller has admitted it. A put that finds no room waits in line, but for outputs that were
promised to rows when they were created; one whose caller has gone away meanwhile is still decided, so nothing is left
in between.

Invariant: a unit never holds more than ``limit_bytes`` of cells, whatever the controller does.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence

from asyncflow.errors import DeadlineExceeded, ProtocolError, StaleHandle
from asyncflow.identity import RowPlace
from asyncflow.net.frames import Buffer, decode_batch, encode_batch
from asyncflow.net.keys import Keys
from asyncflow.net.rpc import RpcClient, RpcServer
from asyncflow.plugins import load_plugin
from asyncflow.queue.backends.base import Backend
from asyncflow.queue.budget import Budget
from asyncflow.queue.calls import Verdicts
from asyncflow.queue.holdings import Holdings, Put
from asyncflow.queue.liaison import Liaison
from asyncflow.queue.unit_calls import CreateRows, Fetched, FetchRows, NewCells, NewRows, WriteRows

Frames = Sequence[memoryview]
BACKENDS = "asyncflow.storage_backends"


def open_backend(name: str) -> Backend:
    """Make the back end ``name`` of the entry points ``BACKENDS``. ManifestError where there is none."""
    made: type[Backend] = load_plugin(BACKENDS, name, kind=Backend, where="spec.transferQueue.backend")
    return made()


class StorageUnit:
    """One unit.

    index: its place among the units; limit_bytes: most bytes of cells; controller: the controller's address, or a
    function that gives it; incarnation: of this process, by default made here; host, port: where to listen (0: any);
    keys: the job's key; backend: where the cells lie, by default this process's memory.
    ``failed`` is done when the unit cannot go on; its exception says why.
    """

    failed: asyncio.Task[None]

    def __init__(
        self,
        *,
        index: int,
        limit_bytes: int,
        controller: str | Callable[[], str | None],
        incarnation: str = "",
        host: str = "127.0.0.1",
        port: int = 0,
        keys: Keys | None = None,
        backend: Backend | None = None,
    ) -> None:
        self.index = index
        self.incarnation = incarnation or uuid.uuid4().hex
        self.put_bytes = 0
        self.fetched_bytes = 0
        name = f"storage unit {index}"
        self._backend = backend or open_backend("memory")
        self.holdings = Holdings(backend=self._backend, budget=Budget(limit_bytes, where=name), where=name)
        self._controller = RpcClient(name=name, resolve=controller, keys=keys)
        self._liaison = Liaison(
            unit=index, incarnation=self.incarnation, controller=self._controller, holdings=self.holdings
        )
        self.server = RpcServer(name=name, bind=f"tcp://{host}:{port or '*'}", keys=keys)
        self.server.route("unit.create", CreateRows, self._create)
        self.server.route("unit.write", WriteRows, self._write)
        self.server.route("unit.fetch", FetchRows, self._fetch)

    async def start(self) -> str:
        """Begin to serve, and to look for the controller; give the address."""
        address = await self.server.start()
        self.failed = self._liaison.start()
        return address

    async def close(self) -> None:
        """Stop serving and forget everything."""
        await self.server.close()
        await self._liaison.close()
        await self._controller.close()
        await self._backend.close()

    async def joined(self, timeout: float) -> None:
        """Wait until the controller knows this unit. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(timeout):
                await self._liaison.joined.wait()
        except TimeoutError:
            what = f"the controller did not take this unit in within {timeout:g} s"
            raise DeadlineExceeded(what, where=f"storage unit {self.index}") from None

    @property
    def ready(self) -> bool:
        """The controller has taken this unit in."""
        return self._liaison.joined.is_set()

    async def _create(self, call: CreateRows, frames: Frames) -> Verdicts:
        await self.joined(call.wait_s)
        columns = decode_batch(call.header, frames, max_bytes=self._most(len(call.metas)))
        if call.header.rows != len(call.metas):
            raise ProtocolError(f"{len(call.metas)} samples came with columns of {call.header.rows} rows")
        cells, told = await self.holdings.store_new(columns, outputs=call.outputs, timeout=call.wait_s)
        self.put_bytes += sum(sum(sizes) for sizes in told.sizes.values())
        rows = self._liaison.new_rows(len(call.metas))
        entry = NewRows(call.metas, rows, call.group_size, told, call.attempt)
        return await self._verdict(self._liaison.tell(entry, cells, outputs=call.outputs))

    async def _write(self, call: WriteRows, frames: Frames) -> Verdicts:
        await self.joined(call.wait_s)
        columns = decode_batch(call.header, frames, max_bytes=self._most(len(call.rows)))
        if columns and call.header.rows != len(call.rows):
            raise ProtocolError(f"{len(call.rows)} rows came with columns of {call.header.rows}")
        if call.tags and len(call.tags) != len(call.rows):
            raise ProtocolError(f"{len(call.rows)} rows came with {len(call.tags)} sets of tags")
        if any(self._foreign(row) for row in call.rows):
            return Verdicts([False] * len(call.rows))
        cells, told = await self.holdings.store_outputs(
            columns, rows=call.rows, lease=call.lease, partial=bool(call.reason), timeout=call.wait_s
        )
        self.put_bytes += sum(sum(sizes) for sizes in told.sizes.values())
        entry = NewCells(lease=call.lease, rows=call.rows, cells=told, tags=call.tags, reason=call.reason)
        return await self._verdict(self._liaison.tell(entry, cells))

    async def _verdict(self, put: Put) -> Verdicts:
        return Verdicts(await asyncio.shield(put.verdict))

    async def _fetch(self, call: FetchRows, _frames: Frames) -> tuple[Fetched, list[Buffer]]:
        for row in call.rows:
            if self._foreign(row):
                hint = "The unit was restarted; the sample will be created again"
                raise StaleHandle(f"row {row} was lost", where=f"storage unit {self.index}", hint=hint)
        header, out = encode_batch(await self.holdings.fetch(call.rows, call.columns))
        self.fetched_bytes += sum(memoryview(frame).nbytes for frame in out)
        return Fetched(header), out

    def _foreign(self, row: int) -> bool:
        return RowPlace.of(row).epoch != self._liaison.epoch

    def _most(self, rows: int) -> int:
        """Most bytes of a put: all the unit may hold, and 8 bytes an offset."""
        return self.holdings.budget.limit + 8 * 4096 * (rows + 1)
