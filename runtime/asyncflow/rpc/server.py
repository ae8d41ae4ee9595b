"""The server side of calls: one listening socket, one more for callers of this host, and a task for each call.

Invariants: a parked handler delays no other caller. No handler runs longer than its caller waits (the deadline travels
with the call) or than the connection lasts. No received bytes stop the service, and dropped messages are counted. No
TLS connection outlives the certificate with which it started. A peer that does not identify itself in time, sends a
malformed message, or leaves too many replies unread is cut off. No more calls are read from a peer with too many unread
bytes until it has read them. Other peers do not notice. If there are too many peers, or no descriptor is left, peers
that have not identified themselves are closed first, oldest first, then the peer that has been idle for longest.
"""

from __future__ import annotations

import asyncio
import logging
import socket as sockets
import ssl
from asyncio.sslproto import SSLProtocol
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
from msgspec import Struct

from asyncflow.errors import AsyncFlowError, ProtocolError, Refused, RemoteError
from asyncflow.identity import ProcessIdentity
from asyncflow.rpc import framing, shm, tls
from asyncflow.rpc.access import Access
from asyncflow.rpc.addresses import listen
from asyncflow.rpc.columns import Buffer
from asyncflow.rpc.connection import Connection, first_bytes, tune
from asyncflow.rpc.listener import Listener
from asyncflow.rpc.shm import Arenas
from asyncflow.rpc.tls import Credentials, PeerRefused, check_exposure

MAX_PEERS = 8192
"""Connections of one server, and at most three quarters of the process's file descriptors."""
_MAX_UNREAD = 4096
"""Replies that may wait for a peer that does not read."""
_MOST_UNSENT = 64 << 20
"""Unread reply bytes above which no call of a peer starts until it has read them; one reply may have more."""
_MOST_AT_ONCE = 2
"""Calls of a peer that start in one iteration of the loop: a reply counts as unsent only once it exists."""
_MOST_RUNNING = 2
"""Number of running calls of a peer at which no more start until it has read its replies."""
_IDLE_S = 60.0
"""Seconds without a message after which a peer may be closed for another one; it reconnects at its next call."""
_TLS_BUFFER = 48 << 10
"""Bytes that asyncio buffers per TLS connection: three records instead of 256 KiB. uvloop sizes its own buffers."""


class Caller(Connection):
    """A connection from a caller of ``server``.

    caller: its identity, None while unknown or without certificates; heard: time of its last message; running: its
    running calls.
    """

    def __init__(self, server: RpcServer, *, most: int, arenas: Arenas | None) -> None:
        super().__init__(most=most, arenas=arenas)
        self.caller: ProcessIdentity | None = None
        self.running: dict[int, asyncio.Future[Reply]] = {}
        self._server = server
        self._waiting: deque[list[memoryview]] = deque()
        self._start_scheduled = False
        self._expiry: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self.heard = self._loop.time()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Record the identity in the caller's certificate."""
        super().connection_made(transport)
        if self.tls is not None:
            try:
                self.caller = self._server.identity_of(self.tls)
            except PeerRefused as refused:
                self.fail(refused)

    def greet(self, parts: list[memoryview]) -> None:
        """Admit the caller under the identity in its greeting."""
        self.send_greeting(self._server.let_in(self, framing.caller(parts)))

    def expire_in(self, seconds: float, why: PeerRefused) -> None:
        """Close the connection in ``seconds`` with the error ``why``."""
        self._expiry = self._loop.call_later(seconds, self.fail, why)

    def received(self, messages: list[list[memoryview]]) -> None:
        """Start a few calls at the same time, as long as the caller reads its replies; the other calls wait."""
        self.heard = self._loop.time()
        self._waiting.extend(messages)
        if not self._start_scheduled:
            self._start_some()

    def send_answer(self, call: int, parts: Sequence[Buffer]) -> None:
        """Send a reply; a caller with too many unread replies is cut off."""
        if len(self.outbox) >= _MAX_UNREAD:
            self.fail(ProtocolError("a peer does not read its replies"))
        self.send(call, parts)

    def resume(self) -> None:
        """Continue with the waiting calls, which wait for the caller to read or for one of its calls to end."""
        if self._waiting and not self._start_scheduled and self._may_start and not self.closed:
            self._start_scheduled = True  # not started here: a handler that sends must end before the next one starts
            self._loop.call_soon(self._start_some)

    def resume_writing(self) -> None:
        """Resume sending."""
        super().resume_writing()
        self.resume()

    def lost(self, why: AsyncFlowError) -> None:
        """Remove this caller from the server, and cancel its handlers."""
        self._server.forget(self, why)
        for work in self.running.values():
            work.cancel()

    def close(self) -> None:
        """Close the connection immediately."""
        super().close()
        self._waiting.clear()
        if self._expiry is not None:
            self._expiry.cancel()

    @property
    def _may_start(self) -> bool:
        return self.idle or (len(self.running) < _MOST_RUNNING and self.outbox.unsent <= _MOST_UNSENT)

    def _start_some(self) -> None:
        self._start_scheduled = False
        for _ in range(_MOST_AT_ONCE):
            if self._waiting and self._may_start:
                self._server.deliver(self, self._waiting.popleft())
        if self.closed:
            return
        if self._waiting:
            self._transport.pause_reading()
            self.resume()
        elif not self._transport.is_reading():
            self._transport.resume_reading()


log = logging.getLogger(__name__)

Reply: TypeAlias = Any
"""Any object that msgspec encodes, or a tuple of such an object and frames."""
Handler: TypeAlias = Callable[[Any, Sequence[memoryview]], Reply]
"""Function of the request and its frames (writable views, owned by it); returns the reply, its coroutine or future.

It is called when the request is read, so calls of one client start in the order in which it made them. A coroutine is
cancelled when the caller stops waiting, so it must keep its state consistent at every await. Frames of a reply of at
least 64 KiB are sent without a copy: they must never change afterwards.
"""

MAX_CALLS = 65_536
"""Maximum number of running calls of all callers."""
_CLOSE_S = 0.8


class RpcCounters:
    """Counters of a server since it started. calls: by method; errors: error replies, by code of the error.

    dropped: messages without a reply, by reason; refused: connections that were cut off or not admitted, by reason, and
    calls that a caller may not make (``access``).
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.cancelled = 0
        self.dropped: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()


class _Route(NamedTuple):
    decoder: msgspec.msgpack.Decoder[Any]
    handler: Handler


class RpcServer:
    """Answers calls at one address.

    name: of this server, in logs and errors; bind: address, with ``*`` for any free port, and with a server id
    (``tcp://HOST:PORT/SERVER``) if callers already know it; credentials: of this process, None for plain text; access:
    access control, used with credentials; max_message: maximum bytes of a message with its frames; advertise: host that
    peers dial, by default see ``dialled``. address: the address that peers dial, empty before ``start``.
    """

    def __init__(
        self,
        *,
        name: str,
        bind: str = "tcp://127.0.0.1:*",
        credentials: Credentials | None = None,
        access: Access | None = None,
        max_message: int = framing.MAX_MESSAGE,
        advertise: str = "",
    ) -> None:
        self.name = name
        self.counters = RpcCounters()
        self._bind = bind
        self._credentials = credentials
        self._access = access or Access()
        self._max_message = max_message
        self._advertise = advertise
        self.address = ""
        self._routes: dict[str, _Route] = {}
        self._server = b""
        self._running = 0
        self._peers: set[Caller] = set()
        self._listener: Listener | None = None

    def route(self, method: str, request: type[Struct], handler: Handler) -> None:
        """Answer calls of ``method`` by ``handler``; their bodies must be of type ``request``."""
        if method in self._routes:
            raise ValueError(f"{self.name} has two handlers for {method}")
        self._routes[method] = _Route(framing.decoder_of(request), handler)

    async def start(self) -> str:
        """Bind and serve in the running loop; return the address that peers dial.

        If a process that is just ending still holds the address, wait for it. Raises Refused if the address does not
        become free, or may not be served without credentials.
        """
        if self._credentials is not None and (open_to_all := self._routes.keys() - self._access.table.keys()):
            raise ValueError(f"{self.name}: the access table has no entry for {', '.join(sorted(open_to_all))}")
        listening = await listen(self._bind, name=self.name, advertise=self._advertise)
        try:
            check_exposure(listening.socket.getsockname()[0], self._credentials, name=self.name)
        except Refused:
            listening.socket.close()
            raise
        self.address, self._server = listening.address, listening.server
        SSLProtocol.max_size = _TLS_BUFFER
        shared = shm.listening(self.address)
        self._listener = Listener(
            [listening.socket] if shared is None else [listening.socket, shared],
            most=MAX_PEERS,
            share=3 / 4,
            handshake=self._handshake,
            connected=self._peers.__len__,
            make_room=self._make_room,
            refused=lambda refused: self.note_refusal(refused.what, refused.reason),
        )
        return self.address

    async def close(self) -> None:
        """Cancel all handlers and close the socket, within a second; callers get ``PeerLost``."""
        if self._listener is None:
            return
        self._listener.close()
        running = [work for peer in self._peers for work in peer.running.values()]
        for peer in self._peers:
            peer.close()
        self._peers.clear()
        await asyncio.sleep(0)  # lets the event loop close the sockets
        for work in running:
            work.cancel()
        if running:
            _, stuck = await asyncio.wait(running, timeout=_CLOSE_S)
            for work in stuck:
                log.warning("%s: %r did not end when it was cancelled", self.name, work)

    async def _handshake(self, caller: sockets.socket) -> None:
        """Do the handshake with a caller and identify it. Raises PeerRefused if it is not allowed."""
        arenas, context = None, None
        await first_bytes(caller)
        if caller.family == sockets.AF_UNIX:
            if not shm.is_same_user(caller):
                raise PeerRefused("a caller of this host runs as another user", reason="other_user")
            arenas = shm.received(caller)
        elif self._credentials is not None:
            if not framing.is_tls(caller.recv(2, sockets.MSG_PEEK)):
                raise PeerRefused("the peer does not speak TLS", reason="no_tls")
            context = self._credentials.server()
        tune(caller)
        peer = Caller(self, most=self._max_message, arenas=arenas)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: peer, caller, ssl=context)
            await peer.greeted
        except BaseException:
            peer.close()
            self._peers.discard(peer)
            raise

    def identity_of(self, ssl_object: ssl.SSLObject) -> ProcessIdentity:
        """Return the identity in a peer's certificate. Raises PeerRefused if it is not a process of this job."""
        assert self._credentials is not None
        return self._credentials.peer(ssl_object)

    def let_in(self, peer: Caller, claimed: ProcessIdentity | None) -> bytes:
        """Admit a peer under the identity that it claims, and return the server's greeting.

        A peer of the same user on this host that claims none is admitted with the role ``unnamed``. Raises PeerRefused
        if the peer's certificate contradicts the claim, or if it belongs to another job.
        """
        if self._credentials is not None:
            job = self._credentials.process.job
            if peer.tls is not None:
                if claimed != peer.caller:
                    what = f"the peer claims to be {claimed}, but its certificate is of {peer.caller}"
                    raise PeerRefused(what, reason="no_identity")
                expired = PeerRefused("the certificate of a connection has expired", reason="expired")
                peer.expire_in(tls.expires_in(peer.tls), expired)
            peer.caller = claimed or ProcessIdentity(job, self._access.unnamed, 0)
            if peer.caller.job != job:
                raise PeerRefused(f"the peer is {claimed}, of another job", reason="other_job")
        self._peers.add(peer)
        return framing.welcome(self._server)

    def forget(self, peer: Caller, why: AsyncFlowError) -> None:
        """Forget a peer whose connection has ended."""
        self._peers.discard(peer)
        if isinstance(why, ProtocolError):
            self.note_refusal(str(why), tls.refusal(why).reason)

    def _make_room(self) -> bool:
        """Cut off the oldest unidentified peer, otherwise the longest idle one; return whether there was one."""
        if self._listener is not None and self._listener.end_handshake():
            return True
        now = asyncio.get_running_loop().time()
        idle = [peer for peer in self._peers if now - peer.heard >= _IDLE_S and not peer.running]
        if idle:
            min(idle, key=lambda peer: peer.heard).fail(PeerRefused("too many peers", reason="full"))
        return bool(idle)

    def deliver(self, peer: Caller, parts: list[memoryview]) -> None:
        """Start the call in a peer's message, or cancel a running one."""
        if not parts:
            self._drop("short")
            return
        try:
            header = framing.to_server(parts[0])
        except framing.MALFORMED:
            self._drop("header")
            return
        running = peer.running.get(header.call)
        if isinstance(header, framing.Cancel):
            if running is not None:
                running.cancel()
            return
        if not framing.fits(header, len(parts)):
            self._drop("shape")
            return
        if running is not None:
            self._drop("repeated")
            return
        route = self._routes.get(header.method)
        if route is None:
            self._refuse(peer, header, ProtocolError(f"there is no method {header.method!r}", where=self.name))
            return
        if self._running >= MAX_CALLS:
            self._refuse(peer, header, Refused(f"{MAX_CALLS} calls are running already", where=self.name))
            return
        try:
            request = route.decoder.decode(parts[1])
        except framing.MALFORMED as wrong:
            self._refuse(peer, header, ProtocolError(f"{header.method}: {wrong}", where=self.name))
            return
        if self._credentials is not None and not self._may(peer, header, request):
            return
        self.counters.calls[header.method] += 1
        self._answer(peer, header, route.handler, request, parts[2:])

    def _answer(self, peer: Caller, header: framing.Call, handler: Callable[..., Reply], *arguments: Any) -> None:
        """Answer a call with the result or error of ``handler``, immediately or when its awaitable is done."""
        try:
            reply = handler(*arguments)
            if isinstance(reply, Coroutine):
                reply = asyncio.get_running_loop().create_task(reply)
            if isinstance(reply, asyncio.Future):
                self._await_reply(peer, header, reply)
            else:
                self._send_reply(peer, header, reply)
        except AsyncFlowError as error:
            self._refuse(peer, header, error)
        except Exception as error:
            log.exception("%s: %s failed", self.name, header.method)
            hint = f"The log of {self.name} has the traceback"
            self._refuse(peer, header, RemoteError(f"{header.method}: {error!r}", where=self.name, hint=hint))

    def _await_reply(self, peer: Caller, header: framing.Call, running: asyncio.Future[Reply]) -> None:
        """Answer a call when ``running`` is done; cancel it when the caller stops waiting."""
        peer.running[header.call] = running
        self._running += 1
        deadline = running.get_loop().call_later(header.timeout, running.cancel)

        def ended(done: asyncio.Future[Reply]) -> None:
            deadline.cancel()
            del peer.running[header.call]
            self._running -= 1
            if done.cancelled():
                self.counters.cancelled += 1
            else:
                self._answer(peer, header, done.result)
            peer.resume()

        running.add_done_callback(ended)

    def _send_reply(self, peer: Caller, header: framing.Call, reply: Reply) -> None:
        answer, out = reply if isinstance(reply, tuple) else (reply, ())
        body = framing.encode(answer)
        framing.check_size("the reply to", header.method, body, out, limit=self._max_message)
        peer.send_answer(header.call, [framing.encode(framing.Answer(header.call, len(out))), body, *out])

    def _refuse(self, peer: Caller, header: framing.Call, error: AsyncFlowError) -> None:
        self.counters.errors[error.code] += 1
        peer.send_answer(header.call, [framing.encode(framing.Failure(header.call)), framing.encode(error.to_wire())])

    def _may(self, peer: Caller, header: framing.Call, request: Struct) -> bool:
        """Return whether a caller may make this call. If not, refuse the call and count it."""
        assert peer.caller is not None
        try:
            self._access.check(peer.caller, header.method, request)
        except Refused as refused:
            self.note_refusal(refused.what, "access")
            self._refuse(peer, header, Refused(refused.what, where=self.name, hint=refused.hint))
            return False
        return True

    def note_refusal(self, why: str, reason: str) -> None:
        """Count a refusal by this server, or by another server of its process; log the first of each reason."""
        self.counters.refused[reason] += 1
        level = logging.WARNING if self.counters.refused[reason] == 1 else logging.DEBUG
        log.log(level, "%s: refused a peer (%s): %s", self.name, reason, why)

    def _drop(self, reason: str) -> None:
        self.counters.dropped[reason] += 1
        log.debug("%s: dropped a message: %s", self.name, reason)
