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
"""A Service may still lead to a pod that is gone: nobody answers there, and the kernel would ask for two minutes."""
_SILENT = "it is connected and silent: stopped, overloaded, or it waits for something itself"
_NO_HANDSHAKE = "the handshake failed: do both sides have certificates of this job?"

Answered: TypeAlias = tuple[memoryview, list[memoryview]]
"""Body and frames of an answer."""


class _Dialled(Connection):
    """A connection of ``link``, which may still fail before the peer has greeted."""

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
    """The calls over one connection to ``address``, which is tried again until it is there. What is sent before waits.

    credentials: of this process, None for plain text; expects: the roles that may answer, none for any; max_message:
    most bytes of one message; lost: learns once, with the reason, that it is of no more use. waiting: the future of
    each call; state: how the connection is, in words.
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
        self._connection: _Dialled | None = None
        self._tries_shared_memory = True
        self._loop = asyncio.get_running_loop()
        self._connecting = self._loop.create_task(self._connect(), name=f"connect to {address}")

    def send(self, call: int, parts: Sequence[Buffer]) -> None:
        """Send a message of ``call`` as soon as it can go."""
        if self._connection is None:
            self._unsent[call] = parts
        else:
            self._connection.send(call, parts)

    def forget(self, call: int) -> None:
        """Wait no longer for ``call``: take it back if nothing of it has left yet, or tell the server."""
        if self.waiting.pop(call, None) is not None and self._unsent.pop(call, None) is None:
            connection = self._connection
            if connection is not None and not connection.outbox.withdraw(call):
                connection.send(call, [framing.encode(framing.Cancel(call))])

    def close(self, why: str) -> None:
        """Close the connection; the calls on it raise PeerLost."""
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
                lost = PeerLost(why, where=self.address, hint="Nobody knows whether the call was done")
                future.set_exception(lost)

    def answer(self, parts: list[memoryview]) -> None:
        """Take in the answer of a call."""
        call, error = framing.read_answer(parts, where=self.address)
        future = self.waiting.pop(call, None)
        if future is None or future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result((parts[1], parts[2:]))

    async def _connect(self) -> None:
        """Try until the connection is there."""
        for delay in delays():
            try:
                shared = shm.dialled(self.address) if self._tries_shared_memory else None
                self._tries_shared_memory = shared is None
                socket, arenas = shared or (await self._dialled(), None)
                await self._greet(socket, arenas)
                return
            except (OSError, AsyncFlowError) as error:
                self.state = _in_words(error)
            await asyncio.sleep(delay)

    async def _dialled(self) -> sockets.socket:
        """Connect to the first place of the peer's name that answers."""
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
        """Shake hands, and say who calls; what waited goes when the peer has greeted."""
        tune(socket)
        connection = _Dialled(self, arenas)
        over_tls = self._credentials is not None and arenas is None
        context = self._credentials.client() if self._credentials is not None and over_tls else None
        try:
            async with asyncio.timeout(GREETING_S):
                await self._loop.create_connection(
                    lambda: connection, sock=socket, ssl=context, server_hostname="" if over_tls else None
                )
                if self._credentials is not None and connection.tls is not None:
                    self._check(self._credentials.peer(connection.tls))
                connection.say(framing.hello(self._credentials.process if self._credentials is not None else None))
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
        """Raise PeerRefused where who answers is of another role than is expected at this address."""
        if self._expects and answering.role not in self._expects:
            roles = " or ".join(self._expects)
            raise PeerRefused(f"{answering} answers where a {roles} is expected", reason="no_identity")


def _in_words(error: OSError | AsyncFlowError) -> str:
    """Return why a connection was not made."""
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there"
    return "nobody answers there" if isinstance(error, TimeoutError) else str(error)


R = TypeVar("R")

_RESOLVE_S = 0.1
_SHORTEST_S = 0.001


class RpcClient:
    """Calls one peer.

    name: of the caller or the connection, in errors; resolve: the peer's address, or a function asked before each call
    and while calls wait, that gives None as long as the peer has no address; credentials: of this process, None for
    plain text; expects: the roles that may answer, none for any; max_message: most bytes of a message with its frames.
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
            host_and_port(resolve)  # a ManifestError where it is none
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
        if self._link is not None:
            self._link.close("this client was closed")
            self._link = None
        await asyncio.sleep(0)  # in which the event loop closes the sockets

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
            self._link = Link(
                address,
                credentials=self._credentials,
                expects=self._expects,
                max_message=self._max_message,
                lost=self._on_lost,
            )
        return self._link

    async def _found(self, method: str, timeout: float, deadline: float) -> Link:
        """Wait until the peer has an address, and return the connection to it."""
        while (link := self._current()) is None:
            if (left := deadline - time.monotonic()) <= 0:
                raise DeadlineExceeded(
                    f"{method} was not begun within {timeout:g} s: the peer has no address yet",
                    where=self.name,
                    hint="See whether that role runs and has registered",
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

    def _keep_watch(self) -> None:
        """See to it that the resolver is asked again while calls wait: the peer may have moved."""
        if self._watch is None and not self._closed:
            self._watch = asyncio.get_running_loop().call_later(_RESOLVE_S, self._ask_again)

    def _ask_again(self) -> None:
        self._watch = None
        if self._link is not None and self._link.waiting:
            self._current()
            self._keep_watch()
