"""The first message of each side of a connection: who calls, then which server answers.

    caller                                                     answerer
    magic, length, the caller's URI              ->
                                                 <-            magic, server

The URI (``identity.ProcessIdentity.uri``) is empty where the caller has no certificate. Over TLS it must be the one
that its certificate names; from a Unix socket it is believed, since its kernel says that the same user calls, who
could read the certificates anyway. ``server`` says which server answers (``hosts.server_of``), so that whoever
dialled another one, whose port has been used again, goes no further.

Invariant: nothing here is a proof: that is TLS's, or the kernel's.
"""

from __future__ import annotations

from asyncflow.errors import ProtocolError
from asyncflow.identity import ProcessIdentity
from asyncflow.net.stream.server import ANYBODY, SERVER_SIZE

_MAGIC = b"AFh4"
_TLS = b"\x16\x03"
HEAD_SIZE = len(_MAGIC) + 1
"""Bytes of what is read first of a caller."""
WELCOME_SIZE = len(_MAGIC) + SERVER_SIZE
_LONGEST = 255


def hello(process: ProcessIdentity | None) -> bytes:
    """Return what a caller says. Raises ProtocolError where its name is too long to be said."""
    uri = process.uri.encode() if process is not None else b""
    if len(uri) > _LONGEST:
        raise ProtocolError(f"{process} of job {process and process.job} has too long a name")
    return _MAGIC + bytes([len(uri)]) + uri


def rest_of_hello(head: bytes) -> int:
    """Return how many bytes follow the first ``HEAD_SIZE`` of a caller. Raises ProtocolError where it is none."""
    if head.startswith(_MAGIC):
        return head[-1]
    what = "speaks TLS, and this process has no certificate" if head.startswith(_TLS) else "is no part of this protocol"
    raise ProtocolError(f"the peer {what}", hint="Does one side have a certificate, and the other none?")


def caller(rest: bytes) -> ProcessIdentity | None:
    """Return who says to call; None where it does not say. Raises ProtocolError where that is no name."""
    if not rest:
        return None
    found = ProcessIdentity.of(rest.decode(errors="replace"))
    if found is None:
        raise ProtocolError("the peer calls itself by what is no name")
    return found


def welcome(server: bytes) -> bytes:
    """Return what a server says that lets a caller in."""
    return _MAGIC + server


def check_welcome(came: bytes, *, dialled: bytes) -> None:
    """Take in what a server says. Raises ProtocolError where it is not the one that was dialled."""
    if not came.startswith(_MAGIC):
        raise ProtocolError("the peer is no part of this protocol")
    if dialled not in (ANYBODY, came[len(_MAGIC) :]):
        raise ProtocolError("another server is at this address now", hint="The one that was dialled is gone")
