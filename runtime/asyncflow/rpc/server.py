"""The answering side of calls: one socket that listens, one more for callers of this host, and a task for each call.

Invariants: a parked handler delays nobody; no handler runs longer than its caller waits, because the caller's deadline
travels with the call and cancels the handler; whatever bytes come, the service goes on, and what it drops is counted.
No connection over TLS outlives the certificate that it began with; a peer that has not said who it is in time, sends
what is no message, or leaves too many answers unread is cut off; one for which too many bytes lie unread is heard no
more until they went; and nobody else notices. Where there are too many peers, or no descriptor is left, those make room
first that have not said who they are, the oldest of them first, then the one that has been idle for longest.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import itertools
import logging
import resource
import socket as sockets
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import msgspec
from msgspec import Struct

from asyncflow.errors import AsyncFlowError, ProtocolError, Refused, RemoteError
from asyncflow.identity import ProcessIdentity
from asyncflow.rpc import framing, shm, tls
from asyncflow.rpc.access import Access
from asyncflow.rpc.addresses import listen
from asyncflow.rpc.columns import Buffer
from asyncflow.rpc.connection import Flow, staging, tune
from asyncflow.rpc.framing import Inbox, Outbox
from asyncflow.rpc.tls import Credentials, Stranger, TlsSocket, check_exposure

MAX_PEERS = 8192
"""Connections of one server; fewer where they would be more than three quarters of the process's descriptors."""
_MAX_UNREAD = 4096
_MOST_UNSENT = 64 << 20
"""Bytes of answers from which on a peer is heard no more until it has read them; one answer may have more."""
_MOST_AT_ONCE = 2
"""Calls of a peer that begin in one turn of the loop, as what they answer counts as unsent only when it is there."""
_MOST_OWED = 2
"""Calls of a peer that are under way at once of those that began while it had not read what it was sent."""
_SHAKE_S = 10.0
_IDLE_S = 60.0
"""Seconds without a message after which a peer may have to make room; it connects again when it next calls."""
_FULL_S = 0.1
_SHORTAGE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

LONGEST_S = 2 * 86_400.0
"""Seconds that a connection over TLS may last; who calls makes another before that (``link.FRESH_S``)."""
EXPIRED_MEANWHILE = "the certificate with which a connection began has expired"

FULL = "full"
OTHER_USER = "other_user"


@dataclass(slots=True)
class _Peer:
    """One connection.

    heard: when; caller: who it is, None while that is not known or there are no certificates; end: when it must end.
    """

    flow: Flow
    heard: float
    known: bool = False
    caller: ProcessIdentity | None = None
    end: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Close the connection."""
        if self.end is not None:
            self.end.cancel()
        self.flow.close()


class Answering:
    """Listens for streams. deliver: gets each message, and the number of the peer that sent it.

    nearby: listens to callers of this host, if there is such a socket; server: which one this is; refused: told
    why a peer was cut off for good, and by which reason that is counted; busy: whether a call of a peer is under way;
    credentials: of this process, None for plain text; unnamed: see ``Access``; most: bytes of one message.
    """

    def __init__(
        self,
        listening: sockets.socket,
        *,
        nearby: sockets.socket | None,
        server: bytes,
        credentials: Credentials | None,
        unnamed: str,
        most: int,
        deliver: Callable[[int, list[memoryview]], None],
        refused: Callable[[str, str], None],
        busy: Callable[[int], bool],
    ) -> None:
        self.closed = False
        self._listening = [listening] if nearby is None else [listening, nearby]
        self._server = server
        self._credentials = credentials
        self._unnamed = unnamed
        self._most = most
        self._most_peers = min(MAX_PEERS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4)
        self._deliver = deliver
        self._refused = refused
        self._busy = busy
        self._peers: dict[int, _Peer] = {}
        self._numbers = itertools.count()
        self._staging = staging()
        self._loop = asyncio.get_running_loop()
        self._listen()

    def caller(self, peer: int) -> ProcessIdentity | None:
        """Return who ``peer`` is; None where nobody has to say who it is."""
        return self._peers[peer].caller

    def send(self, peer: int, key: Hashable, parts: Sequence[Buffer]) -> None:
        """Send ``parts`` to ``peer``, unless it is gone; ``key`` names the message."""
        if (found := self._peers.get(peer)) is not None:
            found.flow.send(key, parts)

    def begun(self, peer: int, key: Hashable) -> None:
        """Note that a call of ``peer`` is under way."""
        if (found := self._peers.get(peer)) is not None:
            found.flow.begun(key)

    def ended(self, peer: int, key: Hashable) -> None:
        """Note that a call of ``peer`` is under way no more."""
        if (found := self._peers.get(peer)) is not None:
            found.flow.ended(key)

    def close(self) -> None:
        """Close all streams at once."""
        if not self.closed:
            self.closed = True
            for listening in self._listening:
                self._loop.remove_reader(listening)
                listening.close()
            for peer in self._peers.values():
                peer.close()
            self._peers.clear()

    def _listen(self) -> None:
        for listening in self._listening:
            if not self.closed:
                self._loop.add_reader(listening, self._accept, listening)

    def _accept(self, listening: sockets.socket) -> None:
        try:
            socket, _ = listening.accept()
        except OSError as error:
            if error.errno in _SHORTAGE and not self._make_room("no descriptor is left"):
                self._loop.remove_reader(listening)  # those who wait to be let in must not keep the loop busy
                self._loop.call_later(_FULL_S, self._listen)
            return
        if len(self._peers) >= self._most_peers and not self._make_room("too many peers"):
            socket.close()
            self._refused("too many peers", FULL)
            return
        socket.setblocking(False)
        tune(socket)
        if listening.family == sockets.AF_UNIX:
            known = shm.accepted(socket)
            if known is None:
                self._refused("a caller of this host runs as another user", OTHER_USER)
                return
            socket = known
        peer = next(self._numbers)
        stream: sockets.socket | TlsSocket = socket
        if self._credentials is not None and socket.family != sockets.AF_UNIX:
            stream = self._credentials.accepted(socket)
        flow = Flow(
            stream,
            size=framing.HEAD_SIZE,
            begin=functools.partial(self._meet, peer, stream),
            shake=self._greeting(peer, stream),
            deliver=functools.partial(self._heard, peer),
            lost=lambda why: self._forget(peer, why),
            most_unread=_MAX_UNREAD,
            most_unsent=_MOST_UNSENT,
            most_at_once=_MOST_AT_ONCE,
            most_owed=_MOST_OWED,
        )
        self._peers[peer] = _Peer(flow, self._loop.time())
        self._loop.call_later(_SHAKE_S, self._cut_off_unknown, peer)

    def _meet(self, peer: int, stream: sockets.socket | TlsSocket) -> bytes:
        """Take note of whom the peer's certificate names, and say nothing first."""
        if self._credentials is not None and isinstance(stream, TlsSocket):
            self._peers[peer].caller = self._credentials.peer(stream)
        return b""

    def _greeting(self, peer: int, stream: sockets.socket | TlsSocket) -> Callable[[bytes], tuple[Inbox, Outbox] | int]:
        head = True

        def shake(came: bytes) -> tuple[Inbox, Outbox] | int:
            nonlocal head
            if head and (rest := framing.rest_of_hello(came)):
                head = False
                return rest
            said = framing.caller(b"" if head else came)
            self._know(self._peers[peer], said, over_tls=isinstance(stream, TlsSocket))
            if isinstance(stream, TlsSocket):
                self._limit(peer, tls.expires_in(stream))
            welcome = framing.welcome(self._server)
            if stream.send(welcome) < len(welcome):
                raise ProtocolError("a peer takes no welcome")
            return shm.boxes(stream, most=self._most, staging=self._staging)

        return shake

    def _know(self, peer: _Peer, said: ProcessIdentity | None, *, over_tls: bool) -> None:
        """Let a peer in as whom it says it is. Raises Stranger where its certificate, or the job, says otherwise.

        Who says nothing from this host, as the same user, is let in by the role of ``unnamed``.
        """
        peer.known = True
        if self._credentials is None:
            return
        job = self._credentials.process.job
        if over_tls and said != peer.caller:
            what = f"the peer calls itself {said}, but its certificate is of {peer.caller}"
            raise Stranger(what, reason=tls.NO_IDENTITY)
        peer.caller = said or ProcessIdentity(job, self._unnamed, 0)
        if peer.caller.job != job:
            raise Stranger(f"the peer is {said}, of another job", reason=tls.OTHER_JOB)

    def _limit(self, peer: int, expires_s: float) -> None:
        """Have a connection end when the certificate that it began with expires, or is two days old."""
        why, reason = (EXPIRED_MEANWHILE, tls.EXPIRED) if expires_s < LONGEST_S else ("a connection is too old", "old")
        after = min(expires_s, LONGEST_S)
        self._peers[peer].end = self._loop.call_later(after, self._cut_off, peer, why, reason)

    def _heard(self, peer: int, parts: list[memoryview]) -> None:
        self._peers[peer].heard = self._loop.time()
        self._deliver(peer, parts)

    def _make_room(self, why: str) -> bool:
        """Cut off the peer that is missed least, and return whether there was one."""
        now = self._loop.time()
        unknown = next((number for number, peer in self._peers.items() if not peer.known), None)
        if unknown is not None:
            self._cut_off(unknown, why, FULL)
            return True
        idle = [(peer.heard, number) for number, peer in self._peers.items() if now - peer.heard >= _IDLE_S]
        for _, number in sorted(idle):
            if not self._busy(number):
                self._cut_off(number, why, FULL)
                return True
        return False

    def _cut_off_unknown(self, peer: int) -> None:
        if peer in self._peers and not self._peers[peer].known:
            self._cut_off(peer, "a peer did not say who it is in time", "late")

    def _cut_off(self, peer: int, why: str, reason: str) -> None:
        self._peers.pop(peer).close()
        self._refused(why, reason)

    def _forget(self, peer: int, why: AsyncFlowError) -> None:
        if (found := self._peers.pop(peer, None)) is None:
            return
        found.close()
        if isinstance(why, ProtocolError):
            self._refused(str(why), why.reason if isinstance(why, Stranger) else "protocol")


log = logging.getLogger(__name__)

Reply: TypeAlias = Any
"""Anything that msgspec encodes; or a tuple of that and of frames."""
Handler: TypeAlias = Callable[[Any, Sequence[memoryview]], Reply]
"""Function of the request and its frames (writable views, its own) that returns the reply, or an awaitable of it.

It is called where the request is read, so calls of one client begin in the order in which it made them. An awaitable is
cancelled when the caller waits no more, so it must leave everything whole wherever it waits. Frames of a reply of
64 KiB and more are sent from where they lie: they must not change any more.
"""

MAX_CALLS = 65_536
_CLOSE_S = 0.8


class RpcCounters:
    """Counters of a server since it started. calls: by method.

    dropped: messages without an answer, by reason; refused: connections that were cut off or not let in, by reason, and
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

    name: of this server, in logs and errors; bind: address, ``*`` for any free port, with which server this is
    (``tcp://HOST:PORT/SERVER``) where callers know that already; credentials: of this process, None for plain text;
    access: decides who may call what, where there are credentials; max_message: most bytes of one message, frames
    included; advertise: host that others dial, by default the bound one, or this machine's own address when bound to
    all interfaces.
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
        self._address = ""
        self._routes: dict[str, _Route] = {}
        self._running: dict[tuple[int, int], asyncio.Future[Reply]] = {}
        self._streams: Answering | None = None

    def route(self, method: str, request: type[Struct], handler: Handler) -> None:
        """Answer calls of ``method`` by ``handler``; their bodies must be a ``request``."""
        if method in self._routes:
            raise ValueError(f"{self.name} has two handlers for {method}")
        self._routes[method] = _Route(framing.decoder_of(request), handler)

    @property
    def address(self) -> str:
        """The address that others dial; empty before ``start``."""
        return self._address

    async def start(self) -> str:
        """Bind and serve from the running loop; give the address that others dial.

        An address still held by a predecessor that is just dying is waited for. Raises Refused where it does not come
        free, or may not be served without credentials.
        """
        if self._credentials is not None and (open_to_all := self._routes.keys() - self._access.table.keys()):
            raise ValueError(f"{self.name}: the access table says nothing of {', '.join(sorted(open_to_all))}")
        listening = await listen(self._bind, name=self.name, advertise=self._advertise)
        try:
            check_exposure(listening.socket.getsockname()[0], self._credentials, name=self.name)
        except Refused:
            listening.socket.close()
            raise
        self._address = listening.address
        self._streams = Answering(
            listening.socket,
            nearby=shm.listening(self._address),
            server=listening.server,
            credentials=self._credentials,
            unnamed=self._access.unnamed,
            most=self._max_message,
            deliver=self._deliver,
            refused=self.note_refusal,
            busy=lambda peer: any(number == peer for number, _ in self._running),
        )
        return self._address

    async def close(self) -> None:
        """Cancel all handlers and close the socket, within a second; callers see ``PeerLost``."""
        if self._streams is None:
            return
        self._streams.close()
        running = list(self._running.values())
        for work in running:
            work.cancel()
        if running:
            _, stuck = await asyncio.wait(running, timeout=_CLOSE_S)
            for work in stuck:
                log.warning("%s: %r did not end when it was cancelled", self.name, work)

    def _deliver(self, peer: int, parts: list[memoryview]) -> None:
        if not parts:
            self._drop("short")
            return
        try:
            header = framing.to_server(parts[0])
        except framing.MALFORMED:
            self._drop("header")
            return
        if isinstance(header, framing.Cancel):
            running = self._running.get((peer, header.call))
            if running is not None:
                running.cancel()
            return
        try:
            framing.check_call(header, len(parts))
        except ProtocolError:
            self._drop("shape")
            return
        if self._running and (peer, header.call) in self._running:
            self._drop("repeated")
            return
        route = self._routes.get(header.method)
        if route is None:
            self._refuse(peer, header, ProtocolError(f"there is no method {header.method!r}", where=self.name))
            return
        if len(self._running) >= MAX_CALLS:
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

    def _answer(self, peer: int, header: framing.Call, handler: Callable[..., Reply], *asked: Any) -> None:
        """Answer a call with what ``handler`` returns or raises, at once or when that is done."""
        try:
            reply = handler(*asked)
            if isinstance(reply, Awaitable):
                self._await_reply(peer, header, asyncio.ensure_future(reply))
            else:
                self._send_reply(peer, header, reply)
        except AsyncFlowError as error:
            self._refuse(peer, header, error)
        except Exception as error:
            log.exception("%s: %s failed", self.name, header.method)
            hint = f"The log of {self.name} has the traceback"
            self._refuse(peer, header, RemoteError(f"{header.method}: {error!r}", where=self.name, hint=hint))

    def _await_reply(self, peer: int, header: framing.Call, running: asyncio.Future[Reply]) -> None:
        """Answer a call when ``running`` is done, which is cancelled when the caller waits no more."""
        call = peer, header.call
        self._running[call] = running
        if self._streams is not None:
            self._streams.begun(*call)
        deadline = running.get_loop().call_later(header.timeout, running.cancel)

        def ended(done: asyncio.Future[Reply]) -> None:
            deadline.cancel()
            del self._running[call]
            if done.cancelled():
                self.counters.cancelled += 1
            else:
                self._answer(peer, header, done.result)
            if self._streams is not None:
                self._streams.ended(*call)

        running.add_done_callback(ended)

    def _send_reply(self, peer: int, header: framing.Call, reply: Reply) -> None:
        answer, out = reply if isinstance(reply, tuple) else (reply, ())
        body = framing.encode(answer)
        framing.check_size("the answer to", header.method, body, out, limit=self._max_message)
        self._send(peer, header, [framing.encode(framing.Answer(header.call, len(out))), body, *out])

    def _refuse(self, peer: int, header: framing.Call, error: AsyncFlowError) -> None:
        self.counters.errors[error.code] += 1
        self._send(peer, header, [framing.encode(framing.Failure(header.call)), framing.encode(error.to_wire())])

    def _send(self, peer: int, header: framing.Call, parts: Sequence[Buffer]) -> None:
        if self._streams is not None:
            self._streams.send(peer, header.call, parts)

    def _may(self, peer: int, header: framing.Call, request: Struct) -> bool:
        """Return whether a caller may make this call; where it may not, it is told so, and that is counted."""
        assert self._streams is not None
        caller = self._streams.caller(peer)
        try:
            if caller is None:
                raise Refused(f"{header.method}: the caller is not known")
            self._access.check(caller, header.method, request)
        except Refused as refused:
            self.note_refusal(refused.what, "access")
            self._refuse(peer, header, Refused(refused.what, where=self.name, hint=refused.hint))
            return False
        return True

    def note_refusal(self, why: str, reason: str) -> None:
        """Count what was refused here, or beside this server, and log the first of each reason."""
        self.counters.refused[reason] += 1
        level = logging.WARNING if self.counters.refused[reason] == 1 else logging.DEBUG
        log.log(level, "%s: refused a peer (%s): %s", self.name, reason, why)

    def _drop(self, reason: str) -> None:
        self.counters.dropped[reason] += 1
        log.debug("%s: dropped a message: %s", self.name, reason)
