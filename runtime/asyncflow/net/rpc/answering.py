"""Where streams are answered: one listening socket, one more for callers of this host, and all who connected.

Invariants: no connection over TLS outlives the certificate that it began with; a peer that has not said who it is in
time, sends what is no message, or leaves too many answers unread is cut off; one for which too many bytes lie unread is
heard no more until they went; and nobody else notices. Where there are too many peers, or no descriptor is left, those
make room first that have not said who they are, the oldest of them first, then the one that has been idle for longest.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import itertools
import resource
import socket as sockets
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from asyncflow.errors import AsyncFlowError, ProtocolError
from asyncflow.identity import ProcessIdentity
from asyncflow.net import tls
from asyncflow.net.arena import unix
from asyncflow.net.frames import Buffer
from asyncflow.net.rpc.flow import Flow, tune
from asyncflow.net.rpc.staging import staging
from asyncflow.net.stream import handshake
from asyncflow.net.stream.inbox import Inbox
from asyncflow.net.stream.outbox import Outbox
from asyncflow.net.tls import Credentials, Stranger, TlsSocket

MAX_PEERS = 8192
"""Connections of one server; fewer where they would be more than three quarters of the process's descriptors."""
_MAX_UNREAD = 4096
_MOST_UNSENT = 64 << 20
"""Bytes of answers from which on a peer is heard no more until it has read them; one answer may have more."""
_MOST_AT_ONCE = 2
"""Calls of a peer that begin in one turn of the loop, as what they answer counts as unsent only when it is there."""
_MOST_OWED = 2
"""Calls of a peer that are under way at once of those that began while it had not read what it was sent."""
_SHAKE_S = 10.0
_IDLE_S = 60.0
"""Seconds without a message after which a peer may have to make room; it connects again when it next calls."""
_FULL_S = 0.1
_SHORTAGE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

LONGEST_S = 2 * 86_400.0
"""Seconds that a connection over TLS may last; who calls makes another before that (``link.FRESH_S``)."""
EXPIRED_MEANWHILE = "the certificate with which a connection began has expired"

FULL = "full"
OTHER_USER = "other_user"


@dataclass(slots=True)
class _Peer:
    """One connection.

    heard: when; caller: who it is, None while that is not known or there are no certificates; end: when it must end.
    """

    flow: Flow
    heard: float
    known: bool = False
    caller: ProcessIdentity | None = None
    end: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Close the connection."""
        if self.end is not None:
            self.end.cancel()
        self.flow.close()


class Answering:
    """Listens for streams. deliver: gets each message, and the number of the peer that sent it.

    nearby: listens to callers of this host, if there is such a socket; server: which one this is; refused: told
    why a peer was cut off for good, and by which reason that is counted; busy: whether a call of a peer is under way;
    credentials: of this process, None for plain text; unnamed: see ``Access``; most: bytes of one message.
    """

    def __init__(
        self,
        listening: sockets.socket,
        *,
        nearby: sockets.socket | None,
        server: bytes,
        credentials: Credentials | None,
        unnamed: str,
        most: int,
        deliver: Callable[[int, list[memoryview]], None],
        refused: Callable[[str, str], None],
        busy: Callable[[int], bool],
    ) -> None:
        self.closed = False
        self._listening = [listening] if nearby is None else [listening, nearby]
        self._server = server
        self._credentials = credentials
        self._unnamed = unnamed
        self._most = most
        self._most_peers = min(MAX_PEERS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4)
        self._deliver = deliver
        self._refused = refused
        self._busy = busy
        self._peers: dict[int, _Peer] = {}
        self._numbers = itertools.count()
        self._staging = staging()
        self._loop = asyncio.get_running_loop()
        self._listen()

    def caller(self, peer: int) -> ProcessIdentity | None:
        """Return who ``peer`` is; None where nobody has to say who it is."""
        return self._peers[peer].caller

    def send(self, peer: int, key: Hashable, parts: Sequence[Buffer]) -> None:
        """Send ``parts`` to ``peer``, unless it is gone; ``key`` names the message."""
        if (found := self._peers.get(peer)) is not None:
            found.flow.send(key, parts)

    def begun(self, peer: int, key: Hashable) -> None:
        """Note that a call of ``peer`` is under way."""
        if (found := self._peers.get(peer)) is not None:
            found.flow.begun(key)

    def ended(self, peer: int, key: Hashable) -> None:
        """Note that a call of ``peer`` is under way no more."""
        if (found := self._peers.get(peer)) is not None:
            found.flow.ended(key)

    def close(self) -> None:
        """Close all streams at once."""
        if not self.closed:
            self.closed = True
            for listening in self._listening:
                self._loop.remove_reader(listening)
                listening.close()
            for peer in self._peers.values():
                peer.close()
            self._peers.clear()

    def _listen(self) -> None:
        for listening in self._listening:
            if not self.closed:
                self._loop.add_reader(listening, self._accept, listening)

    def _accept(self, listening: sockets.socket) -> None:
        try:
            socket, _ = listening.accept()
        except OSError as error:
            if error.errno in _SHORTAGE and not self._make_room("no descriptor is left"):
                self._loop.remove_reader(listening)  # those who wait to be let in must not keep the loop busy
                self._loop.call_later(_FULL_S, self._listen)
            return
        if len(self._peers) >= self._most_peers and not self._make_room("too many peers"):
            socket.close()
            self._refused("too many peers", FULL)
            return
        socket.setblocking(False)
        tune(socket)
        if listening.family == sockets.AF_UNIX:
            known = unix.accepted(socket)
            if known is None:
                self._refused("a caller of this host runs as another user", OTHER_USER)
                return
            socket = known
        peer = next(self._numbers)
        stream: sockets.socket | TlsSocket = socket
        if self._credentials is not None and socket.family != sockets.AF_UNIX:
            stream = self._credentials.accepted(socket)
        flow = Flow(
            stream,
            size=handshake.HEAD_SIZE,
            begin=functools.partial(self._meet, peer, stream),
            shake=self._greeting(peer, stream),
            deliver=functools.partial(self._heard, peer),
            lost=lambda why: self._forget(peer, why),
            most_unread=_MAX_UNREAD,
            most_unsent=_MOST_UNSENT,
            most_at_once=_MOST_AT_ONCE,
            most_owed=_MOST_OWED,
        )
        self._peers[peer] = _Peer(flow, self._loop.time())
        self._loop.call_later(_SHAKE_S, self._cut_off_unknown, peer)

    def _meet(self, peer: int, stream: sockets.socket | TlsSocket) -> bytes:
        """Take note of whom the peer's certificate names, and say nothing first."""
        if self._credentials is not None and isinstance(stream, TlsSocket):
            self._peers[peer].caller = self._credentials.peer(stream)
        return b""

    def _greeting(self, peer: int, stream: sockets.socket | TlsSocket) -> Callable[[bytes], tuple[Inbox, Outbox] | int]:
        head = True

        def shake(came: bytes) -> tuple[Inbox, Outbox] | int:
            nonlocal head
            if head and (rest := handshake.rest_of_hello(came)):
                head = False
                return rest
            said = handshake.caller(b"" if head else came)
            self._know(self._peers[peer], said, over_tls=isinstance(stream, TlsSocket))
            if isinstance(stream, TlsSocket):
                self._limit(peer, tls.expires_in(stream))
            welcome = handshake.welcome(self._server)
            if stream.send(welcome) < len(welcome):
                raise ProtocolError("a peer takes no welcome")
            return unix.boxes(stream, most=self._most, staging=self._staging)

        return shake

    def _know(self, peer: _Peer, said: ProcessIdentity | None, *, over_tls: bool) -> None:
        """Let a peer in as whom it says it is. Raises Stranger where its certificate, or the job, says otherwise.

        Who says nothing from this host, as the same user, is let in by the role of ``unnamed``.
        """
        peer.known = True
        if self._credentials is None:
            return
        job = self._credentials.process.job
        if over_tls and said != peer.caller:
            what = f"the peer calls itself {said}, but its certificate is of {peer.caller}"
            raise Stranger(what, reason=tls.NO_IDENTITY)
        peer.caller = said or ProcessIdentity(job, self._unnamed, 0)
        if peer.caller.job != job:
            raise Stranger(f"the peer is {said}, of another job", reason=tls.OTHER_JOB)

    def _limit(self, peer: int, expires_s: float) -> None:
        """Have a connection end when the certificate that it began with expires, or is two days old."""
        why, reason = (EXPIRED_MEANWHILE, tls.EXPIRED) if expires_s < LONGEST_S else ("a connection is too old", "old")
        after = min(expires_s, LONGEST_S)
        self._peers[peer].end = self._loop.call_later(after, self._cut_off, peer, why, reason)

    def _heard(self, peer: int, parts: list[memoryview]) -> None:
        self._peers[peer].heard = self._loop.time()
        self._deliver(peer, parts)

    def _make_room(self, why: str) -> bool:
        """Cut off the peer that is missed least, and return whether there was one."""
        now = self._loop.time()
        unknown = next((number for number, peer in self._peers.items() if not peer.known), None)
        if unknown is not None:
            self._cut_off(unknown, why, FULL)
            return True
        idle = [(peer.heard, number) for number, peer in self._peers.items() if now - peer.heard >= _IDLE_S]
        for _, number in sorted(idle):
            if not self._busy(number):
                self._cut_off(number, why, FULL)
                return True
        return False

    def _cut_off_unknown(self, peer: int) -> None:
        if peer in self._peers and not self._peers[peer].known:
            self._cut_off(peer, "a peer did not say who it is in time", "late")

    def _cut_off(self, peer: int, why: str, reason: str) -> None:
        self._peers.pop(peer).close()
        self._refused(why, reason)

    def _forget(self, peer: int, why: AsyncFlowError) -> None:
        if (found := self._peers.pop(peer, None)) is None:
            return
        found.close()
        if isinstance(why, ProtocolError):
            self._refused(str(why), why.reason if isinstance(why, Stranger) else "protocol")
