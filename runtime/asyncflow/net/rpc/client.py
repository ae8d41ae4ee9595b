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
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from msgspec import Struct

from asyncflow.errors import DeadlineExceeded, PeerLost, ProtocolError
from asyncflow.net.frames import Buffer
from asyncflow.net.rpc import wire
from asyncflow.net.rpc.link import Answered, Link
from asyncflow.net.tls import Credentials

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Struct)

_RESOLVE_S = 0.1
_SHORTEST_S = 0.001


class RpcClient:
    """Calls one peer.

    name: of the caller or the connection, in errors; resolve: the peer's address, or a function asked before each call
    and while calls wait, that gives None as long as the peer has no address; credentials: of this process, None for
    plain text; expects: the roles that may answer, none for any; max_message: most bytes of one message, frames
    included.
    """

    def __init__(
        self,
        *,
        name: str,
        resolve: str | Callable[[], str | None],
        credentials: Credentials | None = None,
        expects: Collection[str] = (),
        max_message: int = wire.MAX_MESSAGE,
    ) -> None:
        self.name = name
        self._resolve = resolve if callable(resolve) else lambda: resolve
        self._credentials = credentials
        self._expects = expects
        self._max_message = max_message
        self._ids = itertools.count()
        self._link: Link | None = None
        self._retired: list[Link] = []
        self._homeless: set[asyncio.Future[None]] = set()
        self._watch: asyncio.TimerHandle | None = None
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
        call = next(self._ids)
        expiry = loop.call_at(deadline, self._expire, link, future, method, timeout)
        link.waiting[call] = future
        try:
            self._keep_watch()
            left = min(max(deadline - time.monotonic(), _SHORTEST_S), wire.MAX_TIMEOUT)
            link.send(call, [wire.encode(wire.Call(call, method, left, len(frames))), body, *frames])
            answer, out = await future
        finally:
            expiry.cancel()
            link.forget(call)
        try:
            return wire.decoder_of(reply).decode(answer), out
        except wire.MALFORMED as wrong:
            what = f"{method}: the answer is no {reply.__name__}: {wrong}"
            raise ProtocolError(what, where=link.address) from wrong

    async def close(self) -> None:
        """Close the connection; calls in flight raise PeerLost, later ones too."""
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        self._wake_homeless()
        if self._link is not None:
            self._link.close("this client was closed")
            self._link = None
        for link in self._retired:
            link.close("this client was closed")

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
        if self._link is not None and self._link.stale:
            self._link.retire()
            self._retired = [link for link in (*self._retired, self._link) if not link.closed]
            self._link = None
        if self._link is None:
            self._link = Link(
                address,
                credentials=self._credentials,
                expects=self._expects,
                max_message=self._max_message,
                lost=self._on_lost,
            )
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

    def _expire(self, link: Link, future: asyncio.Future[Answered], method: str, timeout: float) -> None:
        if not future.done():
            what = f"{method} was not answered by {link.address} within {timeout:g} s: {link.state}"
            future.set_exception(DeadlineExceeded(what, where=self.name))

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
