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
from asyncflow.queue.client.verbs import Ask, Expect, Farewell, Peer, Place, Reserve, Verb, left_of, scatter, shard
from asyncflow.queue.client.verbs_control import GRACE_S, ControlVerbs
from asyncflow.queue.protocol.calls import Abandon, Acknowledge, Ahead, Claimed, ClaimRows, Done, Verdicts, Withdraw
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

        Which controller decides about a task is remembered, because tasks never move. columns: what will be fetched of
        the rows; it may then be sent without being asked for.
        """
        place, deadline = (request.partition, request.task), self._control.clock() + timeout
        if request.done:
            self._control.fresh.forget()
        for _ in range(_MOVES):
            try:
                return (yield from self._claim_at(self.places.get(place), request, columns, deadline))
            except Misdirected as there:
                self.places[place] = shard(there.controller)
        raise Refused(f"no controller decides about {request.partition}/{request.task}", where="queue client")

    def withdraw(self, request: Withdraw, *, partition: str, task: str, timeout: float) -> Verb[None]:
        """Have a claim that is parked answered now, without rows."""
        peer = self.places.get((partition, task))
        yield from self._control.ask("queue.withdraw", request, Done, timeout=timeout, peer=peer)

    def acknowledge(self, leases: Sequence[str], *, timeout: float) -> Verb[list[bool]]:
        """Complete all rows of leases; False where a lease was not in force any more."""

        def send(indices: Sequence[int]) -> Verb[list[bool]]:
            mine, peer = [leases[i] for i in indices], shard(controller_of(leases[indices[0]]))
            answer = yield from self._control.ask(
                "queue.acknowledge", Acknowledge(mine), Verdicts, timeout=timeout, peer=peer
            )
            return answer.ok

        return (yield from self._control.fresh.changing(scatter(map(controller_of, leases), send))) if leases else []

    def _claim_at(self, peer: Peer, request: ClaimRows, columns: Sequence[str], deadline: float) -> Verb[Claimed]:
        control = self._control
        goodbye = Abandon(request.worker, request.ticket)
        yield Farewell(Ask(peer, "queue.abandon", goodbye, Done, _GOODBYE_S))
        late: list[str] = []
        if others := [lease for lease in request.done if shard(controller_of(lease)) != peer]:
            ok = yield from self.acknowledge(others, timeout=left_of(deadline + GRACE_S, control.clock))
            late = [lease for lease, done in zip(others, ok, strict=True) if not done]
            request = msgspec.structs.replace(request, done=[of for of in request.done if of not in others])
        while True:
            claimed = yield from self._park(peer, request, columns, deadline)
            if late:
                claimed = msgspec.structs.replace(claimed, late=late + claimed.late)
            if claimed.lot is not None or claimed.ended or claimed.withdrawn or control.clock() >= deadline:
                return claimed

    def _park(self, peer: Peer, request: ClaimRows, columns: Sequence[str], deadline: float) -> Verb[Claimed]:
        """Claim until there is an answer, which is that of a claim that was met, or waited for as long as one waits."""
        control = self._control
        promises = control.fresh.since()
        place: Place | None = (yield Reserve()) if columns else None
        unsaid = [Ahead(place.seat, place.call, list(columns))] if place is not None else []

        def asked(wait_s: float) -> ClaimRows:
            ahead = unsaid.pop() if unsaid else None  # never again: a place is for one answer
            return msgspec.structs.replace(request, wait_s=wait_s, ahead=ahead)

        what = f"claiming from {request.partition}/{request.task}"
        claimed = yield from control.park("queue.claim", asked, Claimed, deadline=deadline, what=what, peer=peer)
        lot = claimed.lot.expanded() if claimed.lot is not None else None
        if lot is not None and place is not None and claimed.ahead:
            yield Expect(lot.homes[0], place)
            control.fresh.note(promises, lot.homes[0], FetchRows(shrink(lot.rows), list(columns)), place)
        return claimed if lot is claimed.lot else msgspec.structs.replace(claimed, lot=lot)
