"""The calling side: one stream to one peer, many calls at once, told apart by a call id.

Invariants: every call ends at its deadline at the latest; a connection that broke is never used again, and the calls
that were on it raise ``PeerLost`` at once, because nobody can know whether they were carried out; a caller that waits
no longer says so to the server, so that no handler works for nobody.

A client belongs to the event loop in which it was first used.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from msgspec import Struct

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, PeerLost, ProtocolError
from asyncflow.net.deadlines import Deadlines
from asyncflow.net.frames import Buffer
from asyncflow.net.keys import Keys
from asyncflow.net.rpc import wire
from asyncflow.net.rpc.link import Answered, Link, Told

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Struct)

_RESOLVE_S = 0.1
_SHORTEST_S = 0.001


def _read(reply: type[R], answer: memoryview, method: str, address: str) -> R | ProtocolError:
    try:
        read: R = wire.decoder_of(reply).decode(answer)
    except wire.MALFORMED as wrong:
        return ProtocolError(f"{method}: the answer is no {reply.__name__}: {wrong}", where=address)
    return read


class RpcClient:
    """Calls one peer.

    name: of the caller or the connection, in errors; resolve: the peer's address, or a function asked before each call
    and while calls wait, that gives None as long as the peer has no address; keys: the job's key, None for plain text;
    max_message: most bytes of one message, frames included.
    """

    def __init__(
        self,
        *,
        name: str,
        resolve: str | Callable[[], str | None],
        keys: Keys | None = None,
        max_message: int = wire.MAX_MESSAGE,
    ) -> None:
        self.name = name
        self._resolve = resolve if callable(resolve) else lambda: resolve
        self._keys = keys
        self._max_message = max_message
        self._ids = itertools.count()
        self._link: Link | None = None
        self._homeless: set[asyncio.Future[None]] = set()
        self._watch: asyncio.TimerHandle | None = None
        self._deadlines = Deadlines()
        self._closed = False

    async def call(
        self, method: str, request: Struct, reply: type[R], *, timeout: float, frames: Sequence[Buffer] = ()
    ) -> R:
        """Call ``method`` and give its reply; ``call_frames`` says the errors."""
        answer, _ = await self.call_frames(method, request, reply, timeout=timeout, frames=frames)
        return answer

    async def call_frames(
        self, method: str, request: Struct, reply: type[R], *, timeout: float, frames: Sequence[Buffer] = ()
    ) -> tuple[R, list[memoryview]]:
        """Call ``method`` with ``request`` and ``frames``; give the reply and its frames, which are writable.

        timeout: seconds that all of it may take, finding and reaching the peer included. Frames of 64 KiB and more are
        sent from where they lie: they must not change any more, even when the call was given up.
        Raises DeadlineExceeded when no answer came in time, PeerLost when the connection broke under the call,
        ProtocolError when an answer cannot be read or the call is too large, and whatever AsyncFlowError the handler
        raised (RemoteError for any other exception of it).
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        body = wire.encode_request(method, request)
        wire.check_size("the call of", method, body, frames, limit=self._max_message)
        link = self._current() or await self._found(method, timeout, deadline)
        future: asyncio.Future[Answered] = loop.create_future()

        def told(answer: Answered | AsyncFlowError) -> None:
            if future.done():
                return
            if isinstance(answer, AsyncFlowError):
                future.set_exception(answer)
            else:
                future.set_result(answer)

        call = next(self._ids)
        expiry = self._deadlines.add(deadline, partial(self._expire, link, call, method, timeout))
        try:
            self._send(link, call, method, [body, *frames], deadline, told)
            answer, out = await future
        finally:
            self._deadlines.drop(expiry)
            link.forget(call)
        found = _read(reply, answer, method, link.address)
        if isinstance(found, ProtocolError):
            raise found
        return found, out

    def ask(
        self,
        method: str,
        request: Struct,
        reply: type[R],
        *,
        timeout: float,
        done: Callable[[R | AsyncFlowError], None],
    ) -> None:
        """Call ``method`` and have ``done`` called with the reply, or with the error that ``call`` would raise.

        It is called where the answer is read, and must not raise. A peer that has no address now is lost.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        body = wire.encode_request(method, request)
        wire.check_size("the call of", method, body, (), limit=self._max_message)
        link = self._current()
        if link is None:
            done(PeerLost(f"{method}: the peer has no address", where=self.name))
            return
        call = next(self._ids)
        expiry = self._deadlines.add(deadline, partial(self._expire, link, call, method, timeout))

        def told(answer: Answered | AsyncFlowError) -> None:
            self._deadlines.drop(expiry)
            done(answer if isinstance(answer, AsyncFlowError) else _read(reply, answer[0], method, link.address))

        self._send(link, call, method, [body], deadline, told)

    def _send(self, link: Link, call: int, method: str, parts: list[Buffer], deadline: float, told: Told) -> None:
        link.waiting[call] = told
        self._keep_watch()
        left = min(max(deadline - time.monotonic(), _SHORTEST_S), wire.MAX_TIMEOUT)
        link.send(call, [wire.encode(wire.Call(call, method, left, len(parts) - 1)), *parts])

    async def close(self) -> None:
        """Close the connection; calls in flight raise PeerLost, later ones too."""
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        self._deadlines.close()
        self._wake_homeless()
        if self._link is not None:
            self._link.close("this client was closed")
            self._link = None

    def _current(self) -> Link | None:
        """Return the connection to the address that holds now; None while the peer has no address."""
        if self._closed:
            raise PeerLost("this client was closed", where=self.name)
        address = self._resolve()
        if address is None:
            return None
        if self._link is not None and self._link.address != address:
            self._link.close(f"the peer moved to {address}")
            self._link = None
        if self._link is None:
            self._link = Link(address, keys=self._keys, max_message=self._max_message, lost=self._on_lost)
        return self._link

    async def _found(self, method: str, timeout: float, deadline: float) -> Link:
        """Wait until the peer has an address, and give the connection to it."""
        loop = asyncio.get_running_loop()
        while (link := self._current()) is None:
            moved: asyncio.Future[None] = loop.create_future()
            self._homeless.add(moved)
            self._keep_watch()
            try:
                async with asyncio.timeout_at(deadline):
                    await moved
            except TimeoutError:
                raise DeadlineExceeded(
                    f"{method} was not begun within {timeout:g} s: the peer has no address yet",
                    where=self.name,
                    hint="See whether that role runs and has registered",
                ) from None
            finally:
                self._homeless.discard(moved)
        return link

    def _expire(self, link: Link, call: int, method: str, timeout: float) -> None:
        told = link.waiting.get(call)
        if told is not None:
            link.forget(call)
            what = f"{method} was not answered by {link.address} within {timeout:g} s: {link.state}"
            told(DeadlineExceeded(what, where=self.name))

    def _on_lost(self, link: Link, why: str) -> None:
        if self._link is link:
            self._link = None
        link.close(why)

    def _keep_watch(self) -> None:
        """See to it that the resolver is asked again while anybody waits."""
        if self._watch is None and not self._closed:
            self._watch = asyncio.get_running_loop().call_later(_RESOLVE_S, self._ask_again)

    def _ask_again(self) -> None:
        self._watch = None
        if self._homeless or (self._link is not None and self._link.waiting):
            if self._current() is not None:
                self._wake_homeless()
            self._keep_watch()

    def _wake_homeless(self) -> None:
        for waiting in self._homeless:
            if not waiting.done():
                waiting.set_result(None)
