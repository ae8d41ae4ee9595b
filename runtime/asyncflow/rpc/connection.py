"""One connected stream in an asyncio loop, and the memory that it receives into.

Invariants: nothing here ever blocks the loop, and no peer keeps it for more than a few reads at a time; a stream that
broke, or of which a message could not be sent whole, is never used again; a process that receives asks the kernel for
new pages only where it grows.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import socket as sockets
import sys
from collections.abc import Callable, Hashable, Sequence

from asyncflow.errors import AsyncFlowError, PeerLost, ProtocolError
from asyncflow.rpc.columns import Buffer
from asyncflow.rpc.framing import Inbox, Outbox
from asyncflow.rpc.tls import TlsSocket

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT, _LARGEST_KEPT = 256 << 20, 32 << 20


def staging() -> memoryview:
    """Make memory for inboxes of this process, which from now on uses freed memory again for what comes."""
    _keep_freed()
    return memoryview(bytearray(1 << 16))


@functools.cache
def _keep_freed() -> None:
    """Let the allocator keep what was freed: to get each page anew from the kernel takes as long as to receive it.

    Threads that come later share one arena, since of those of their own they give back whole heaps.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_ARENA_MAX, 1)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)


SILENT = "it is connected and silent: stopped, overloaded, or it waits for something itself"
UNSHAKEN = "the handshake failed: do both sides have certificates of this job?"
_READS = 4
_LOST_MS = 25_000

Deliver = Callable[[list[memoryview]], None]


def tune(made: sockets.socket) -> None:
    """Let both ends of a stream send at once what they are given, and notice within 25 s that a host vanished."""
    if made.family == sockets.AF_UNIX:
        return
    made.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)
    made.setsockopt(sockets.SOL_SOCKET, sockets.SO_KEEPALIVE, 1)
    made.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPIDLE, 10)
    made.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPINTVL, 5)
    made.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPCNT, 3)
    made.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_USER_TIMEOUT, _LOST_MS)


def in_words(error: OSError) -> str:
    """Say why a connection was not made."""
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there"
    return "nobody answers there" if isinstance(error, TimeoutError) else str(error)


class Flow:
    """One connected stream.

    begin: called once bytes may go, over TLS when the peer has shown its certificate, and gives what is said first;
    shake: takes the peer's first bytes, of ``size``, and gives the inbox and the outbox, or how many bytes it takes
    next; lost: told why it broke; most_unread: messages that may wait for a peer that does not read; most_unsent: bytes
    that may, before the peer is heard no more until it has read: what came from it, and comes, waits meanwhile;
    most_at_once: messages delivered before others have a turn, so that what is made of them is counted in time;
    most_owed: calls that may be under way of those which began while bytes waited for the peer to read them.
    """

    def __init__(
        self,
        socket: sockets.socket | TlsSocket,
        *,
        size: int,
        begin: Callable[[], bytes],
        shake: Callable[[bytes], tuple[Inbox, Outbox] | int],
        deliver: Deliver,
        lost: Callable[[AsyncFlowError], None],
        most_unread: int = sys.maxsize,
        most_unsent: int = sys.maxsize,
        most_at_once: int = sys.maxsize,
        most_owed: int = sys.maxsize,
    ) -> None:
        self.closed = False
        self.outbox: Outbox | None = None
        self._socket = socket
        self._first = memoryview(bytearray(size))
        self._came = 0
        self._begin = begin
        self._shake = shake
        self._inbox: Inbox | None = None
        self._deliver = deliver
        self._lost = lost
        self._most_unread = most_unread
        self._most_unsent = most_unsent
        self._most_at_once = most_at_once
        self._most_owed = most_owed
        self._owed: set[Hashable] = set()
        self._hears = True
        self._unheard: list[list[memoryview]] = []
        self._resting = False
        self._writing = False
        self._tls = socket if isinstance(socket, TlsSocket) else None
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._secure)

    def close(self) -> None:
        """Close the stream at once."""
        if not self.closed:
            self.closed = True
            self._hears = False
            self._unheard.clear()
            self._owed.clear()
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            if self._inbox is not None:
                self._inbox.close()
            if self.outbox is not None:
                self.outbox.close()

    def send(self, key: Hashable, parts: Sequence[Buffer]) -> None:
        """Send a message after those before it; ``key`` names it. The peer must have shaken hands.

        Nothing more goes to a peer that does not read, which is lost.
        """
        outbox = self.outbox
        if outbox is None or self.closed:
            return
        if (whole := outbox.in_one(parts)) is None:
            if len(outbox) >= self._most_unread:
                self._fail(ProtocolError("a peer does not read what it asked for"))
                return
            outbox.push(key, parts)
            self.flush()
            return
        try:
            went = self._socket.send(whole)
        except BlockingIOError:
            went = 0
        except OSError as error:
            self._fail(PeerLost(f"the connection to the peer broke: {error}"))
            return
        if went < len(whole):
            outbox.keep(memoryview(whole)[went:])
            self.flush()
        elif self._tls is not None and not self._tls.flushed:
            self.flush()

    def flush(self) -> None:
        """Send what the stream takes now; the rest follows when it takes more."""
        outbox = self.outbox
        if outbox is None or self.closed:
            return
        try:
            while views := outbox.views():
                outbox.sent(self._socket.sendmsg(views))
            if self._tls is not None:
                self._tls.flush()
        except BlockingIOError:
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._socket, self.flush)
            if outbox.unsent > self._most_unsent:
                self._stop_hearing()
            return
        except OSError as error:
            self._fail(PeerLost(f"the connection to the peer broke: {error}"))
            return
        except BaseException as error:
            self._fail(PeerLost(f"a message could not be sent: {error!r}"))
            raise
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._socket)
        self._owed.clear()
        if not self._hears:  # but not from here: a handler that sends is to end before the next one begins
            self._loop.call_soon(self._hear_again)

    def begun(self, key: Hashable) -> None:
        """Note that a call of the peer is under way, whose answer will wait behind what it has not read."""
        if self.outbox is not None and not self.outbox.idle:
            self._owed.add(key)

    def ended(self, key: Hashable) -> None:
        """Note that a call of the peer is under way no more."""
        self._owed.discard(key)
        if not self._hears:
            self._loop.call_soon(self._hear_again)

    def _stop_hearing(self) -> None:
        """Hear the peer no more until it has read what it was sent, or a call of it has ended."""
        if self._hears:
            self._hears = False
            self._loop.remove_reader(self._socket)

    def _hear_again(self) -> None:
        """Go on with a peer that was not heard, where it has read enough."""
        if self.closed or self._hears or self.outbox is None:
            return
        some = len(self._owed) < self._most_owed and self.outbox.unsent <= self._most_unsent
        if some or self.outbox.idle:
            self._hears = True
            self._loop.add_reader(self._socket, self._read)
            self._read()

    def _secure(self) -> None:
        """Go on with the handshake of TLS, if it is spoken, and begin when that is done."""
        if self.closed:
            return
        try:
            if self._tls is not None and not self._tls.shake():
                self._loop.add_reader(self._socket, self._secure)
                return
            if first := self._begin():
                self._socket.send(first)
        except ProtocolError as wrong:
            self._fail(wrong)
        except OSError as error:
            self._fail(PeerLost(f"the connection to the peer broke: {error}"))
        else:
            self._loop.add_reader(self._socket, self._read)
            self._read()

    def _read(self) -> None:
        """Deliver what came, but not for ever."""
        if self.closed or self._resting:
            return
        try:
            if self._unheard:
                unheard, self._unheard = self._unheard, []
                self._pass_on(unheard)
            for _ in range(_READS):
                if self._unheard or not self._hears:
                    break
                inbox = self._inbox
                room = self._first[self._came :] if inbox is None else inbox.room()
                count = self._socket.recv_into(room)
                if not count:
                    self._fail(PeerLost("the connection to the peer broke"))
                elif inbox is None:
                    self._take_first(count)
                else:
                    self._pass_on(inbox.took(count))
                if count < len(room):
                    break
            else:
                if self._tls is not None:  # more may lie there, of which the event loop knows nothing
                    self._loop.call_soon(self._read)
        except BlockingIOError:
            pass
        except OSError as error:
            self._fail(PeerLost(f"the connection to the peer broke: {error}"))
        except ProtocolError as wrong:
            self._fail(wrong)
        except MemoryError:
            self._fail(ProtocolError("there is no memory for what a peer wants to send"))

    def _pass_on(self, whole: list[list[memoryview]]) -> None:
        """Deliver messages as long as the peer is heard, a few at once; those behind them wait."""
        for number, parts in enumerate(whole):
            if len(self._owed) >= self._most_owed:
                self._stop_hearing()
            if self._hears and number < self._most_at_once:
                self._deliver(parts)
            elif not self.closed:
                self._unheard.append(parts)
        if self._unheard and self._hears:
            self._resting = True
            self._loop.call_soon(self._rested)

    def _rested(self) -> None:
        """Go on with the messages that waited for others to have a turn."""
        self._resting = False
        self._read()

    def _take_first(self, count: int) -> None:
        """Take in bytes of the handshake."""
        self._came += count
        if self._came == len(self._first):
            shaken = self._shake(bytes(self._first))
            if isinstance(shaken, int):
                self._first, self._came = memoryview(bytearray(shaken)), 0
            else:
                self._inbox, self.outbox = shaken

    def _fail(self, why: AsyncFlowError) -> None:
        self.close()
        self._lost(why)
