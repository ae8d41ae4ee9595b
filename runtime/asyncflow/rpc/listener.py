"""Sockets that listen, within bounds: where there are too many connections, others make room for a new one.

Invariants: while this process has no descriptor left, one caller is served by the descriptor held in reserve, which is
held again as soon as that connection is closed; a caller that does not shake hands in time is cut off.
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

    most, share: connections at once, and the most of the process's descriptors for them; meet: shakes hands with a
    caller; connected: how many have; make_room: ends the connection that is missed least, and returns whether there was
    one; refused: learns of each caller that was refused or cut off.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        *,
        most: int,
        share: float,
        meet: Callable[[socket.socket], Awaitable[object]],
        connected: Callable[[], int],
        make_room: Callable[[], bool],
        refused: Callable[[PeerRefused], None],
    ) -> None:
        self._sockets = sockets
        self._most = min(most, int(resource.getrlimit(resource.RLIMIT_NOFILE)[0] * share))
        self._meet = meet
        self._connected = connected
        self._make_room = make_room
        self._refused = refused
        self._meeting: dict[asyncio.Task[None], None] = {}
        self._reserve = socket.socket()
        self._closed = False
        self._loop = asyncio.get_running_loop()
        for listening in sockets:
            listening.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Accept nobody any more, and cut off who has not shaken hands."""
        if not self._closed:
            self._closed = True
            for listening in self._sockets:
                self._loop.remove_reader(listening)
                listening.close()
            self._reserve.close()
            for meeting in self._meeting:
                meeting.cancel()

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
        """Accept one caller; the event loop comes back for the others, and for one who waits for a descriptor."""
        try:
            caller = listening.accept()[0]
        except OSError as error:
            if error.errno in _SHORTAGE and not self._make_room():
                for each in self._sockets:  # those who wait to be let in must not keep the loop busy
                    self._loop.remove_reader(each)
                self._loop.call_later(_PAUSE_S, self._listen)
                self._reserve.close()
                with contextlib.suppress(OSError):
                    self._begin(_ByReserve(listening.accept()[0], closed=self._hold_reserve))
            return
        if self._connected() + len(self._meeting) < self._most or self._make_room():
            self._begin(caller)
        else:
            caller.close()
            self._refused(PeerRefused("there are too many connections", reason="full"))

    def _begin(self, caller: socket.socket) -> None:
        caller.setblocking(False)
        meeting = self._loop.create_task(self._met(caller), name="meet a caller")
        self._meeting[meeting] = None
        meeting.add_done_callback(self._done)

    async def _met(self, caller: socket.socket) -> None:
        try:
            async with asyncio.timeout(GREETING_S):
                await self._meet(caller)
        except BaseException:
            caller.close()
            raise

    def _done(self, meeting: asyncio.Task[None]) -> None:
        self._meeting.pop(meeting, None)
        if meeting.cancelled():
            if not self._closed:
                self._refused(PeerRefused("there are too many connections", reason="full"))
        elif (error := meeting.exception()) is not None and not isinstance(error, PeerLost):
            self._refused(refusal(error))

    def end_handshake(self) -> bool:
        """Cut off who has been shaking hands for longest, and return whether there was one."""
        oldest = next(iter(self._meeting), None)
        if oldest is not None:
            del self._meeting[oldest]
            oldest.cancel()
        return oldest is not None


class _ByReserve(socket.socket):
    """A connection accepted by the descriptor in reserve. closed: called as soon as that is free again."""

    def __init__(self, accepted: socket.socket, *, closed: Callable[[], None]) -> None:
        super().__init__(fileno=accepted.detach())
        self._when_closed = closed

    def close(self) -> None:
        super().close()
        self._when_closed()
