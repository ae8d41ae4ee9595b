"""One connection of a client to one address, with the calls that wait on it, until it breaks or is closed.

Invariant: each call is told once what became of it: its answer, the server's error, or that the connection is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import zmq

from asyncflow.errors import AsyncFlowError, PeerLost, ProtocolError, from_wire
from asyncflow.net import doors, wire
from asyncflow.net.dialling import Health
from asyncflow.net.frames import Buffer
from asyncflow.net.keys import Keys

Answered: TypeAlias = tuple[memoryview, list[memoryview]]
"""Body and frames of an answer."""
Told: TypeAlias = Callable[[Answered | AsyncFlowError], None]

_UNHEARD_BYTES = 64 << 20
"""Bytes of calls given up while the peer said nothing, which wait in the connection and can only be freed with it."""


class Link:
    """A connection. waiting: who is told of each call; lost: told once, with the reason, when it is of no more use."""

    def __init__(self, address: str, *, keys: Keys | None, max_message: int, lost: Callable[[Link, str], None]) -> None:
        self.address = address
        self.health = Health()
        self.waiting: dict[int, Told] = {}
        self.dropped = 0
        self._lost = lost
        self._unheard = 0
        self._door = doors.call(
            address, keys=keys, most=max_message, health=self.health, deliver=self._answer, lost=self._broke
        )

    def send(self, call: int, parts: Sequence[Buffer]) -> None:
        """Send a message of ``call`` as soon as it can go."""
        self._door.send(call, parts)

    def forget(self, call: int, size: int) -> None:
        """Wait no longer for ``call`` of ``size`` bytes: take it back, or tell the server."""
        if self.waiting.pop(call, None) is None or self._door.withdraw(call):
            return
        self._unheard += size
        if self._unheard > _UNHEARD_BYTES:
            self._lost(self, f"the peer heard nothing of the last {self._unheard} bytes")
        else:
            self._door.send(call, [wire.encode(wire.Cancel(call))])

    def close(self, why: str) -> None:
        """Close the connection; the calls on it raise PeerLost."""
        if self._door.closed:
            return
        self._door.close()
        waiting, self.waiting = self.waiting, {}
        for told in waiting.values():
            told(PeerLost(why, where=self.address, hint="Nobody knows whether the call was done"))

    def _broke(self, why: str) -> None:
        self._lost(self, why)

    def _answer(self, parts: list[zmq.Frame]) -> None:
        self._unheard = 0
        try:
            header = wire.to_client(parts[0].buffer)
        except wire.MALFORMED:
            self.dropped += 1
            return
        told = self.waiting.pop(header.call, None)
        if told is None:
            return
        if isinstance(header, wire.Failure):
            told(_failure(parts[1:], self.address))
        elif len(parts) != 2 + header.frames:
            wrong = f"an answer of {header.frames} frames came in {len(parts)} parts"
            told(ProtocolError(wrong, where=self.address))
        else:
            told((memoryview(parts[1].bytes), wire.views(parts[2:])))


def _failure(body: list[zmq.Frame], address: str) -> AsyncFlowError:
    try:
        return from_wire(wire.error_body(body[0].buffer))
    except (IndexError, *wire.MALFORMED):
        return ProtocolError("an error came that cannot be read", where=address)
