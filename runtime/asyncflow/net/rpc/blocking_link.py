"""A stream for one thread at a time that blocks: the messages of ``wire``, no event loop.

The thread sleeps in the socket itself, at most ``LOOK_S`` at once, and then looks whether what it waits for can still
come. So a call costs one send and one receive, and a few more looks where answers come soon (``lookout``).

Invariant: a link that broke, on which an answer did not come in time, or that could not be sent whole, is never used
again.
"""

from __future__ import annotations

import contextlib
import socket as sockets
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, PeerLost, ProtocolError
from asyncflow.net.arena import unix
from asyncflow.net.frames import Buffer
from asyncflow.net.hosts import host_and_port, look_up, server_of
from asyncflow.net.keys import Keys
from asyncflow.net.lookout import Lookout
from asyncflow.net.retry import delays
from asyncflow.net.rpc import wire
from asyncflow.net.rpc.flow import SILENT, UNSHAKEN, in_words, tune
from asyncflow.net.rpc.staging import staging
from asyncflow.net.stream.handshake import WELCOME_SIZE
from asyncflow.net.stream.inbox import Inbox
from asyncflow.net.stream.outbox import Outbox

T = TypeVar("T")
LOOK_S = 0.1
"""How long a thread sleeps at most before it looks whether what it waits for can still come."""
_CONNECT_S = 3.0
_SHAKE_S = 10.0


class BlockingLink:
    """One stream to ``address``, for whoever holds it.

    stays: whether the peer is still to be found there, asked while it is dialled in vain; gone: why it is used no more,
    if that is so; state: how the connection is, in words.
    """

    def __init__(
        self,
        address: str,
        *,
        keys: Keys | None,
        max_message: int,
        stays: Callable[[], bool] = lambda: True,
    ) -> None:
        self.address = address
        self.gone: AsyncFlowError | None = None
        self.state = "the connection was not made"
        self._near = True
        self._to = host_and_port(address)
        self._keys = keys
        self._most = max_message
        self._stays = stays
        self._socket: sockets.socket | None = None
        self._inbox: Inbox | None = None
        self._outbox = Outbox(seal=None)
        self._ready: list[list[memoryview]] = []
        self._waits_s = 0.0
        self._lookout = Lookout()

    def send(
        self, call: int, method: str, request: msgspec.Struct, frames: Sequence[Buffer], *, deadline: float
    ) -> None:
        """Send a call as soon as the peer is connected. Raises DeadlineExceeded, PeerLost, ProtocolError."""
        body = wire.encode_request(method, request)
        if frames:
            wire.check_size("the call of", method, body, frames, limit=self._most)
        socket = self._socket or self._connected(method, deadline)
        left = deadline - time.monotonic()
        if left <= 0:
            raise self._late(method)
        header = wire.encode(wire.Call(call, method, min(left, wire.MAX_TIMEOUT), len(frames)))
        parts = [header, body, *frames]
        self._lookout.expect()
        try:
            if (whole := self._outbox.in_one(parts)) is None:
                self._outbox.push(call, parts)
            elif (went := _took(socket.send, whole)) == len(whole):
                return
            else:
                self._outbox.keep(memoryview(whole)[went:])
            while not self._outbox.idle:
                self._left(method, deadline)
                self._outbox.sent(went := _took(socket.sendmsg, self._outbox.views()))
                while not went and self._hear(socket, sockets.MSG_DONTWAIT):  # until then it may not hear this
                    self._left(method, deadline)
        except OSError as error:
            raise self._broken(error) from error
        except BaseException as error:
            self.gone = self._broken(f"a message could not be sent: {error!r}")
            self.close()
            raise

    def forget(self, call: int) -> None:
        """Tell the peer, if it can be told at once, that nobody waits for ``call`` any more."""
        if self._socket is None:
            return
        self._outbox.push(("cancel", call), [wire.encode(wire.Cancel(call))])
        self._send_now(self._socket)

    def receive(self, seconds: float) -> list[memoryview]:
        """Return the next message, waiting up to ``seconds``; nothing if none came. Raises PeerLost, ProtocolError."""
        if self.gone is not None:
            raise self.gone
        if self._ready:
            return self._ready.pop(0)
        if self._socket is None:
            raise PeerLost("the connection was not made", where=self.address)
        until = time.monotonic() + seconds
        look = partial(self._hear, self._socket, sockets.MSG_DONTWAIT)
        sleep = partial(self._hear, self._socket, self._patience(seconds))
        try:
            while self._lookout.wait(look, sleep) if seconds > 0 else look():
                if self._ready:
                    return self._ready.pop(0)
                if time.monotonic() > until:
                    break
        except OSError as error:
            raise self._broken(error) from error
        return []

    @property
    def ready(self) -> bool:
        """Whether a message is here already, of which the socket knows nothing any more."""
        return bool(self._ready)

    @property
    def socket(self) -> sockets.socket | None:
        """What to poll when there are several links to wait for."""
        return self._socket

    def close(self) -> None:
        """Close it; what was not sent is dropped."""
        if self._socket is not None:
            self._socket.close()

    def _hear(self, socket: sockets.socket, flags: int) -> bool:
        """Take in some bytes, and say whether any came. Raises OSError, PeerLost."""
        assert self._inbox is not None
        try:
            count = socket.recv_into(self._inbox.room(), 0, flags)
            if not count:
                raise self._broken("it was closed")
            self._ready += self._inbox.took(count)
        except BlockingIOError:
            return False
        except ProtocolError as wrong:
            raise self._broken(wrong) from wrong
        return True

    def _send_now(self, socket: sockets.socket) -> None:
        """Send what goes at once; where the stream broke, whoever receives will see."""
        with contextlib.suppress(OSError):
            self._outbox.sent(socket.sendmsg(self._outbox.views(), [], sockets.MSG_DONTWAIT))

    def _patience(self, seconds: float) -> int:
        """Let the socket wait for so long; give the flags of the call."""
        if seconds <= 0:
            return sockets.MSG_DONTWAIT
        if self._socket is not None and seconds != self._waits_s:
            self._waits_s = seconds
            self._socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVTIMEO, _timeval(seconds))
        return 0

    def _connected(self, method: str, deadline: float) -> sockets.socket:
        """Try until the stream is there."""
        waits = delays()
        while True:
            try:
                socket = self._dialled(method, deadline)
                try:
                    socket.settimeout(min(_SHAKE_S, self._left(method, deadline)))
                    self._shake(socket)
                except BaseException:
                    socket.close()
                    raise
            except ProtocolError as wrong:
                self.state = str(wrong)
            except OSError as error:
                self.state = in_words(error)
            else:
                socket.settimeout(None)
                socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_SNDTIMEO, _timeval(LOOK_S))
                self._socket, self.state = socket, SILENT
                return socket
            self._rest(next(waits), method, deadline)

    def _rest(self, seconds: float, method: str, deadline: float) -> None:
        """Sleep, as long as the peer is still to be found there."""
        until = time.monotonic() + seconds
        while True:
            if not self._stays():
                raise PeerLost("the peer moved before it was told anything", where=self.address)
            if (rest := until - time.monotonic()) <= 0:
                return
            time.sleep(min(rest, LOOK_S, self._left(method, deadline)))

    def _dialled(self, method: str, deadline: float) -> sockets.socket:
        """Connect to the peer on this host, or to the first place of its name that answers."""
        nearby = unix.dialled(self.address) if self._near else None
        self._near = nearby is None
        if nearby is not None:
            return nearby
        host, port = self._to
        try:
            places = look_up(host, port).result(min(_CONNECT_S, self._left(method, deadline)))
        except TimeoutError:
            raise OSError(f"the name {host!r} is still looked up") from None
        refused: OSError | None = None
        for family, place in places:
            socket = sockets.socket(family)
            try:
                socket.settimeout(min(_CONNECT_S, self._left(method, deadline)))
                socket.connect(place)
            except OSError as error:
                socket.close()
                refused = refused or error
            except BaseException:
                socket.close()
                raise
            else:
                return socket
        raise refused or OSError(f"the name {host!r} has no address")

    def _shake(self, socket: sockets.socket) -> None:
        tune(socket)
        handshake = unix.shaking(socket, self._keys, server=server_of(self.address))
        socket.sendall(handshake.hello())
        welcome = b""
        while len(welcome) < WELCOME_SIZE:
            came = socket.recv(WELCOME_SIZE - len(welcome))
            if not came:
                raise ProtocolError(UNSHAKEN)
            welcome += came
        socket.sendall(handshake.welcomed(welcome))
        self._inbox, self._outbox = unix.boxes(socket, handshake, most=self._most, staging=staging())

    def _left(self, method: str, deadline: float) -> float:
        left = deadline - time.monotonic()
        if left <= 0:
            raise self._late(method)
        return left

    def _late(self, method: str) -> DeadlineExceeded:
        return DeadlineExceeded(f"{method} was not sent in time: {self.state}", where=self.address)

    def _broken(self, why: object) -> PeerLost:
        hint = "Nobody knows whether the call was done"
        return PeerLost(f"the connection to the peer broke: {why}", where=self.address, hint=hint)


def _took(send: Callable[[T], int], what: T) -> int:
    """Send, and give how many bytes went: none where the peer read none for as long as the socket may wait."""
    try:
        return send(what)
    except BlockingIOError:
        return 0


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), max(1, int(seconds % 1 * 1e6)))
