"""A storage unit's process: the cells themselves, behind four calls (put, write, fetch, take).

A put is answered when the controller has admitted it. A put without room waits its turn, except for outputs that were
promised to rows when they were created. A put whose caller has disconnected is still decided, so it is never half done.

Invariant: a unit never holds more than ``limit_bytes`` of cells, whatever the controller does.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence

from asyncflow.errors import DeadlineExceeded, ProtocolError, Refused, WrongUnit
from asyncflow.identity import COUNTER_BITS
from asyncflow.plugins import load_plugin
from asyncflow.queue.protocol.unit_calls import (
    MOST_ROWS,
    FetchRows,
    MovedRows,
    NewCells,
    NewRows,
    PutRows,
    RowIds,
    TakeRows,
    WriteRows,
)
from asyncflow.queue.storage.backend import BACKENDS, Backend, Site
from asyncflow.queue.storage.budget import ByteBudget
from asyncflow.queue.storage.holdings import Blob, Holdings
from asyncflow.queue.storage.memory import MemoryBackend
from asyncflow.queue.storage.session import UnitSession
from asyncflow.rpc import framing
from asyncflow.rpc.access import Access
from asyncflow.rpc.addresses import address_of
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.columns import BatchHeader, Buffer, Jagged, decode_batch, encode_batch
from asyncflow.rpc.server import RpcServer
from asyncflow.rpc.tls import Credentials

Frames = Sequence[memoryview]
_MOST_IDS = (1 << COUNTER_BITS) - (MOST_ROWS << 6)
"""Row ids of one incarnation, less a reserve for puts that are in progress when they run out."""
_MOST = 1 << 40
"""Byte limit when a put is decoded; the server limits messages, and the budget limits what is stored."""


def open_backend(name: str, site: Site) -> Backend:
    """Return the backend ``name`` of the entry points ``BACKENDS``. Raises ManifestError if there is none."""
    made: type[Backend] = load_plugin(BACKENDS, name, kind=Backend, where="backend of the queue")
    return made.create(site)


class StorageUnit:
    """One unit.

    index: its index among the units; limit_bytes: most bytes of cells; controller: the controller's address, or a
    function that returns it; find: returns the address of process i of a role, None if there is none; incarnation: name
    of this process, by default generated; host, port: address to listen on (port 0: any); credentials: of this process;
    access: access rules; backend: storage of the cells, by default this process's memory; max_message: most bytes of a
    message. ``failed`` ends with the reason if it cannot continue. ``leaving`` is set when the unit is to ``leave``.
    """

    failed: asyncio.Task[None]

    def __init__(
        self,
        *,
        index: int,
        limit_bytes: int,
        controller: str | Callable[[], str | None],
        find: Callable[[str, int], str | None] = lambda _role, _index: None,
        incarnation: str = "",
        host: str = "127.0.0.1",
        port: int = 0,
        credentials: Credentials | None = None,
        access: Access | None = None,
        backend: Backend | None = None,
        max_message: int = framing.MAX_MESSAGE,
    ) -> None:
        self.index = index
        self.incarnation = incarnation or uuid.uuid4().hex
        self.put_bytes = self.fetched_bytes = 0
        name = f"storage unit {index}"
        self._backend = backend or MemoryBackend()
        budget = ByteBudget(limit_bytes, where=name)
        self.holdings = Holdings(backend=self._backend, budget=budget, where=name, lost=self._lost, most=max_message)
        self._controller = RpcClient(name=name, resolve=controller, credentials=credentials, expects=("controller",))
        self._session = UnitSession(
            unit=index,
            incarnation=self.incarnation,
            controller=self._controller,
            holdings=self.holdings,
            address=lambda: self.server.address,
            find=find,
            credentials=credentials,
        )
        self.leaving = self._session.leaving
        self._moving = self._session.moving
        self.server = RpcServer(
            name=name, bind=address_of(host, port), credentials=credentials, access=access, max_message=max_message
        )
        self.server.route("unit.put", PutRows, self._put)
        self.server.route("unit.write", WriteRows, self._write)
        self.server.route("unit.fetch", FetchRows, self._fetch)
        self.server.route("unit.take", TakeRows, self._take)

    async def start(self) -> str:
        """Start to serve and to connect to the controller; return the address."""
        address = await self.server.start()
        self.failed = self._session.start()
        return address

    async def close(self) -> None:
        """Stop serving and drop all cells."""
        await self.server.close()
        await self._session.close()
        await self._controller.close()
        await self._backend.close()

    async def leave(self, *, patient: bool = True) -> bool:
        """Move all rows to other units; return True when no row is left, and the unit is no longer a member.

        From now on it accepts nothing new. patient: wait for other units and the controller; else return False.
        """
        if left := await self._session.drain(patient=patient):
            await self._session.close()
        return left

    async def joined(self, timeout: float) -> None:
        """Wait until the controller knows this unit. Raises DeadlineExceeded."""
        if self.ready:
            return
        try:
            async with asyncio.timeout(timeout):
                await self._session.joined.wait()
        except TimeoutError:
            what = f"the controller did not accept this unit within {timeout:g} s"
            raise DeadlineExceeded(what, where=f"storage unit {self.index}") from None

    @property
    def moved_rows(self) -> int:
        """Rows that have moved to other units."""
        return self._session.moved_rows

    @property
    def ready(self) -> bool:
        """Return whether the controller has accepted this unit."""
        return self._session.joined.is_set()

    async def _open(self, wait_s: float) -> None:
        """Wait until new rows can be accepted. Raises WrongUnit if the unit no longer accepts any."""
        await self.joined(wait_s)
        if self._moving.draining:
            raise WrongUnit("the unit is draining", where=f"storage unit {self.index}", hint="Put the rows on another")

    async def _put(self, call: PutRows, frames: Frames) -> RowIds:
        await self._open(call.wait_s)
        if self._session.ids_used > _MOST_IDS:
            hint = "Put the rows on another unit; this one has ids again when it was drained and restarted"
            raise WrongUnit("its row ids are used up", where=f"storage unit {self.index}", hint=hint)
        count = call.header.rows
        if count % call.group_size or (call.tags and len(call.tags) != count):
            raise ProtocolError(f"{count} rows came in groups of {call.group_size}, with {len(call.tags)} sets of tags")
        if not call.header.columns and not call.tags:
            raise ProtocolError("rows came without columns and without tags")
        blob = await self._store_new(call, frames, rows=count)
        rows = list(self._session.new_rows(count))
        entry = NewRows(
            partition=call.partition,
            client=call.client,
            group=call.group,
            group_size=call.group_size,
            rows=rows,
            cells=blob.cells,
            tags=call.tags,
            samples=call.samples,
            attempt=call.attempt,
        )
        result = await self._session.submit(entry, blob).decided()
        return RowIds(rows) if all(result.ok) else RowIds(result.rows, result.ok)

    async def _write(self, call: WriteRows, frames: Frames) -> list[bool]:
        await self.joined(call.wait_s)
        rows = call.rows
        columns = self._columns(call.header, frames, rows=len(rows))
        if call.tags and len(call.tags) != len(rows):
            raise ProtocolError(f"{len(rows)} rows came with {len(call.tags)} sets of tags")
        if not self._session.knows(call.lease):
            return [False] * len(rows)
        if call.outcome == "keep" and not self.holdings.budget.fits(sum([c.values.nbytes for c in columns.values()])):
            return [False] * len(rows)
        self._moving.check(rows, write=True)
        partial = () if call.outcome == "complete" else columns
        blob = await self.holdings.store(columns, rows=rows, lease=call.lease, partial=partial, timeout=call.wait_s)
        try:
            self._moving.check(rows, write=True)
        except WrongUnit:
            self.holdings.discard(blob, len(rows))
            raise
        self.put_bytes += blob.size
        entry = NewCells(call.lease, rows, blob.cells, call.tags, call.outcome, call.reason)
        return (await self._session.submit(entry, blob).decided()).ok

    async def _fetch(self, call: FetchRows, _: Frames) -> tuple[BatchHeader, list[Buffer]]:
        rows = call.rows
        self._moving.check(rows)
        try:
            columns = await self.holdings.fetch(rows, call.columns)
        except Refused:
            self._moving.check(rows)
            raise
        header, out = encode_batch(columns)
        self.fetched_bytes += sum(map(len, out))
        return header, out

    async def _take(self, call: TakeRows, frames: Frames) -> list[bool]:
        await self._open(call.wait_s)
        rows = call.rows
        if not len(rows) == len(set(rows)) == len(call.tokens) == len(call.tags):
            about = f"{len(call.tokens)} counts, {len(call.tags)} sets of tags"
            raise ProtocolError(f"{len(rows)} rows, of which {len(set(rows))} differ, came with {about}")
        blob = await self._store_new(call, frames, rows=len(rows), partial=call.partial)
        entry = MovedRows(call.source, call.ticket, call.rows, blob.cells, call.partial, call.tokens, call.tags)
        return (await self._session.submit(entry, blob).decided()).ok

    def _columns(self, header: BatchHeader, frames: Frames, *, rows: int) -> dict[str, Jagged]:
        """Decode the columns of a put, which may be none."""
        if not header.columns and not frames:
            return {}
        if header.rows != rows:
            raise ProtocolError(f"{rows} rows came with columns of {header.rows}")
        return decode_batch(header, frames, max_bytes=_MOST)

    async def _store_new(
        self, call: PutRows | TakeRows, frames: Frames, *, rows: int, partial: Sequence[str] = ()
    ) -> Blob:
        if rows > MOST_ROWS:
            raise Refused(
                f"{rows} rows came in one put", where="storage unit", hint=f"Put at most {MOST_ROWS} at a time"
            )
        columns = self._columns(call.header, frames, rows=rows)
        if not set(partial) <= columns.keys():
            raise ProtocolError(f"the unfinished columns {partial} are not among {sorted(columns)}")
        blob = await self.holdings.store(columns, new=rows, outputs=call.outputs, partial=partial, timeout=call.wait_s)
        self.put_bytes += blob.size
        return blob

    def _lost(self, rows: list[int]) -> None:
        self._session.lose(rows)
