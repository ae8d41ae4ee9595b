"""The client side of calls: one connection to one peer carries many concurrent calls, which have call ids.

Invariants: every call ends exactly once, at its deadline at the latest, with the reply, the server's error, or
PeerLost. A message sent before the connection is made waits for it. A broken connection is never used again, and its
pending calls raise ``PeerLost`` immediately, because it is unknown whether they were carried out. When a caller stops
waiting, the server is notified, so that its handler can stop.

A client belongs to the event loop in which it was first used.
"""

from __future__ import annotations

import asyncio
import itertools
import socket as sockets
import ssl
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import TypeAlias, TypeVar, cast

from msgspec import Struct

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, PeerLost, ProtocolError
from asyncflow.identity import ProcessIdentity
from asyncflow.rpc import framing, shm
from asyncflow.rpc.addresses import host_and_port, places_of, server_of
from asyncflow.rpc.columns import Buffer
from asyncflow.rpc.connection import GREETING_S, Connection, tune
from asyncflow.rpc.retry import delays
from asyncflow.rpc.shm import Arenas
from asyncflow.rpc.tls import Credentials, PeerRefused, refusal

_CONNECT_S = 3.0
"""Limit of a connection attempt. A Service may still route to a deleted pod, and the kernel would try for minutes."""
_SILENT = "it is connected and silent: stopped, overloaded, or waiting for another process"
_NO_HANDSHAKE = "the handshake failed: do both sides have certificates of this job?"

Answered: TypeAlias = tuple[memoryview, list[memoryview]]
"""Body and frames of a reply."""


class _Outgoing(Connection):
    """A connection of ``link``, which may still fail before the peer's greeting arrives."""

    def __init__(self, link: Link, arenas: Arenas | None) -> None:
        super().__init__(most=link.max_message, arenas=arenas)
        self._link = link

    def greet(self, parts: list[memoryview]) -> None:
        framing.check_welcome(parts, dialled=server_of(self._link.address))

    def received(self, messages: list[list[memoryview]]) -> None:
        for parts in messages:
            self._link.answer(parts)

    def lost(self, why: AsyncFlowError) -> None:
        self._link.lost(self._link, str(why))


class Link:
    """The calls over one connection to ``address``. Connecting is retried until it succeeds; messages wait until then.

    credentials: of this process, None for plain text; expects: the roles that may answer, empty for any; max_message:
    maximum bytes of one message; lost: called once, with the reason, when the connection broke. waiting: the future of
    each pending call; state: the state of the connection, in words.
    """

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
        self.max_message = max_message
        self.lost = lost
        self.closed = False
        self.state = "the connection was not made"
        self.waiting: dict[int, asyncio.Future[Answered]] = {}
        self._credentials = credentials
        self._expects = expects
        self._unsent: dict[Hashable, Sequence[Buffer]] = {}
        self._connection: _Outgoing | None = None
        self._tries_shared_memory = True
        self._loop = asyncio.get_running_loop()
        self._connecting = self._loop.create_task(self._connect(), name=f"connect to {address}")

    def send(self, call: int, parts: Sequence[Buffer]) -> None:
        """Send a message of ``call`` as soon as the connection allows it."""
        if self._connection is None:
            self._unsent[call] = parts
        else:
            self._connection.send(call, parts)

    def forget(self, call: int) -> None:
        """Stop waiting for ``call``: withdraw it if none of it has been sent, otherwise send a cancellation."""
        if self.waiting.pop(call, None) is not None and self._unsent.pop(call, None) is None:
            connection = self._connection
            if connection is not None and not connection.outbox.withdraw(call):
                connection.send(call, [framing.encode(framing.Cancel(call))])

    def close(self, why: str) -> None:
        """Close the connection; its pending calls raise PeerLost."""
        if self.closed:
            return
        self.closed = True
        self._connecting.cancel()
        self._unsent.clear()
        if self._connection is not None:
            self._connection.close()
        waiting, self.waiting = self.waiting, {}
        for future in waiting.values():
            if not future.done():
                lost = PeerLost(why, where=self.address, hint="It is unknown whether the call was carried out")
                future.set_exception(lost)

    def answer(self, parts: list[memoryview]) -> None:
        """Complete the call that a message answers."""
        call, error = framing.read_answer(parts, where=self.address)
        future = self.waiting.pop(call, None)
        if future is None or future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result((parts[1], parts[2:]))

    async def _connect(self) -> None:
        """Try to connect until it succeeds."""
        for delay in delays():
            try:
                shared = shm.dialled(self.address) if self._tries_shared_memory else None
                self._tries_shared_memory = shared is None
                socket, arenas = shared or (await self._open_socket(), None)
                await self._greet(socket, arenas)
                return
            except (OSError, AsyncFlowError) as error:
                self.state = _describe(error)
            await asyncio.sleep(delay)

    async def _open_socket(self) -> sockets.socket:
        """Connect to the first reachable address of the peer's name."""
        host, port = host_and_port(self.address)
        refused: OSError | None = None
        for family, place in await places_of(host, port, within_s=_CONNECT_S):
            socket = sockets.socket(family)
            socket.setblocking(False)
            try:
                async with asyncio.timeout(_CONNECT_S):
                    await self._loop.sock_connect(socket, place)
                return socket
            except BaseException as error:
                socket.close()
                if not isinstance(error, OSError):
                    raise
                refused = refused or error
        raise refused or OSError(f"the name {host!r} has no address")

    async def _greet(self, socket: sockets.socket, arenas: Arenas | None) -> None:
        """Do the TLS handshake, exchange greetings, then send the waiting messages."""
        tune(socket)
        connection = _Outgoing(self, arenas)
        over_tls = self._credentials is not None and arenas is None
        context = self._credentials.client() if self._credentials is not None and over_tls else None
        try:
            async with asyncio.timeout(GREETING_S):
                await self._loop.create_connection(
                    lambda: connection, sock=socket, ssl=context, server_hostname="" if over_tls else None
                )
                if self._credentials is not None and connection.tls is not None:
                    self._check(self._credentials.peer(connection.tls))
                process = self._credentials.process if self._credentials is not None else None
                connection.send_greeting(framing.hello(process))
                await connection.greeted
        except BaseException as error:
            connection.close()
            socket.close()
            if isinstance(error, ssl.SSLCertVerificationError):
                raise refusal(error) from error
            if isinstance(error, OSError | PeerLost) and not isinstance(error, TimeoutError):
                raise ProtocolError(_NO_HANDSHAKE) from error
            raise
        self.state = _SILENT
        self._connection = connection
        for key, parts in self._unsent.items():
            connection.send(key, parts)
        self._unsent.clear()

    def _check(self, answering: ProcessIdentity) -> None:
        """Raise PeerRefused if the process at this address has an unexpected role."""
        if self._expects and answering.role not in self._expects:
            roles = " or ".join(self._expects)
            raise PeerRefused(f"{answering} answers where a {roles} is expected", reason="no_identity")


def _describe(error: OSError | AsyncFlowError) -> str:
    """Return the reason why a connection attempt failed."""
    if isinstance(error, ConnectionRefusedError):
        return "no process listens there"
    return "no answer from that address" if isinstance(error, TimeoutError) else str(error)


R = TypeVar("R")

_RESOLVE_S = 0.1
_SHORTEST_S = 0.001


class RpcClient:
    """A client that calls one peer.

    name: of the caller or the connection, in errors; resolve: the peer's address, or a function that returns it or None
    (called before each call and while calls wait); credentials: of this process, None for plain text; expects: the
    roles that may answer, empty for any; max_message: maximum bytes of a message with its frames.
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
        if isinstance(resolve, str):
            host_and_port(resolve)  # raises ManifestError if it is not an address
        self._resolve = resolve if callable(resolve) else lambda: resolve
        self._credentials = credentials
        self._expects = expects
        self._max_message = max_message
        self._ids = itertools.count()
        self._link: Link | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._closed = False

    async def call(
        self, method: str, request: Struct, reply: type[R], *, timeout: float, frames: Sequence[Buffer] = ()
    ) -> R:
        """Call ``method`` and return the reply. ``call_frames`` lists the errors."""
        answer, _ = await self.call_frames(method, request, reply, timeout=timeout, frames=frames)
        return answer

    async def call_frames(
        self, method: str, request: Struct, reply: type[R], *, timeout: float, frames: Sequence[Buffer] = ()
    ) -> tuple[R, list[memoryview]]:
        """Call ``method`` with ``request`` and ``frames``; return the reply and its frames, which are writable.

        timeout: seconds for the whole call, including finding and connecting to the peer. Frames of at least 64 KiB
        are sent without a copy: they must never change afterwards, not even after a timeout. Raises DeadlineExceeded if
        no reply came in time, PeerLost if the connection broke during the call, ProtocolError if the reply cannot be
        read or the call is too large, and the AsyncFlowError of the handler (RemoteError for its other exceptions).
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        body = framing.encode_request(method, request)
        framing.check_size("the call of", method, body, frames, limit=self._max_message)
        link = self._current() or await self._wait_for_link(method, timeout, deadline)
        future: asyncio.Future[Answered] = loop.create_future()
        call = next(self._ids)
        expiry = loop.call_at(deadline, self._expire, link, future, method, timeout)
        link.waiting[call] = future
        try:
            self._watch_address()
            left = min(max(deadline - time.monotonic(), _SHORTEST_S), framing.MAX_TIMEOUT)
            link.send(call, [framing.encode(framing.Call(call, method, left, len(frames))), body, *frames])
            answer, out = await future
        finally:
            expiry.cancel()
            link.forget(call)
        try:
            return framing.decoder_of(cast("Hashable", reply)).decode(answer), out
        except framing.MALFORMED as wrong:
            raise ProtocolError(f"{method}: the answer is no {reply.__name__}: {wrong}", where=link.address) from wrong

    async def close(self) -> None:
        """Close the connection. Pending calls and calls made afterwards raise PeerLost."""
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        if self._link is not None:
            self._link.close("this client was closed")
            self._link = None
        await asyncio.sleep(0)  # lets the event loop close the sockets

    def _current(self) -> Link | None:
        """Return the connection to the peer's current address; None while the peer has no address."""
        if self._closed:
            raise PeerLost("this client was closed", where=self.name)
        address = self._resolve()
        if address is None:
            return None
        if self._link is not None and self._link.address != address:
            self._link.close(f"the peer moved to {address}")
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

    async def _wait_for_link(self, method: str, timeout: float, deadline: float) -> Link:
        """Wait until the peer has an address, and return the connection to it."""
        while (link := self._current()) is None:
            if (left := deadline - time.monotonic()) <= 0:
                raise DeadlineExceeded(
                    f"{method} was not sent within {timeout:g} s: the peer has no address yet",
                    where=self.name,
                    hint="Check whether that role runs and has registered",
                )
            await asyncio.sleep(min(left, _RESOLVE_S))
        return link

    def _expire(self, link: Link, future: asyncio.Future[Answered], method: str, timeout: float) -> None:
        if not future.done():
            what = f"{method} was not answered by {link.address} within {timeout:g} s: {link.state}"
            future.set_exception(DeadlineExceeded(what, where=self.name))

    def _on_lost(self, link: Link, why: str) -> None:
        if self._link is link:
            self._link = None
        link.close(why)

    def _watch_address(self) -> None:
        """Query the resolver regularly while calls wait, because the peer may have moved."""
        if self._watch is None and not self._closed:
            self._watch = asyncio.get_running_loop().call_later(_RESOLVE_S, self._check_address)

    def _check_address(self) -> None:
        self._watch = None
        if self._link is not None and self._link.waiting:
            self._current()
            self._watch_address()
