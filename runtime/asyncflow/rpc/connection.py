"""One connection in an asyncio loop: messages both ways over a transport, which sees to the socket and to TLS.

Invariants: nothing here ever blocks the loop, and no peer keeps it for more than one read at a time; a connection that
broke, or on which a message could not be sent whole, is never used again; what lies in the transport beside the
messages here is a few pieces; a process that receives asks the kernel for new pages only where it grows.
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
"""Seconds in which a peer must have shaken hands and greeted."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT, _LARGEST_KEPT = 256 << 20, 32 << 20
_LOST_MS = 25_000


@functools.cache
def _keep_freed() -> None:
    """Make the allocator keep what was freed: to get each page anew from the kernel takes as long as to receive it.

    Threads that come later share one arena, since of those of their own they give back whole heaps.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_ARENA_MAX, 1)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)


def tune(made: sockets.socket) -> None:
    """Make a connection send at once what it is given, and notice within 25 s that a host vanished."""
    if made.family == sockets.AF_UNIX:
        return
    made.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)  # asyncio leaves out sockets made without a protocol
    made.setsockopt(sockets.SOL_SOCKET, sockets.SO_KEEPALIVE, 1)
    made.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPIDLE, 10)
    made.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPINTVL, 5)
    made.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPCNT, 3)
    made.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_USER_TIMEOUT, _LOST_MS)


async def first_bytes(caller: sockets.socket) -> None:
    """Wait until a caller has sent something: until then it costs no more than its socket."""
    loop, came = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(caller, came.set)
    try:
        await came.wait()
    finally:
        loop.remove_reader(caller)


class Connection(asyncio.BufferedProtocol):
    """One connection, whose first message is a greeting. Messages wait until the greetings are exchanged.

    most: bytes of one message; arenas: memory that both sides share, which this owns.
    """

    def __init__(self, *, most: int, arenas: Arenas | None) -> None:
        _keep_freed()
        self.closed = False
        self.greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.outbox = Outbox(put=arenas.outgoing.put if arenas is not None else None)
        self._arenas = arenas
        self._most = most
        self._inbox = Inbox(most=LONGEST_GREETING, take=arenas.incoming.take if arenas is not None else None)
        self._transport: Any = None
        self._blocked = False

    def greet(self, parts: list[memoryview]) -> None:
        """Take in the peer's greeting. Raises ProtocolError where it goes no further."""
        raise NotImplementedError

    def received(self, messages: list[list[memoryview]]) -> None:
        """Take in messages."""
        raise NotImplementedError

    def lost(self, why: AsyncFlowError) -> None:
        """Learn that the connection broke after the greetings."""
        raise NotImplementedError

    @property
    def tls(self) -> ssl.SSLObject | None:
        """The TLS of this connection; None where none is spoken, or it is gone."""
        found: ssl.SSLObject | None = self._transport and self._transport.get_extra_info("ssl_object")
        return found

    def say(self, greeting: bytes) -> None:
        """Send this side's greeting, unless the connection is gone: uvloop tells of that before who dialled goes on."""
        if not self.closed:
            self._transport.write(greeting)

    def send(self, key: Hashable, parts: Sequence[Buffer]) -> None:
        """Send a message after those before it; ``key`` names it."""
        if not self.closed:
            self.outbox.push(key, parts)
            self.flush()

    def flush(self) -> None:
        """Send what the transport takes now; the rest follows when it takes more."""
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
        """True when all messages went."""
        return not self._blocked and self.outbox.idle

    def fail(self, why: AsyncFlowError) -> None:
        """Close the connection because of an error of it."""
        if not self.closed:
            greeted = self.greeted
            if not greeted.done():
                greeted.set_exception(why)
                self.close()
            else:
                self.close()
                self.lost(why)

    def close(self) -> None:
        """Close the connection at once."""
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
        """Make the transport say as soon as it does not take all at once."""
        self._transport = transport
        self._transport.set_write_buffer_limits(high=1)

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the connection is gone."""
        self.fail(PeerLost(f"the connection to the peer broke: {exc or 'it hung up'}"))
        self._transport = None

    def eof_received(self) -> None:
        """Close the connection: who sends no more is gone."""
        self.connection_lost(None)

    def pause_writing(self) -> None:
        """Send nothing more for now."""
        self._blocked = True

    def resume_writing(self) -> None:
        """Send more."""
        self._blocked = False
        self.flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory for what comes next."""
        del sizehint
        return self._inbox.room()

    def buffer_updated(self, nbytes: int) -> None:
        """Take in what came."""
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
            self.fail(ProtocolError("there is no memory for what a peer wants to send"))
