"""One connection of a client to one address, with the calls that wait on it, until it breaks or is closed.

Invariant: the future of each call is done once: with the answer, the server's error, or that the connection is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

from asyncflow.errors import PeerLost
from asyncflow.net.frames import Buffer
from asyncflow.net.rpc import wire
from asyncflow.net.rpc.calling import Calling
from asyncflow.net.tls import Credentials

FRESH_S = 86_400.0
"""Seconds after which calls go over a new connection, so that certificates are shown again before they expire."""

Answered: TypeAlias = tuple[memoryview, list[memoryview]]
"""Body and frames of an answer."""


class Link:
    """A connection. waiting: the future of each call; lost: told once, with the reason, when it is of no more use."""

    def __init__(
        self,
        address: str,
        *,
        credentials: Credentials | None,
        expects: Collection[str],
        max_message: int,
        lost: Callable[[Link, str], None],
    ) -> None:
        self.address = address
        self._retired = False
        self._made = asyncio.get_running_loop().time()
        self.waiting: dict[int, asyncio.Future[Answered]] = {}
        self._stream = Calling(
            address,
            credentials=credentials,
            expects=expects,
            most=max_message,
            deliver=self._answer,
            lost=lambda why: lost(self, str(why)),
        )

    @property
    def state(self) -> str:
        """How the connection is, in words."""
        return self._stream.state

    @property
    def stale(self) -> bool:
        """Whether calls that begin now should go over another connection."""
        return asyncio.get_running_loop().time() - self._made > FRESH_S

    @property
    def closed(self) -> bool:
        """Whether the connection is closed."""
        return self._stream.closed

    def retire(self) -> None:
        """Close the connection as soon as nothing waits on it."""
        self._retired = True
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._retired and not self.waiting:
            self.close("a newer connection is used")

    def send(self, call: int, parts: Sequence[Buffer]) -> None:
        """Send a message of ``call`` as soon as it can go."""
        self._stream.send(call, parts)

    def forget(self, call: int) -> None:
        """Wait no longer for ``call``: take it back, or tell the server."""
        if self.waiting.pop(call, None) is not None and not self._stream.withdraw(call):
            self._stream.send(call, [wire.encode(wire.Cancel(call))])
        self._close_if_done()

    def close(self, why: str) -> None:
        """Close the connection; the calls on it raise PeerLost."""
        if self._stream.closed:
            return
        self._stream.close()
        waiting, self.waiting = self.waiting, {}
        for future in waiting.values():
            if not future.done():
                lost = PeerLost(why, where=self.address, hint="Nobody knows whether the call was done")
                future.set_exception(lost)

    def _answer(self, parts: list[memoryview]) -> None:
        call, error = wire.read_answer(parts, where=self.address)
        future = self.waiting.pop(call, None)
        if future is None or future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result((parts[1], parts[2:]))
