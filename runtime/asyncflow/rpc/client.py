"""The calling side: one stream to one peer, many calls at once, told apart by a call id.

Invariants: every call ends at its deadline at the latest, once: with the answer, the server's error, or that the
connection is gone; what is sent before the stream is there waits; a connection that broke is never used again, and the
calls that were on it raise ``PeerLost`` at once, because nobody can know whether they were carried out; a caller that
waits no longer says so to the server, so that no handler works for nobody.

A client belongs to the event loop in which it was first used.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket as sockets
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import TypeAlias, TypeVar, cast

from msgspec import Struct

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, PeerLost, ProtocolError
from asyncflow.identity import ProcessIdentity
from asyncflow.rpc import framing, shm
from asyncflow.rpc.addresses import host_and_port, look_up, server_of
from asyncflow.rpc.columns import Buffer
from asyncflow.rpc.connection import SILENT, UNSHAKEN, Deliver, Flow, in_words, staging, tune
from asyncflow.rpc.framing import Inbox, Outbox
from asyncflow.rpc.retry import delays
from asyncflow.rpc.tls import NO_IDENTITY, Credentials, Stranger, TlsSocket

_CONNECT_S = 3.0
"""A Service may still lead to a pod that is gone: nobody answers there, and the kernel would ask for two minutes."""
_SHAKE_S = 10.0


class Calling:
    """A stream to ``address``, tried again until it is there. What is sent before waits.

    credentials: of this process, None for plain text; expects: the roles that may answer, none for any; most: bytes of
    one message; lost: told why, once, when it was there and is
    gone. state: how the connection is, in words.
    """

    def __init__(
        self,
        address: str,
        *,
        credentials: Credentials | None,
        expects: Collection[str],
        most: int,
        deliver: Deliver,
        lost: Callable[[AsyncFlowError], None],
    ) -> None:
        self.closed = False
        self.state = "the connection was not made"
        self._address = address
        self._near = True
        self._to = host_and_port(address)
        self._credentials = credentials
        self._expects = expects
        self._most = most
        self._deliver = deliver
        self._lost = lost
        self._flow: Flow | None = None
        self._waiting: dict[Hashable, Sequence[Buffer]] = {}
        self._loop = asyncio.get_running_loop()
        self._connecting = self._loop.create_task(self._connect(), name=f"connect to {address}")

    def send(self, key: Hashable, parts: Sequence[Buffer]) -> None:
        """Send ``parts`` now, or as soon as the stream takes them; ``key`` names the message for ``withdraw``."""
        if self._flow is None or self._flow.outbox is None:
            self._waiting[key] = parts
        else:
            self._flow.send(key, parts)

    def withdraw(self, key: Hashable) -> bool:
        """Take back the message ``key`` if nothing of it has left yet, and say whether that was so."""
        outbox = self._flow.outbox if self._flow is not None else None
        return self._waiting.pop(key, None) is not None or (outbox is not None and outbox.withdraw(key))

    def close(self) -> None:
        """Close the stream at once; what was not sent is dropped."""
        self.closed = True
        self._connecting.cancel()
        self._waiting.clear()
        if self._flow is not None:
            self._flow.close()

    async def _connect(self) -> None:
        """Try until the stream is there."""
        for delay in delays():
            try:
                self.state = await self._opened(await self._dialled())
                if self.state == SILENT:
                    return
            except OSError as error:
                self.state = in_words(error)
            await asyncio.sleep(delay)

    async def _dialled(self) -> sockets.socket:
        """Connect to the peer on this host, or to the first place of its name that answers."""
        nearby = shm.dialled(self._address) if self._near else None
        self._near = nearby is None
        if nearby is not None:
            return nearby
        host, port = self._to
        try:
            async with asyncio.timeout(_CONNECT_S):
                places = await asyncio.wrap_future(look_up(host, port))
        except TimeoutError:
            raise OSError(f"the name {host!r} is still looked up") from None
        refused: OSError | None = None
        for family, place in places:
            socket = sockets.socket(family)
            socket.setblocking(False)
            try:
                async with asyncio.timeout(_CONNECT_S):
                    await self._loop.sock_connect(socket, place)
            except OSError as error:
                socket.close()
                refused = refused or error
            except BaseException:
                socket.close()
                raise
            else:
                return socket
        raise refused or OSError(f"the name {host!r} has no address")

    async def _opened(self, socket: sockets.socket) -> str:
        """Say who calls and hear which server answers; return how the connection is then: ``SILENT`` where it is."""
        greeted: asyncio.Future[str] = self._loop.create_future()
        tune(socket)
        stream: sockets.socket | TlsSocket = socket
        if self._credentials is not None and socket.family != sockets.AF_UNIX:
            stream = self._credentials.dialled(socket)

        def begin() -> bytes:
            if self._credentials is None:
                return framing.hello(None)
            if isinstance(stream, TlsSocket):
                self._check(self._credentials.peer(stream))
            return framing.hello(self._credentials.process)

        def shake(welcome: bytes) -> tuple[Inbox, Outbox]:
            framing.check_welcome(welcome, dialled=server_of(self._address))
            inbox, outbox = shm.boxes(stream, most=self._most, staging=staging())
            for key, parts in self._waiting.items():
                outbox.push(key, parts)
            self._waiting.clear()
            greeted.set_result(SILENT)
            return inbox, outbox

        def lost(why: AsyncFlowError) -> None:
            if greeted.done():
                self._lost(why)
            else:
                greeted.set_result(str(why) if isinstance(why, ProtocolError) else UNSHAKEN)

        flow = self._flow = Flow(
            stream, size=framing.WELCOME_SIZE, begin=begin, shake=shake, deliver=self._deliver, lost=lost
        )
        try:
            async with asyncio.timeout(_SHAKE_S):
                state = await greeted
        finally:
            if flow.outbox is None:
                flow.close()
        flow.flush()
        return state

    def _check(self, answering: ProcessIdentity) -> None:
        """Raise Stranger where who answers is of another role than is expected at this address."""
        if self._expects and answering.role not in self._expects:
            roles = " or ".join(self._expects)
            raise Stranger(f"{answering} answers where a {roles} is expected", reason=NO_IDENTITY)


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
        """The state of the connection, in words."""
        return self._stream.state

    @property
    def stale(self) -> bool:
        """True when calls that begin now should go over another connection."""
        return asyncio.get_running_loop().time() - self._made > FRESH_S

    @property
    def closed(self) -> bool:
        """True when the connection is closed."""
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
            self._stream.send(call, [framing.encode(framing.Cancel(call))])
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
        call, error = framing.read_answer(parts, where=self.address)
        future = self.waiting.pop(call, None)
        if future is None or future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result((parts[1], parts[2:]))


log = logging.getLogger(__name__)

R = TypeVar("R")

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
        max_message: int = framing.MAX_MESSAGE,
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
        body = framing.encode_request(method, request)
        framing.check_size("the call of", method, body, frames, limit=self._max_message)
        link = self._current() or await self._found(method, timeout, deadline)
        future: asyncio.Future[Answered] = loop.create_future()
        call = next(self._ids)
        expiry = loop.call_at(deadline, self._expire, link, future, method, timeout)
        link.waiting[call] = future
        try:
            self._keep_watch()
            left = min(max(deadline - time.monotonic(), _SHORTEST_S), framing.MAX_TIMEOUT)
            link.send(call, [framing.encode(framing.Call(call, method, left, len(frames))), body, *frames])
            answer, out = await future
        finally:
            expiry.cancel()
            link.forget(call)
        try:
            return framing.decoder_of(cast("Hashable", reply)).decode(answer), out
        except framing.MALFORMED as wrong:
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
