"""One connection in an asyncio loop: messages in both directions over a transport, which handles the socket and TLS.

Invariants: this module never blocks the loop, and no peer occupies the loop for more than one read at a time. A
connection that broke, or on which a message could not be sent completely, is never used again. At most a few chunks are
buffered in the transport. A receiving process requests new pages from the kernel only while its memory use grows.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import socket as sockets
import ssl
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from asyncflow.errors import AsyncFlowError, PeerLost, ProtocolError
from asyncflow.rpc.columns import Buffer
from asyncflow.rpc.framing import LONGEST_GREETING, Inbox, Outbox

if TYPE_CHECKING:
    from asyncflow.rpc.shm import Arenas

GREETING_S = 10.0
"""Seconds within which a peer must complete the TLS handshake and send its greeting."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT, _LARGEST_KEPT = 256 << 20, 32 << 20
_LOST_MS = 25_000


@functools.cache
def _keep_freed_memory() -> None:
    """Make the allocator keep freed memory: getting a page from the kernel takes as long as receiving its bytes.

    Threads created afterwards share one arena, because arenas of their own would return whole heaps to the kernel.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_ARENA_MAX, 1)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)


def tune(sock: sockets.socket) -> None:
    """Make a connection send data without delay, and detect within 25 s that a host disappeared."""
    if sock.family == sockets.AF_UNIX:
        return
    sock.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)  # asyncio omits it for sockets without a protocol
    sock.setsockopt(sockets.SOL_SOCKET, sockets.SO_KEEPALIVE, 1)
    sock.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPIDLE, 10)
    sock.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPINTVL, 5)
    sock.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPCNT, 3)
    sock.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_USER_TIMEOUT, _LOST_MS)


async def first_bytes(caller: sockets.socket) -> None:
    """Wait for the first bytes of a caller. Until then it costs no more than its socket."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(caller, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(caller)


class Connection(asyncio.BufferedProtocol):
    """One connection, whose first message is a greeting. Messages wait until both greetings are exchanged.

    most: maximum bytes of one message; arenas: memory shared by both sides, which the connection closes.
    """

    def __init__(self, *, most: int, arenas: Arenas | None) -> None:
        _keep_freed_memory()
        self.closed = False
        self.greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.outbox = Outbox(put=arenas.outgoing.put if arenas is not None else None)
        self._arenas = arenas
        self._most = most
        self._inbox = Inbox(most=LONGEST_GREETING, take=arenas.incoming.take if arenas is not None else None)
        self._transport: Any = None
        self._blocked = False

    def greet(self, parts: list[memoryview]) -> None:
        """Check the peer's greeting. Raises ProtocolError if the connection cannot be used."""
        raise NotImplementedError

    def received(self, messages: list[list[memoryview]]) -> None:
        """Handle messages."""
        raise NotImplementedError

    def lost(self, why: AsyncFlowError) -> None:
        """Handle a connection that broke after the greetings."""
        raise NotImplementedError

    @property
    def tls(self) -> ssl.SSLObject | None:
        """TLS object of this connection; None without TLS, or after the connection broke."""
        found: ssl.SSLObject | None = self._transport and self._transport.get_extra_info("ssl_object")
        return found

    def send_greeting(self, greeting: bytes) -> None:
        """Send this side's greeting unless the connection is lost: uvloop may report that before dialling completes."""
        if not self.closed:
            self._transport.write(greeting)

    def send(self, key: Hashable, parts: Sequence[Buffer]) -> None:
        """Send a message after the earlier ones; ``key`` identifies it."""
        if not self.closed:
            self.outbox.push(key, parts)
            self.flush()

    def flush(self) -> None:
        """Send as much as the transport accepts now; the rest follows when it accepts more."""
        if not self.greeted.done():
            return
        try:
            while not self._blocked and (piece := self.outbox.next()) is not None:
                self._transport.write(piece)
        except BaseException as error:
            self.fail(PeerLost(f"a message could not be sent: {error!r}"))
            raise

    @property
    def idle(self) -> bool:
        """True if all messages were sent."""
        return not self._blocked and self.outbox.idle

    def fail(self, why: AsyncFlowError) -> None:
        """Close the connection because of an error."""
        if not self.closed:
            greeted = self.greeted
            if not greeted.done():
                greeted.set_exception(why)
                self.close()
            else:
                self.close()
                self.lost(why)

    def close(self) -> None:
        """Close the connection immediately."""
        if not self.closed:
            self.closed = True
            self.greeted.cancel()
            if self._transport is not None:
                self._transport.abort()
            self._inbox.close()
            self.outbox.close()
            if self._arenas is not None:
                self._arenas.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Configure the transport to pause writing as soon as it buffers any bytes."""
        self._transport = transport
        self._transport.set_write_buffer_limits(high=1)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the connection."""
        self.fail(PeerLost(f"the connection to the peer broke: {exc or 'the peer closed it'}"))
        self._transport = None

    def eof_received(self) -> None:
        """Close the connection: a peer that closes its sending side has ended."""
        self.connection_lost(None)

    def pause_writing(self) -> None:
        """Pause sending."""
        self._blocked = True

    def resume_writing(self) -> None:
        """Resume sending."""
        self._blocked = False
        self.flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory for the next received bytes."""
        del sizehint
        return self._inbox.room()

    def buffer_updated(self, nbytes: int) -> None:
        """Handle the received bytes."""
        try:
            messages = self._inbox.took(nbytes)
            if messages and not self.greeted.done():
                self.greet(messages.pop(0))
                self._inbox.most = self._most
                self.greeted.set_result(None)
                self.flush()
            if messages:
                self.received(messages)
        except ProtocolError as wrong:
            self.fail(wrong)
        except MemoryError:
            self.fail(ProtocolError("there is not enough memory for a message of the peer"))
