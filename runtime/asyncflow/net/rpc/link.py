"""One connection of a client to one address, with the calls that wait on it, until it breaks or is closed.

Invariant: each call is told once what became of it: its answer, the server's error, or that the connection is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from asyncflow.errors import AsyncFlowError, PeerLost
from asyncflow.net.frames import Buffer
from asyncflow.net.keys import Keys
from asyncflow.net.rpc import wire
from asyncflow.net.rpc.calling import Calling

Answered: TypeAlias = tuple[memoryview, list[memoryview]]
"""Body and frames of an answer."""
Told: TypeAlias = Callable[[Answered | AsyncFlowError], None]


class Link:
    """A connection. waiting: who is told of each call; lost: told once, with the reason, when it is of no more use."""

    def __init__(self, address: str, *, keys: Keys | None, max_message: int, lost: Callable[[Link, str], None]) -> None:
        self.address = address
        self.waiting: dict[int, Told] = {}
        self._stream = Calling(
            address, keys=keys, most=max_message, deliver=self._answer, lost=lambda why: lost(self, str(why))
        )

    @property
    def state(self) -> str:
        """How the connection is, in words."""
        return self._stream.state

    def send(self, call: int, parts: Sequence[Buffer]) -> None:
        """Send a message of ``call`` as soon as it can go."""
        self._stream.send(call, parts)

    def forget(self, call: int) -> None:
        """Wait no longer for ``call``: take it back, or tell the server."""
        if self.waiting.pop(call, None) is not None and not self._stream.withdraw(call):
            self._stream.send(call, [wire.encode(wire.Cancel(call))])

    def close(self, why: str) -> None:
        """Close the connection; the calls on it raise PeerLost."""
        if self._stream.closed:
            return
        self._stream.close()
        waiting, self.waiting = self.waiting, {}
        for told in waiting.values():
            told(PeerLost(why, where=self.address, hint="Nobody knows whether the call was done"))

    def _answer(self, parts: list[memoryview]) -> None:
        call, error = wire.read_answer(parts, where=self.address)
        told = self.waiting.pop(call, None)
        if told is not None:
            told(error if error is not None else (parts[1], parts[2:]))
