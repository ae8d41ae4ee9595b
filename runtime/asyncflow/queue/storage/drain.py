"""Drain of a unit: it moves its rows to the units that the controller names, until nothing is left.

The controller orders one move after another. The rows of a move are frozen, copied in batches of bounded size, and
freed here when the controller has recorded their new location. After a failure the controller is asked again, which
makes void what is still under way; only then may the rows that are left be written to.

Invariants: a row is freed here only when it lies elsewhere or nobody needs it; at most one move is under way, and
nothing is written to its rows meanwhile; a row that is here, or comes here, is not looked for elsewhere; the rows of a
batch have the same columns in the same forms, and are promised the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from asyncflow.errors import AsyncFlowError, Elsewhere, Fenced, PeerLost
from asyncflow.identity import home_of
from asyncflow.queue.protocol.calls import NOWHERE, Done, Drain, Verdicts
from asyncflow.queue.protocol.unit_calls import AskLeg, Leg, MovedRows, TakeRows
from asyncflow.queue.storage.holdings import Block, Holdings
from asyncflow.queue.storage.session import UnitSession
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.columns import encode_batch
from asyncflow.rpc.retry import delays
from asyncflow.rpc.tls import Credentials

log = logging.getLogger(__name__)

_ROWS = 512
_BYTES = 4 << 20
_CALL_S = 10.0
_ROOM_S = 2.0
_AWAY_S = 10.0
_REPORTED_S = 0.01
_LOOK_S = 0.05
_NOWHERE_S = 1.0
_Form = tuple[str, str]


@dataclass(slots=True)
class MoveBatch:
    """Rows that go in one message. columns, partial: all that they have, and the unfinished ones among these."""

    columns: tuple[str, ...]
    partial: tuple[str, ...]
    outputs: Mapping[str, int]
    rows: list[int] = field(default_factory=list)
    nbytes: int = 0


class MovingRows:
    """Rows of a unit that are moving to others. location: returns that of the unit's own rows; where: its name."""

    def __init__(self, holdings: Holdings, *, location: Callable[[], int], where: str) -> None:
        self.draining = False
        self._holdings = holdings
        self._location = location
        self._where = where
        self._frozen: frozenset[int] = frozenset()
        self._thawed: asyncio.Future[None] | None = None

    def freeze(self, rows: Iterable[int]) -> None:
        """Block writes to ``rows``, and to no others, until ``thaw``."""
        self.thaw()
        self._frozen = frozenset(rows)
        self._thawed = asyncio.get_running_loop().create_future()

    def thaw(self) -> None:
        """Let the rows that are still here be written to again."""
        self._frozen = frozenset()
        if self._thawed is not None and not self._thawed.done():
            self._thawed.set_result(None)

    def blocks(self, rows: Sequence[int]) -> bool:
        """Return whether some of ``rows`` cannot be written to here now."""
        return not self._frozen.isdisjoint(rows) or bool(self._away(rows))

    async def writable(self, rows: Sequence[int]) -> None:
        """Wait until ``rows`` can be written to here. Raises Elsewhere where some lie on another unit."""
        while True:
            await self.readable(rows)
            if self._thawed is None or self._frozen.isdisjoint(rows):
                return
            await asyncio.wait([self._thawed])

    async def readable(self, rows: Sequence[int]) -> None:
        """Wait until those of ``rows`` that come here have come. Raises Elsewhere where some lie on another unit."""
        while away := self._away(rows):
            coming = [
                put.result
                for put in self._holdings.puts
                if isinstance(put.entry, MovedRows) and not away.isdisjoint(put.rows)
            ]
            if not coming:
                hint = "The controller knows where they lie"
                raise Elsewhere(f"{len(away)} of {len(rows)} rows do not lie here", where=self._where, hint=hint)
            await asyncio.wait([coming[-1]])

    def _away(self, rows: Sequence[int]) -> set[int]:
        """Return the rows that may be elsewhere; one that was put here and never moved is here, or gone for good."""
        here = self._holdings.rows
        if all(map(here.__contains__, rows)):
            return set()
        own = self._location()
        return {row for row in rows if (self.draining or home_of(row) != own) and row not in here}

    def first(self, *, most: int, most_bytes: int) -> tuple[list[int], int]:
        """Return the first rows that are here, no more than said unless that is none, and their bytes."""
        rows: list[int] = []
        total = 0
        for number, block in self._holdings.rows.items():
            size = block.size(number)
            if rows and (len(rows) == most or total + size > most_bytes):
                break
            rows.append(number)
            total += size
        return rows, total

    def batches(self, rows: Iterable[int], *, most_bytes: int) -> Iterator[MoveBatch]:
        """Yield those of ``rows`` that are here, in batches of at most so many bytes, or of one row."""
        open_: dict[tuple[object, ...], MoveBatch] = {}
        for number in rows:
            block = self._holdings.rows.get(number)
            if block is None:
                continue
            whole, partial = _forms(block, partial=False), _forms(block, partial=True)
            alike = (whole, partial, tuple(sorted(block.outputs.items())))
            size = block.size(number)
            batch = open_.get(alike)
            if batch is not None and batch.nbytes + size > most_bytes:
                yield open_.pop(alike)
                batch = None
            if batch is None:
                unfinished = tuple(name for name, _ in partial)
                columns = tuple(name for name, _ in whole) + unfinished
                batch = open_[alike] = MoveBatch(columns, unfinished, block.outputs)
            batch.rows.append(number)
            batch.nbytes += size
        yield from open_.values()


class UnitDrain:
    """Drains the unit that ``order`` names. peer: returns the address of another one, by its index."""

    def __init__(
        self,
        *,
        order: Drain,
        holdings: Holdings,
        moving: MovingRows,
        session: UnitSession,
        controller: RpcClient,
        peer: Callable[[int], str | None],
        credentials: Credentials | None,
    ) -> None:
        self.moved_rows = 0
        self._order = order
        self._unit = order.unit
        self._holdings = holdings
        self._moving = moving
        self._session = session
        self._controller = controller
        self._peer = peer
        self._credentials = credentials
        self._peers: dict[int, RpcClient] = {}
        self._ordered_epoch = 0
        self._failed = NOWHERE

    async def close(self) -> None:
        """Close the connections to the other units."""
        for client in self._peers.values():
            await client.close()

    async def run(self, *, patient: bool) -> bool:
        """Drain the unit, and return True when nothing is left here.

        patient: wait for other units, and for the controller; else False where there is no other, or the controller was
        not heard for ``_AWAY_S`` seconds.
        """
        now = asyncio.get_running_loop().time
        heard, waits, failed = now(), delays(), False
        self._moving.draining = True
        while True:
            try:
                move = await self._next_move()
                heard = now()
                if move.over or (move.alone and not patient):
                    return move.over
                if failed:
                    await asyncio.sleep(next(waits))
                await self._take(move)
                waits, failed = delays(), False
            except AsyncFlowError as error:
                log.info("unit %d goes on draining: %s", self._unit, error)
                if now() - heard > _AWAY_S and not patient:
                    return False
                failed = True

    async def _next_move(self) -> Leg:
        """Ask for the next move; from here on all other rows may be written to."""
        session = self._session.session
        if session is None:
            await asyncio.sleep(_LOOK_S)
            raise PeerLost("there is no session with the controller", where=f"storage unit {self._unit}")
        if session.epoch != self._ordered_epoch:
            await self._controller.call("queue.drain", self._order, Done, timeout=_CALL_S)
            self._ordered_epoch = session.epoch
        if not self._holdings:
            await self._holdings.decided()
            await self._all_reported()
        rows, nbytes = self._moving.first(most=_ROWS, most_bytes=_BYTES)
        ask = AskLeg(session, rows, len(self._holdings), nbytes, self._failed)
        move = await self._controller.call("units.leg", ask, Leg, timeout=_CALL_S)
        self._failed = NOWHERE
        self._moving.thaw()
        self._holdings.clear(move.gone)
        return move

    async def _take(self, move: Leg) -> None:
        if move.unit == NOWHERE:
            await asyncio.sleep(_NOWHERE_S)
        rows = move.rows
        self._moving.freeze(rows)
        await self._holdings.decided(rows)
        await self._all_reported()
        for batch in self._moving.batches(rows, most_bytes=_BYTES):
            self._failed = move.unit
            await self._send(move, batch)
            self._failed = NOWHERE

    async def _all_reported(self) -> None:
        """Wait until the controller has heard what its replicas have admitted: nobody else could tell it."""
        while self._session.unreported:
            await asyncio.sleep(_REPORTED_S)

    async def _send(self, move: Leg, batch: MoveBatch) -> None:
        """Have a unit take over a batch; free the rows that lie there then."""
        session = self._session.session
        if session is None:
            raise Fenced("the session ended under way", where=f"storage unit {self._unit}")
        rows = [row for row in batch.rows if row in self._holdings]
        if not rows:
            return
        held = [(row, self._holdings.rows[row]) for row in rows]
        columns = await self._holdings.fetch(rows, batch.columns) if batch.columns else {}
        header, frames = encode_batch(columns)
        request = TakeRows(
            home=session.home,
            ticket=move.ticket,
            rows=rows,
            header=header,
            partial=list(batch.partial),
            tokens=[block.tokens(row) for row, block in held],
            tags=[block.tags(row) for row, block in held],
            outputs=dict(batch.outputs),
            wait_s=_ROOM_S,
            producer=f"unit {self._unit}",
        )
        client = self._client(move.unit)
        taken = await client.call("unit.take", request, Verdicts, timeout=_CALL_S + _ROOM_S, frames=frames)
        moved = [row for row, ok in zip(rows, taken.ok, strict=True) if ok]
        self.moved_rows += len(moved)
        self._holdings.clear(moved)

    def _client(self, unit: int) -> RpcClient:
        if unit not in self._peers:
            name = f"unit {self._unit} to unit {unit}"
            self._peers[unit] = RpcClient(
                name=name, resolve=lambda: self._peer(unit), credentials=self._credentials, expects=("storage",)
            )
        return self._peers[unit]


def _forms(block: Block, *, partial: bool) -> tuple[_Form, ...]:
    cells = block.cells.items()
    return tuple(sorted((name, of.blob.cells.dtypes[name]) for name, of in cells if of.partial is partial))
