"""A stream to one peer, in an event loop.

Invariant: what is sent before the stream is there waits; a stream that was there and broke is not made again.
"""

from __future__ import annotations

import asyncio
import socket as sockets
from collections.abc import Callable, Collection, Hashable, Sequence

from asyncflow.errors import AsyncFlowError, ProtocolError
from asyncflow.identity import ProcessIdentity
from asyncflow.net.arena import unix
from asyncflow.net.frames import Buffer
from asyncflow.net.hosts import host_and_port, look_up, server_of
from asyncflow.net.retry import delays
from asyncflow.net.rpc.flow import SILENT, UNSHAKEN, Deliver, Flow, in_words, tune
from asyncflow.net.rpc.staging import staging
from asyncflow.net.stream import handshake
from asyncflow.net.stream.inbox import Inbox
from asyncflow.net.stream.outbox import Outbox
from asyncflow.net.tls import NO_IDENTITY, Credentials, Stranger, TlsSocket

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
        nearby = unix.dialled(self._address) if self._near else None
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
                return handshake.hello(None)
            if isinstance(stream, TlsSocket):
                self._check(self._credentials.peer(stream))
            return handshake.hello(self._credentials.process)

        def shake(welcome: bytes) -> tuple[Inbox, Outbox]:
            handshake.check_welcome(welcome, dialled=server_of(self._address))
            inbox, outbox = unix.boxes(stream, most=self._most, staging=staging())
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
            stream, size=handshake.WELCOME_SIZE, begin=begin, shake=shake, deliver=self._deliver, lost=lost
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
