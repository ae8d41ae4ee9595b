"""Unix sockets beside those of TCP, for peers of one host: with its first bytes a caller hands over an arena
for each direction, first the one that it fills.

A server listens at a name in the abstract namespace that says its address; who dials that address tries the name first.
The namespace is that of the network namespace: who reaches the name is on this host, and elsewhere there is no such
name. Nothing of it is left when its process ends.

Invariants: both sides have checked that the other runs as the same user, else they do without; a caller that cannot
have this has lost nothing, it goes on over TCP; no other files go over such a socket.
"""

from __future__ import annotations

import functools
import os
import socket
import struct
import weakref
from pathlib import Path
from typing import Any

from asyncflow.errors import ProtocolError
from asyncflow.net.arena import memfd
from asyncflow.net.arena.loans import Incoming
from asyncflow.net.arena.messages import ArenaInbox, ArenaOutbox
from asyncflow.net.stream.inbox import Inbox
from asyncflow.net.stream.outbox import Outbox

SHARED_MEMORY_ENV = "ASYNCFLOW_SHARED_MEMORY"
"""Variable that switches shared memory off where it is ``off``."""
_MAGIC = b"AFm3"
_LONGEST_NAME = 107
_BACKLOG = 1024
_CREDENTIALS = struct.Struct("3i")


class ArenaSocket(socket.socket):
    """A stream socket to a peer of this host. arenas: none before they came."""

    arenas: tuple[memfd.Outgoing, Incoming] | None = None

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """As of any socket, but the arenas are taken in before the first bytes."""
        if self.arenas is None:
            came, files, _, _ = socket.recv_fds(self, len(_MAGIC), 2, flags | socket.MSG_CMSG_CLOEXEC)
            if not came:
                return 0
            try:
                if came != _MAGIC or len(files) != 2:
                    raise ProtocolError("a peer of this host brought no arenas")
                for file in files:
                    memfd.check(file)
            except ProtocolError:
                for file in files:
                    os.close(file)
                raise
            self._have(outgoing=files[1], incoming=files[0])
        return super().recv_into(buffer, nbytes, flags)

    def close(self) -> None:
        """Close it, and the arenas."""
        super().close()
        for side in self.arenas or ():
            side.close()

    def hand_over(self) -> None:
        """Begin, as the caller, with new arenas. Raises OSError."""
        filled = memfd.made()
        try:
            emptied = memfd.made()
        except BaseException:
            os.close(filled)
            raise
        self._have(outgoing=filled, incoming=emptied)
        socket.send_fds(self, [_MAGIC], [filled, emptied])

    def _have(self, *, outgoing: int, incoming: int) -> None:
        self.arenas = memfd.Outgoing(outgoing), Incoming(incoming)
        for side in self.arenas:
            weakref.finalize(self, side.close).atexit = False  # what ends with the process needs no closing


def boxes(peer: object, *, most: int, staging: memoryview) -> tuple[Inbox, Outbox]:
    """Return what messages come through and go through. most, staging: see ``Inbox``."""
    if isinstance(peer, ArenaSocket) and peer.arenas is not None:
        outgoing, incoming = peer.arenas
        return ArenaInbox(incoming, most=most, staging=staging), ArenaOutbox(outgoing)
    return Inbox(most=most, staging=staging), Outbox()


def dialled(address: str) -> ArenaSocket | None:
    """Connect to whoever listens at ``address`` on this host, without waiting; None where that is nobody."""
    name = _name(address)
    if name is None:
        return None
    made = ArenaSocket(socket.AF_UNIX)
    try:
        made.setblocking(False)
        made.connect(name)
        if _is_ours(made):
            made.hand_over()
            return made
    except OSError:
        pass
    made.close()
    return None


def listening(address: str) -> socket.socket | None:
    """Listen to callers of this host that dial ``address``; None where that cannot be."""
    name = _name(address)
    if name is None:
        return None
    made = socket.socket(socket.AF_UNIX)
    try:
        made.setblocking(False)
        made.bind(name)
        made.listen(_BACKLOG)
    except OSError:
        made.close()
        return None
    return made


def accepted(caller: socket.socket) -> ArenaSocket | None:
    """Take in a caller of this host; close it and return None where it runs as another user."""
    if not _is_ours(caller):
        caller.close()
        return None
    return ArenaSocket(fileno=caller.detach())


def _is_ours(peer: socket.socket) -> bool:
    """Whether the peer runs as this user, and that can be known: users without a number here share one."""
    found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(found)
    return bool(user == os.geteuid() and user != _nobody())


@functools.cache
def _nobody() -> int:
    """Return the number by which users are seen that have none in this namespace."""
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 65534


def _name(address: str) -> bytes | None:
    if os.environ.get(SHARED_MEMORY_ENV) == "off" or not hasattr(os, "memfd_create"):
        return None
    name = f"\0asyncflow/{address.partition('://')[2]}".encode()
    return name if len(name) <= _LONGEST_NAME else None
