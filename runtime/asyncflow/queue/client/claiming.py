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
from asyncflow.queue.client.verbs import Ask, Farewell, Peer, Verb, left_of, scatter, shard
from asyncflow.queue.client.verbs_control import GRACE_S, ControlVerbs
from asyncflow.queue.protocol.calls import Abandon, Acknowledge, Claimed, ClaimRows, Done, Verdicts, Withdraw
from asyncflow.queue.protocol.shard_calls import controller_of

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

    def claim(self, request: ClaimRows, *, timeout: float) -> Verb[Claimed]:
        """Claim until there are rows, or an end, or ``timeout`` seconds are over.

        Which controller decides about a task is remembered, because tasks never move.
        """
        place, deadline = (request.partition, request.task), self._control.clock() + timeout
        for _ in range(_MOVES):
            try:
                return (yield from self._claim_at(self.places.get(place), request, deadline))
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

        return (yield from scatter(map(controller_of, leases), send)) if leases else []

    def _claim_at(self, peer: Peer, request: ClaimRows, deadline: float) -> Verb[Claimed]:
        control = self._control
        goodbye = Abandon(request.worker, request.ticket)
        yield Farewell(Ask(peer, "queue.abandon", goodbye, Done, _GOODBYE_S))
        late: list[str] = []
        if others := [lease for lease in request.done if shard(controller_of(lease)) != peer]:
            ok = yield from self.acknowledge(others, timeout=left_of(deadline + GRACE_S, control.clock))
            late = [lease for lease, done in zip(others, ok, strict=True) if not done]
            request = msgspec.structs.replace(request, done=[of for of in request.done if of not in others])
        what = f"claiming from {request.partition}/{request.task}"
        while True:
            claimed = yield from control.park(
                "queue.claim",
                lambda wait_s: msgspec.structs.replace(request, wait_s=wait_s),
                Claimed,
                deadline=deadline,
                what=what,
                peer=peer,
            )
            if claimed.lot is not None:
                claimed = msgspec.structs.replace(claimed, lot=claimed.lot.expanded())
            if late:
                claimed = msgspec.structs.replace(claimed, late=late + claimed.late)
            if claimed.lot is not None or claimed.ended or claimed.withdrawn or control.clock() >= deadline:
                return claimed
