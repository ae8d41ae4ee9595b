"""One connected stream in an asyncio loop.

Invariants: nothing here ever blocks the loop, and no peer keeps it for more than a few reads at a time; a stream that
broke, or of which a message could not be sent whole, is never used again.
"""

from __future__ import annotations

import asyncio
import socket as sockets
import sys
from collections.abc import Callable, Hashable, Sequence

from asyncflow.errors import AsyncFlowError, PeerLost, ProtocolError
from asyncflow.net.frames import Buffer
from asyncflow.net.stream.inbox import Inbox
from asyncflow.net.stream.outbox import Outbox

SILENT = "it is connected and silent: stopped, overloaded, or it waits for something itself"
UNSHAKEN = "the handshake failed: do both sides hold the key of this job?"
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

    shake: takes the peer's first bytes, of ``size``, and gives the inbox and the outbox, or how many bytes it takes
    next; lost: told why it broke; most_unread: messages that may wait for a peer that does not read; most_unsent: bytes
    that may, before the peer is heard no more until all went: what came from it, and comes, waits meanwhile.
    """

    def __init__(
        self,
        socket: sockets.socket,
        *,
        size: int,
        shake: Callable[[bytes], tuple[Inbox, Outbox] | int],
        deliver: Deliver,
        lost: Callable[[AsyncFlowError], None],
        most_unread: int = sys.maxsize,
        most_unsent: int = sys.maxsize,
    ) -> None:
        self.closed = False
        self.outbox: Outbox | None = None
        self._socket = socket
        self._first = memoryview(bytearray(size))
        self._came = 0
        self._shake = shake
        self._inbox: Inbox | None = None
        self._deliver = deliver
        self._lost = lost
        self._most_unread = most_unread
        self._most_unsent = most_unsent
        self._hears = True
        self._unheard: list[list[memoryview]] = []
        self._writing = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(socket, self._read)

    def close(self) -> None:
        """Close the stream at once."""
        if not self.closed:
            self.closed = True
            self._hears = False
            self._unheard.clear()
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

    def flush(self) -> None:
        """Send what the stream takes now; the rest follows when it takes more."""
        outbox = self.outbox
        if outbox is None or self.closed:
            return
        try:
            while views := outbox.views():
                outbox.sent(self._socket.sendmsg(views))
        except BlockingIOError:
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._socket, self.flush)
            if self._hears and outbox.unsent > self._most_unsent:
                self._hears = False
                self._loop.remove_reader(self._socket)
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
        if not self._hears:  # but not from here: a handler that sends is to end before the next one begins
            self._loop.call_soon(self._hear_again)

    def _hear_again(self) -> None:
        """Go on with a peer that was not heard, where all has gone."""
        if not self.closed and not self._hears and self.outbox is not None and self.outbox.idle:
            self._hears = True
            self._loop.add_reader(self._socket, self._read)
            self._read()

    def _read(self) -> None:
        """Deliver what came, but not for ever."""
        try:
            if self._unheard:
                unheard, self._unheard = self._unheard, []
                self._pass_on(unheard)
            for _ in range(_READS):
                if not self._hears:
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
        except BlockingIOError:
            pass
        except OSError as error:
            self._fail(PeerLost(f"the connection to the peer broke: {error}"))
        except ProtocolError as wrong:
            self._fail(wrong)
        except MemoryError:
            self._fail(ProtocolError("there is no memory for what a peer wants to send"))

    def _pass_on(self, whole: list[list[memoryview]]) -> None:
        """Deliver messages as long as the peer is heard; those behind them wait."""
        for parts in whole:
            if self._hears:
                self._deliver(parts)
            elif not self.closed:
                self._unheard.append(parts)

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
