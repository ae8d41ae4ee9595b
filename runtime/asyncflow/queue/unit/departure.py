"""How a unit leaves: leg by leg it takes its rows to the units that the controller names, until nothing is left.

The rows of a leg are frozen, copied in packs of bounded size, and freed here when the controller has let them lie
elsewhere. Whatever went wrong, the controller is asked again, which makes void what is still under way; only then may
the rows that are left be written to.

Invariants: a row is freed here only when it lies elsewhere or nobody needs it; at most one leg is under way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from asyncflow.errors import AsyncFlowError, Fenced, PeerLost
from asyncflow.net.frames import encode_batch
from asyncflow.net.keys import Keys
from asyncflow.net.retry import delays
from asyncflow.net.rpc import RpcClient
from asyncflow.queue.protocol.calls import Done, Verdicts
from asyncflow.queue.protocol.moving_calls import NOWHERE, AskLeg, Drain, Leg, TakeRows
from asyncflow.queue.protocol.runs import expand, shrink
from asyncflow.queue.unit.holdings import Holdings
from asyncflow.queue.unit.liaison import Liaison
from asyncflow.queue.unit.transit import Pack, Transit

log = logging.getLogger(__name__)

_ROWS = 512
_BYTES = 4 << 20
_CALL_S = 10.0
_ROOM_S = 2.0
_AWAY_S = 10.0
_TOLD_S = 0.01
_LOOK_S = 0.05
_NOWHERE_S = 1.0


class Departure:
    """The way out of the unit that ``order`` names. peer: gives the address of another one, by its index."""

    def __init__(
        self,
        *,
        order: Drain,
        holdings: Holdings,
        transit: Transit,
        liaison: Liaison,
        controller: RpcClient,
        peer: Callable[[int], str | None],
        keys: Keys | None,
    ) -> None:
        self.moved_rows = 0
        self._order = order
        self._unit = order.unit
        self._holdings = holdings
        self._transit = transit
        self._liaison = liaison
        self._controller = controller
        self._peer = peer
        self._keys = keys
        self._peers: dict[int, RpcClient] = {}
        self._told = 0
        self._failed = NOWHERE

    async def close(self) -> None:
        """Let go of the other units."""
        for client in self._peers.values():
            await client.close()

    async def run(self, *, patient: bool) -> bool:
        """Leave, and give True when nothing is left here.

        patient: wait for other units, and for the controller; else False where there is no other, or the controller was
        not heard for ``_AWAY_S`` seconds.
        """
        now = asyncio.get_running_loop().time
        heard, waits, failed = now(), delays(), False
        self._transit.leaving = True
        while True:
            try:
                leg = await self._next_leg()
                heard = now()
                if leg.over or (leg.alone and not patient):
                    return leg.over
                if failed:
                    await asyncio.sleep(next(waits))
                await self._take(leg)
                waits, failed = delays(), False
            except AsyncFlowError as error:
                log.info("unit %d goes on leaving: %s", self._unit, error)
                if now() - heard > _AWAY_S and not patient:
                    return False
                failed = True

    async def _next_leg(self) -> Leg:
        """Ask what goes next; from here on everything else may be written to."""
        session = self._liaison.session
        if session is None:
            await asyncio.sleep(_LOOK_S)
            raise PeerLost("there is no session with the controller", where=f"storage unit {self._unit}")
        if session.epoch != self._told:
            await self._controller.call("queue.drain", self._order, Done, timeout=_CALL_S)
            self._told = session.epoch
        if not self._holdings:
            await self._transit.decided()
            await self._all_told()
        rows, nbytes = self._transit.first(most=_ROWS, most_bytes=_BYTES)
        ask = AskLeg(session, shrink(rows), len(self._holdings), nbytes, self._failed)
        leg = await self._controller.call("units.leg", ask, Leg, timeout=_CALL_S)
        self._failed = NOWHERE
        self._transit.thaw()
        self._holdings.clear(expand(leg.gone))
        return leg

    async def _take(self, leg: Leg) -> None:
        if leg.unit == NOWHERE:
            await asyncio.sleep(_NOWHERE_S)
        rows = expand(leg.rows)
        self._transit.freeze(rows)
        await self._transit.decided(rows)
        await self._all_told()
        for pack in self._transit.packs(rows, most_bytes=_BYTES):
            self._failed = leg.unit
            await self._send(leg, pack)
            self._failed = NOWHERE

    async def _all_told(self) -> None:
        """Wait until the controller has heard what its shards have admitted: nobody else could tell it."""
        while self._liaison.has_news:
            await asyncio.sleep(_TOLD_S)

    async def _send(self, leg: Leg, pack: Pack) -> None:
        """Have a unit take over a pack; free what lies there then."""
        session = self._liaison.session
        if session is None:
            raise Fenced("the session ended under way", where=f"storage unit {self._unit}")
        rows = [row for row in pack.rows if row in self._holdings]
        if not rows:
            return
        held = [(row, self._holdings.rows[row]) for row in rows]
        columns = await self._holdings.fetch(rows, pack.columns) if pack.columns else {}
        header, frames = encode_batch(columns)
        request = TakeRows(
            home=session.home,
            ticket=leg.ticket,
            rows=shrink(rows),
            header=header,
            partial=list(pack.partial),
            tokens=[block.tokens(row) for row, block in held],
            tags=[block.tags(row) for row, block in held],
            outputs=dict(pack.outputs),
            wait_s=_ROOM_S,
            producer=f"unit {self._unit}",
        )
        client = self._client(leg.unit)
        taken = await client.call("unit.take", request, Verdicts, timeout=_CALL_S + _ROOM_S, frames=frames)
        moved = [row for row, ok in zip(rows, taken.ok, strict=True) if ok]
        self.moved_rows += len(moved)
        self._holdings.clear(moved)

    def _client(self, unit: int) -> RpcClient:
        if unit not in self._peers:
            name = f"unit {self._unit} to unit {unit}"
            self._peers[unit] = RpcClient(name=name, resolve=lambda: self._peer(unit), keys=self._keys)
        return self._peers[unit]
