"""The answering side of calls: one listening socket for all; one asyncio task per call, or none where nothing waits.

Invariants: a parked handler delays nobody; no handler runs longer than its caller waits, because the caller's deadline
travels with the call and cancels the handler; whatever bytes come, the service goes on, and what it drops is counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
from msgspec import Struct

from asyncflow.errors import AsyncFlowError, ProtocolError, Refused, RemoteError
from asyncflow.net.access import Access
from asyncflow.net.arena import unix
from asyncflow.net.frames import Buffer
from asyncflow.net.rpc import wire
from asyncflow.net.rpc.answering import Answering
from asyncflow.net.rpc.listening import listen
from asyncflow.net.tls import Credentials, check_exposure

log = logging.getLogger(__name__)

Reply: TypeAlias = Struct | tuple[Struct, Sequence[Buffer]]
Handler: TypeAlias = Callable[[Any, Sequence[memoryview]], Reply | Awaitable[Reply]]
"""Function of the request and its frames (writable views, its own) that returns the reply, or an awaitable of it.

It is called where the request is read, so calls of one client begin in the order in which it made them. An awaitable is
cancelled when the caller waits no more, so it must leave everything whole wherever it waits. Frames of a reply of
64 KiB and more are sent from where they lie: they must not change any more.
"""

MAX_CALLS = 65_536
_CLOSE_S = 0.8


class RpcCounters:
    """What a server counted since it started. calls: by method.

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
        max_message: int = wire.MAX_MESSAGE,
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
        self._routes[method] = _Route(wire.decoder_of(request), handler)

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
            nearby=unix.listening(self._address),
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
            header = wire.to_server(parts[0])
        except wire.MALFORMED:
            self._drop("header")
            return
        if isinstance(header, wire.Cancel):
            running = self._running.get((peer, header.call))
            if running is not None:
                running.cancel()
            return
        try:
            wire.check_call(header, len(parts))
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
        except wire.MALFORMED as wrong:
            self._refuse(peer, header, ProtocolError(f"{header.method}: {wrong}", where=self.name))
            return
        if self._credentials is not None and not self._may(peer, header, request):
            return
        self.counters.calls[header.method] += 1
        self._answer(peer, header, route.handler, request, parts[2:])

    def _answer(
        self, peer: int, header: wire.Call, handler: Callable[..., Reply | Awaitable[Reply]], *asked: Any
    ) -> None:
        """Answer a call with what ``handler`` returns or raises, at once or when that is done."""
        try:
            reply = handler(*asked)
            if isinstance(reply, Struct | tuple):
                self._send_reply(peer, header, reply)
            else:
                self._await_reply(peer, header, asyncio.ensure_future(reply))
        except AsyncFlowError as error:
            self._refuse(peer, header, error)
        except Exception as error:
            log.exception("%s: %s failed", self.name, header.method)
            hint = f"The log of {self.name} has the traceback"
            self._refuse(peer, header, RemoteError(f"{header.method}: {error!r}", where=self.name, hint=hint))

    def _await_reply(self, peer: int, header: wire.Call, running: asyncio.Future[Reply]) -> None:
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

    def _send_reply(self, peer: int, header: wire.Call, reply: Reply) -> None:
        answer, out = reply if isinstance(reply, tuple) else (reply, ())
        body = wire.encode(answer)
        wire.check_size("the answer to", header.method, body, out, limit=self._max_message)
        self._send(peer, header, [wire.encode(wire.Answer(header.call, len(out))), body, *out])

    def _refuse(self, peer: int, header: wire.Call, error: AsyncFlowError) -> None:
        self.counters.errors[error.code] += 1
        self._send(peer, header, [wire.encode(wire.Failure(header.call)), wire.encode(error.to_wire())])

    def _send(self, peer: int, header: wire.Call, parts: Sequence[Buffer]) -> None:
        if self._streams is not None:
            self._streams.send(peer, header.call, parts)

    def _may(self, peer: int, header: wire.Call, request: Struct) -> bool:
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
