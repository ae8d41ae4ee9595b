"""Listening sockets with a bounded number of connections: at the limit, an old connection is closed for a new one.

Invariants: while this process has no file descriptor left, one caller is served by a reserved descriptor, which is
reserved again as soon as that connection is closed. A caller that does not complete the handshake in time is cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
from collections.abc import Awaitable, Callable, Sequence

from asyncflow.errors import PeerLost
from asyncflow.rpc.connection import GREETING_S
from asyncflow.rpc.tls import PeerRefused, refusal

log = logging.getLogger(__name__)

_PAUSE_S = 0.1
_SHORTAGE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener:
    """Accepts connections.

    most, share: limits of concurrent connections, as a number and as a share of the process's file descriptors;
    handshake: called with each new connection; connected: returns the number of connections; make_room: closes the
    least useful one, and returns whether there was one; refused: called for each caller that was refused or cut off.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        *,
        most: int,
        share: float,
        handshake: Callable[[socket.socket], Awaitable[object]],
        connected: Callable[[], int],
        make_room: Callable[[], bool],
        refused: Callable[[PeerRefused], None],
    ) -> None:
        self._sockets = sockets
        self._most = min(most, int(resource.getrlimit(resource.RLIMIT_NOFILE)[0] * share))
        self._handshake = handshake
        self._connected = connected
        self._make_room = make_room
        self._refused = refused
        self._handshakes: dict[asyncio.Task[None], None] = {}
        self._reserve = socket.socket()
        self._closed = False
        self._loop = asyncio.get_running_loop()
        for listening in sockets:
            listening.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Stop accepting, and cut off callers whose handshake is not complete."""
        if not self._closed:
            self._closed = True
            for listening in self._sockets:
                self._loop.remove_reader(listening)
                listening.close()
            self._reserve.close()
            for handshake in self._handshakes:
                handshake.cancel()

    def _listen(self) -> None:
        if not self._closed:
            self._hold_reserve()
            for listening in self._sockets:
                self._loop.add_reader(listening, self._accept, listening)

    def _hold_reserve(self) -> None:
        if self._reserve.fileno() < 0 and not self._closed:
            with contextlib.suppress(OSError):
                self._reserve = socket.socket()

    def _accept(self, listening: socket.socket) -> None:
        """Accept one caller; the event loop calls again for the next one, and for one that waits for a descriptor."""
        try:
            caller = listening.accept()[0]
        except OSError as error:
            if error.errno in _SHORTAGE and not self._make_room():
                for each in self._sockets:  # waiting callers must not keep the loop busy
                    self._loop.remove_reader(each)
                self._loop.call_later(_PAUSE_S, self._listen)
                self._reserve.close()
                with contextlib.suppress(OSError):
                    self._start_handshake(_ReservedConnection(listening.accept()[0], closed=self._hold_reserve))
            return
        if self._connected() + len(self._handshakes) < self._most or self._make_room():
            self._start_handshake(caller)
        else:
            caller.close()
            self._refused(PeerRefused("there are too many connections", reason="full"))

    def _start_handshake(self, caller: socket.socket) -> None:
        caller.setblocking(False)
        handshake = self._loop.create_task(self._handshake_in_time(caller), name="handshake with a caller")
        self._handshakes[handshake] = None
        handshake.add_done_callback(self._handshake_done)

    async def _handshake_in_time(self, caller: socket.socket) -> None:
        try:
            async with asyncio.timeout(GREETING_S):
                await self._handshake(caller)
        except BaseException:
            caller.close()
            raise

    def _handshake_done(self, handshake: asyncio.Task[None]) -> None:
        self._handshakes.pop(handshake, None)
        if handshake.cancelled():
            if not self._closed:
                self._refused(PeerRefused("there are too many connections", reason="full"))
        elif (error := handshake.exception()) is not None and not isinstance(error, PeerLost):
            self._refused(refusal(error))

    def end_handshake(self) -> bool:
        """Cut off the oldest handshake, and return whether there was one."""
        oldest = next(iter(self._handshakes), None)
        if oldest is not None:
            del self._handshakes[oldest]
            oldest.cancel()
        return oldest is not None


class _ReservedConnection(socket.socket):
    """A connection accepted with the reserved descriptor. closed: called as soon as the descriptor is free again."""

    def __init__(self, accepted: socket.socket, *, closed: Callable[[], None]) -> None:
        super().__init__(fileno=accepted.detach())
        self._when_closed = closed

    def close(self) -> None:
        super().close()
        self._when_closed()
