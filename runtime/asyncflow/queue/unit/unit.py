"""A storage unit's process: the cells themselves, behind four calls (create, put, write, fetch).

A put is answered when the controller has admitted it. A put that finds no room waits in line, but for outputs that were
promised to rows when they were created; one whose caller has gone away meanwhile is still decided, so nothing is left
in between.

Invariant: a unit never holds more than ``limit_bytes`` of cells, whatever the controller does.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeAlias

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, Elsewhere, ProtocolError, Refused, StaleHandle
from asyncflow.net.eager import begin
from asyncflow.net.frames import BatchHeader, Buffer, Jagged, decode_batch, encode_batch
from asyncflow.net.hosts import address_of
from asyncflow.net.keys import Keys
from asyncflow.net.later import Later
from asyncflow.net.rpc import NowHandler, Reply, RpcClient, RpcServer, wire
from asyncflow.plugins import load_plugin
from asyncflow.queue.backends.base import BACKENDS, Backend, Site
from asyncflow.queue.backends.memory import MemoryBackend
from asyncflow.queue.protocol.calls import Verdicts
from asyncflow.queue.protocol.moving_calls import Drain, TakeRows
from asyncflow.queue.protocol.runs import MOST, expand, shrink
from asyncflow.queue.protocol.unit_calls import (
    CreateRows,
    Fetched,
    FetchRows,
    MovedRows,
    NewCells,
    NewRows,
    Numbers,
    OpenRows,
    PutRows,
    Verdict,
    WriteRows,
)
from asyncflow.queue.unit.budget import Budget
from asyncflow.queue.unit.departure import Departure
from asyncflow.queue.unit.holdings import Holdings
from asyncflow.queue.unit.liaison import Liaison
from asyncflow.queue.unit.pieces import Parcel, Put
from asyncflow.queue.unit.transit import Transit

Frames = Sequence[memoryview]
_Soon: TypeAlias = "Reply | Later[Reply]"
_MOST = 1 << 40
"""Bytes of a put: the server bounds what comes in one message, the budget what is kept."""


def open_backend(name: str, site: Site) -> Backend:
    """Make the back end ``name`` of the entry points ``BACKENDS``. ManifestError where there is none."""
    made: type[Backend] = load_plugin(BACKENDS, name, kind=Backend, where="spec.transferQueue.backend")
    return made.made(site)


class StorageUnit:
    """One unit.

    index: its place among the units; limit_bytes: most bytes of cells; controller: the controller's address, or a
    function that gives it; shard: gives that of a further controller; incarnation: of this process, by default made
    here; host, port: where to listen (0: any); keys: the job's key; backend: where the cells lie, by default this
    process's memory; peer: gives the address of another unit, by its index; max_message: most bytes of a message.
    ``failed`` is done when it cannot go on; its exception says why. ``leaving`` is set when it is wanted to ``leave``.
    """

    failed: asyncio.Task[None]

    def __init__(
        self,
        *,
        index: int,
        limit_bytes: int,
        controller: str | Callable[[], str | None],
        shard: Callable[[int], str | None] = lambda _: None,
        incarnation: str = "",
        host: str = "127.0.0.1",
        port: int = 0,
        keys: Keys | None = None,
        backend: Backend | None = None,
        peer: Callable[[int], str | None] = lambda _: None,
        max_message: int = wire.MAX_MESSAGE,
    ) -> None:
        self.index = index
        self.incarnation = incarnation or uuid.uuid4().hex
        self.put_bytes = self.fetched_bytes = 0
        name = f"storage unit {index}"
        self._backend = backend or MemoryBackend()
        budget = Budget(limit_bytes, where=name)
        self.holdings = Holdings(backend=self._backend, budget=budget, where=name, lost=self._lost, most=max_message)
        self._controller = RpcClient(name=name, resolve=controller, keys=keys)
        self._liaison = Liaison(
            unit=index,
            incarnation=self.incarnation,
            controller=self._controller,
            holdings=self.holdings,
            address=lambda: self.server.address,
            shard=shard,
            keys=keys,
        )
        self.leaving = self._liaison.leave
        self._transit = Transit(self.holdings, home=lambda: self._liaison.home, where=name)
        self.departure = Departure(
            order=Drain(index, self.incarnation),
            holdings=self.holdings,
            transit=self._transit,
            liaison=self._liaison,
            controller=self._controller,
            peer=peer,
            keys=keys,
        )
        self.server = RpcServer(name=name, bind=address_of(host, port), keys=keys, max_message=max_message)
        self.server.route_now("unit.create", CreateRows, self._now(self._create))
        self.server.route_now("unit.put", PutRows, self._now(self._put))
        self.server.route_now("unit.write", WriteRows, self._now(self._write))
        self.server.route_now("unit.fetch", FetchRows, self._now(self._fetch))
        self.server.route_now("unit.take", TakeRows, self._now(self._take))

    async def start(self) -> str:
        """Begin to serve, and to look for the controller; give the address."""
        address = await self.server.start()
        self.failed = self._liaison.start()
        return address

    async def close(self) -> None:
        """Stop serving and forget everything."""
        await self.server.close()
        await self._liaison.close()
        await self.departure.close()
        await self._controller.close()
        await self._backend.close()

    async def leave(self, *, patient: bool = True) -> bool:
        """Take all rows to other units, and give True when none is left: the unit is no member any more then.

        It takes nothing new from now on. patient: wait for others and the controller; else False without them.
        """
        if left := await self.departure.run(patient=patient):
            await self._liaison.close()
        return left

    async def joined(self, timeout: float) -> None:
        """Wait until the controller knows this unit. Raises DeadlineExceeded."""
        if self.ready:
            return
        joining = asyncio.ensure_future(self._liaison.joined.wait())
        try:
            done, _ = await asyncio.wait([joining], timeout=timeout)
        finally:
            joining.cancel()
        if not done:
            what = f"the controller did not take this unit in within {timeout:g} s"
            raise DeadlineExceeded(what, where=f"storage unit {self.index}")

    @property
    def ready(self) -> bool:
        """The controller has taken this unit in."""
        return self._liaison.joined.is_set()

    def _now(self, handler: Callable[[Any, Frames], Coroutine[Any, Any, _Soon]]) -> NowHandler:
        """Begin at once where nothing need be waited for."""
        if self._backend.immediate:
            return lambda call, frames: _unless_task(begin(handler(call, frames)))
        return lambda call, frames: asyncio.create_task(_whole(handler(call, frames)))

    async def _open(self, wait_s: float) -> None:
        """Wait until new rows can be taken. Raises Elsewhere where none are any more."""
        await self.joined(wait_s)
        if self._transit.leaving:
            raise Elsewhere("the unit leaves", where=f"storage unit {self.index}", hint="Put the rows on another")

    async def _create(self, call: CreateRows, frames: Frames) -> Later[Reply]:
        await self._open(call.wait_s)
        count = len(call.metas)
        parcel = await self._store_new(call, frames, rows=count)
        rows = shrink(self._liaison.new_rows(count))
        entry = NewRows(call.metas, rows, call.group_size, parcel.cells, call.attempt)
        put = self._liaison.tell(entry, parcel, outputs=call.outputs)
        return _reply(put, lambda verdict: Verdicts(verdict.ok))

    async def _put(self, call: PutRows, frames: Frames) -> Later[Reply]:
        await self._open(call.wait_s)
        count = call.header.rows
        if count % call.group_size or (call.tags and len(call.tags) != count):
            raise ProtocolError(f"{count} rows came in groups of {call.group_size}, with {len(call.tags)} sets of tags")
        if not call.header.columns and not call.tags:
            raise ProtocolError("rows came without columns and without tags")
        parcel = await self._store_new(call, frames, rows=count)
        rows = shrink(self._liaison.new_rows(count))
        entry = OpenRows(call.partition, call.client, call.group, call.group_size, rows, parcel.cells, call.tags)
        put = self._liaison.tell(entry, parcel, outputs=call.outputs)
        return _reply(put, lambda v: Numbers(rows) if all(v.ok) else Numbers(v.rows, v.ok))

    async def _write(self, call: WriteRows, frames: Frames) -> _Soon:
        await self.joined(call.wait_s)
        rows = expand(call.rows)
        columns = self._columns(call.header, frames, rows=len(rows))
        if call.tags and len(call.tags) != len(rows):
            raise ProtocolError(f"{len(rows)} rows came with {len(call.tags)} sets of tags")
        if not self._liaison.gave(call.lease):
            return Verdicts([False] * len(rows))
        while True:
            await self._transit.writable(rows)
            parcel = await self.holdings.store_outputs(
                columns,
                rows=rows,
                lease=call.lease,
                partial=bool(call.reason),
                producer=call.producer,
                timeout=call.wait_s,
            )
            if not self._transit.blocks(rows):
                break
            self.holdings.discard(parcel, len(rows))
        self.put_bytes += parcel.size
        entry = NewCells(lease=call.lease, rows=call.rows, cells=parcel.cells, tags=call.tags, reason=call.reason)
        return _reply(self._liaison.tell(entry, parcel), lambda verdict: Verdicts(verdict.ok))

    async def _fetch(self, call: FetchRows, _: Frames) -> tuple[Fetched, list[Buffer]]:
        rows = expand(call.rows)
        await self._transit.readable(rows)
        try:
            columns = await self.holdings.fetch(rows, call.columns)
        except StaleHandle:
            await self._transit.readable(rows)
            raise
        header, out = encode_batch(columns)
        self.fetched_bytes += sum(memoryview(frame).nbytes for frame in out)
        return Fetched(header), out

    async def _take(self, call: TakeRows, frames: Frames) -> Later[Reply]:
        await self._open(call.wait_s)
        rows = expand(call.rows)
        if not len(rows) == len(set(rows)) == len(call.tokens) == len(call.tags):
            about = f"{len(call.tokens)} counts, {len(call.tags)} sets of tags"
            raise ProtocolError(f"{len(rows)} rows, of which {len(set(rows))} differ, came with {about}")
        parcel = await self._store_new(call, frames, rows=len(rows), partial=call.partial)
        entry = MovedRows(call.home, call.ticket, call.rows, parcel.cells, call.partial, call.tokens, call.tags)
        return _reply(self._liaison.tell(entry, parcel, outputs=call.outputs), lambda verdict: Verdicts(verdict.ok))

    def _columns(self, header: BatchHeader, frames: Frames, *, rows: int) -> dict[str, Jagged]:
        """Read the columns of a put; there may be none at all."""
        if not header.columns and not frames:
            return {}
        if header.rows != rows:
            raise ProtocolError(f"{rows} rows came with columns of {header.rows}")
        return decode_batch(header, frames, max_bytes=_MOST)

    async def _store_new(
        self, call: CreateRows | PutRows | TakeRows, frames: Frames, *, rows: int, partial: Sequence[str] = ()
    ) -> Parcel:
        if rows > MOST:
            raise Refused(f"{rows} rows came in one put", where="storage unit", hint=f"Put at most {MOST} at a time")
        columns = self._columns(call.header, frames, rows=rows)
        if not set(partial) <= columns.keys():
            raise ProtocolError(f"the unfinished columns {partial} are not among {sorted(columns)}")
        parcel = await self.holdings.store_new(
            columns, rows=rows, outputs=call.outputs, partial=partial, producer=call.producer, timeout=call.wait_s
        )
        self.put_bytes += parcel.size
        return parcel

    def _lost(self, rows: list[int]) -> None:
        self._liaison.lose(rows)


def _reply(put: Put, make: Callable[[Verdict], Reply]) -> Later[Reply]:
    """Return the reply that ``make`` makes of the verdict on ``put``, which is decided whether anybody waits or not."""
    reply: Later[Reply] = Later()

    def decided(verdict: Later[Verdict]) -> None:
        if reply.done():
            return
        try:
            reply.set_result(make(verdict.result()))
        except AsyncFlowError as error:
            reply.set_exception(error)

    put.verdict.add_done_callback(decided)
    return reply


async def _whole(work: Awaitable[_Soon]) -> Reply:
    """Await ``work``, and then the reply that it promised."""
    reply = await work
    return await reply if isinstance(reply, Later) else reply


def _unless_task(begun: _Soon | asyncio.Task[Any]) -> _Soon | asyncio.Task[Any]:
    return asyncio.create_task(_whole(begun)) if isinstance(begun, asyncio.Task) else begun
