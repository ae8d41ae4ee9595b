"""The answering side of calls: one ROUTER socket, one asyncio task per call.

Invariants: a parked handler delays nobody; no handler runs longer than its caller waits, because the caller's deadline
travels with the call and cancels the handler; whatever bytes come, the service goes on, and what it drops is counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import msgspec
import zmq
from msgspec import Struct

from asyncflow.errors import AsyncFlowError, ProtocolError, Refused, RemoteError
from asyncflow.net import hosts, wire
from asyncflow.net.frames import Buffer
from asyncflow.net.keys import Keys

log = logging.getLogger(__name__)

Reply: TypeAlias = Struct | tuple[Struct, Sequence[Buffer]]
Handler: TypeAlias = Callable[[Any, Sequence[memoryview]], Awaitable[Reply]]
"""Gets the request and its frames (read-only views); gives the reply, with frames if there are any.

Calls of one client begin in the order in which it made them. A handler is cancelled when its caller waits no more,
so it must leave everything whole wherever it awaits. Frames of a reply of 64 KiB and more are sent from where they lie:
they must not change any more.
"""

MAX_CALLS = 65_536
_CLOSE_S = 0.8
_BIND_S = 3.0


class RpcCounters:
    """What a server counted since it started. dropped: messages without an answer, by reason; calls: by method."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.cancelled = 0
        self.dropped: Counter[str] = Counter()


class RpcServer:
    """Answers calls at one address.

    name: of this server, in logs and errors; bind: zmq address, ``*`` for any free port; keys: the job's key, None for
    plain text; max_message: most bytes of one message, frames included; advertise: host that others dial, by default
    the bound one, or this machine's own address when bound to all interfaces.
    """

    def __init__(
        self,
        *,
        name: str,
        bind: str = "tcp://127.0.0.1:*",
        keys: Keys | None = None,
        max_message: int = 1 << 30,
        advertise: str = "",
    ) -> None:
        self.name = name
        self.counters = RpcCounters()
        self._bind = bind
        self._keys = keys
        self._max_message = max_message
        self._advertise = advertise
        self._address = ""
        self._routes: dict[str, tuple[msgspec.msgpack.Decoder[Any], Handler]] = {}
        self._running: dict[tuple[bytes, int], asyncio.Task[None]] = {}
        self._wire: wire.Wire | None = None

    def route(self, method: str, request: type[Struct], handler: Handler) -> None:
        """Answer calls of ``method`` by ``handler``; their bodies must be a ``request``."""
        if method in self._routes:
            raise ValueError(f"{self.name} has two handlers for {method}")
        self._routes[method] = (msgspec.msgpack.Decoder(request), handler)

    @property
    def address(self) -> str:
        """The address that others dial; empty before ``start``."""
        return self._address

    async def start(self) -> str:
        """Bind and serve from the running loop; give the address that others dial.

        An address still held by a predecessor that is just dying is waited for; Refused when it does not come free.
        """
        socket = wire.open_socket(zmq.ROUTER, max_message=self._max_message)
        if self._keys is not None:
            self._keys.guard_server(socket)
        deadline = asyncio.get_running_loop().time() + _BIND_S
        while True:
            try:
                socket.bind(self._bind)
                break
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE or asyncio.get_running_loop().time() > deadline:
                    socket.close()
                    hint = "Another process may hold that address; choose another or end that process"
                    raise Refused(f"cannot listen at {self._bind}: {error}", where=self.name, hint=hint) from error
                await asyncio.sleep(0.05)
        self._address = self._dialled(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self._wire = wire.Wire(socket, self._deliver)
        return self._address

    async def close(self) -> None:
        """Cancel all handlers and close the socket, within a second; callers see ``PeerLost``."""
        if self._wire is None:
            return
        self._wire.close()
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=_CLOSE_S)
            for task in stuck:
                log.warning("%s: handler %s did not end when it was cancelled", self.name, task.get_name())

    def _dialled(self, endpoint: str) -> str:
        if not endpoint.startswith("tcp://"):
            return endpoint
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        return f"tcp://{hosts.dialled(host, self._advertise)}:{port}"

    def _deliver(self, parts: list[zmq.Frame]) -> None:
        if len(parts) < 2:
            self._drop("short")
            return
        peer = parts[0].bytes
        try:
            header = wire.to_server(parts[1].buffer)
        except msgspec.MsgspecError:
            self._drop("header")
            return
        if isinstance(header, wire.Cancel):
            task = self._running.get((peer, header.call))
            if task is not None:
                task.cancel()
            return
        try:
            wire.check_call(header, len(parts) - 1)
        except ProtocolError:
            self._drop("shape")
            return
        if (peer, header.call) in self._running:
            self._drop("repeated")
            return
        self._accept(peer, header, parts)

    def _accept(self, peer: bytes, header: wire.Call, parts: list[zmq.Frame]) -> None:
        size = sum(len(part) for part in parts)
        route = self._routes.get(header.method)
        if size > self._max_message:
            self._refuse(peer, header, ProtocolError(f"{header.method}: {size} bytes are over {self._max_message}"))
        elif route is None:
            self._refuse(peer, header, ProtocolError(f"there is no method {header.method!r}", where=self.name))
        elif len(self._running) >= MAX_CALLS:
            self._refuse(peer, header, Refused(f"{MAX_CALLS} calls are running already", where=self.name))
        else:
            self._begin(peer, header, route, parts)

    def _begin(
        self,
        peer: bytes,
        header: wire.Call,
        route: tuple[msgspec.msgpack.Decoder[Any], Handler],
        parts: list[zmq.Frame],
    ) -> None:
        decoder, handler = route
        try:
            request = decoder.decode(parts[2].buffer)
        except msgspec.MsgspecError as wrong:
            self._refuse(peer, header, ProtocolError(f"{header.method}: {wrong}", where=self.name))
            return
        self.counters.calls[header.method] += 1
        loop = asyncio.get_running_loop()
        call = (peer, header.call)
        task = loop.create_task(self._serve(peer, header, handler, request, wire.views(parts[3:])))
        self._running[call] = task
        deadline = loop.call_later(header.timeout, task.cancel)

        def ended(done: asyncio.Task[None]) -> None:
            deadline.cancel()
            del self._running[call]
            self.counters.cancelled += done.cancelled()

        task.add_done_callback(ended)

    async def _serve(
        self, peer: bytes, header: wire.Call, handler: Handler, request: Struct, frames: Sequence[memoryview]
    ) -> None:
        try:
            reply = await handler(request, frames)
            answer, out = reply if isinstance(reply, tuple) else (reply, ())
            body = wire.encode(answer)
            wire.check_size(f"the answer to {header.method}", body, out, limit=self._max_message)
        except AsyncFlowError as error:
            self._refuse(peer, header, error)
        except Exception as error:
            log.exception("%s: %s failed", self.name, header.method)
            hint = f"The log of {self.name} has the traceback"
            self._refuse(peer, header, RemoteError(f"{header.method}: {error!r}", where=self.name, hint=hint))
        else:
            self._send((peer, header.call), [peer, wire.encode(wire.Answer(header.call, len(out))), body, *out])

    def _refuse(self, peer: bytes, header: wire.Call, error: AsyncFlowError) -> None:
        self.counters.errors[error.code] += 1
        self._send((peer, header.call), [peer, wire.encode(wire.Failure(header.call)), wire.encode(error.to_wire())])

    def _send(self, call: tuple[bytes, int], parts: Sequence[Buffer]) -> None:
        if self._wire is not None and not self._wire.closed:
            self._wire.send(call, parts)

    def _drop(self, reason: str) -> None:
        self.counters.dropped[reason] += 1
        log.debug("%s: dropped a message: %s", self.name, reason)
