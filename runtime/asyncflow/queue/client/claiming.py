"""Claims on their way to the controller that decides about their task, and the acknowledgements that go with them.

A claim that finds nothing parks at the controller, again and again until its deadline; who leaves meanwhile says so, so
that no row is leased to nobody.

Invariant: a claim has one ticket, however often it is made again: what was leased to it comes with the next answer.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Sequence

import msgspec

from asyncflow.errors import Misdirected, Refused
from asyncflow.identity import unit_of
from asyncflow.queue.client.verbs import Ask, Expect, Farewell, Peer, Reserve, Verb, left_of, scatter, shard
from asyncflow.queue.client.verbs_control import GRACE_S, ControlVerbs
from asyncflow.queue.protocol.calls import Abandon, Acknowledge, Ahead, Claimed, ClaimRows, Done, Verdicts
from asyncflow.queue.protocol.runs import shrink
from asyncflow.queue.protocol.shard_calls import controller_of
from asyncflow.queue.protocol.unit_calls import FetchRows

_MOVES = 4
"""Most controllers that are asked about a task before one is found that decides about it."""
_GOODBYE_S = 2.0


class Claimer:
    """Claims for one client, whose ``control`` it has. places: the controller of (partition, task), where known."""

    def __init__(self, control: ControlVerbs) -> None:
        self._control = control
        self._ticket_base = uuid.uuid4().hex[:8]
        self._ticket_numbers = itertools.count()
        self.places: dict[tuple[str, str], Peer] = {}

    def ticket(self) -> str:
        """Name a claim."""
        return f"{self._ticket_base}-{next(self._ticket_numbers)}"

    def claim(self, request: ClaimRows, *, columns: Sequence[str] = (), timeout: float) -> Verb[Claimed]:
        """Claim until there are rows, or an end, or ``timeout`` seconds are over.

        Which controller decides about a task is remembered, because tasks never move.
        """
        place, deadline = (request.partition, request.task), self._control.clock() + timeout
        if columns and (reserved := (yield Reserve())) is not None:
            request = msgspec.structs.replace(request, ahead=Ahead(reserved.seat, reserved.call, list(columns)))
        for _ in range(_MOVES):
            try:
                return (yield from self._claim_at(self.places.get(place), request, deadline))
            except Misdirected as there:
                self.places[place] = shard(there.controller)
        raise Refused(f"no controller decides about {request.partition}/{request.task}", where="queue client")

    def acknowledge(self, leases: Sequence[str], *, timeout: float) -> Verb[list[bool]]:
        """Complete all rows of leases; False where a lease was not in force any more."""

        def send(indices: Sequence[int]) -> Verb[list[bool]]:
            mine, peer = [leases[i] for i in indices], shard(controller_of(leases[indices[0]]))
            answer = yield from self._control.ask(
                "queue.acknowledge", Acknowledge(mine), Verdicts, timeout=timeout, peer=peer
            )
            return answer.ok

        return (yield from scatter(map(controller_of, leases), send)) if leases else []

    def _claim_at(self, peer: Peer, request: ClaimRows, deadline: float) -> Verb[Claimed]:
        control = self._control
        goodbye = Abandon(request.worker, request.ticket)
        yield Farewell(Ask(peer, "queue.abandon", goodbye, Done, _GOODBYE_S))
        late: list[str] = []
        if others := [lease for lease in request.done if shard(controller_of(lease)) != peer]:
            ok = yield from self.acknowledge(others, timeout=left_of(deadline, control.clock) + GRACE_S)
            late = [lease for lease, done in zip(others, ok, strict=True) if not done]
            request = msgspec.structs.replace(request, done=[of for of in request.done if of not in others])
        while True:
            claimed = yield from control.park(
                "queue.claim",
                lambda wait_s: msgspec.structs.replace(request, wait_s=wait_s),
                Claimed,
                deadline=deadline,
                what=f"claiming from {request.partition}/{request.task}",
                peer=peer,
            )
            if late:
                claimed = msgspec.structs.replace(claimed, late=late + claimed.late)
            if claimed.lot is not None:
                if claimed.ahead and request.ahead is not None:
                    rows, ahead = claimed.lot.rows, request.ahead
                    yield Expect(unit_of(rows[0]), FetchRows(rows if claimed.lot.short else shrink(rows), ahead.columns), ahead.call)
                return msgspec.structs.replace(claimed, lot=claimed.lot.expanded()) if claimed.lot.short else claimed
            if claimed.ended or control.clock() >= deadline:
                return claimed
