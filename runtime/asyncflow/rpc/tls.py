"""TLS 1.3 between processes of one job: each side shows a certificate of the job's authority, and names itself by it.

A process has its credentials in a folder of three files, ``ca.crt``, ``tls.crt`` and ``tls.key``, which whoever issues
certificates replaces before they expire. They are read again when they change. A connection that is there already goes
on with what it began with; there is no session to resume, so each new one proves who it is.

Invariants: nothing but TLS 1.3 is spoken, and nothing is exchanged with a peer without a certificate that is valid now
and was signed by the authority of this job; a set of files that cannot be used, such as one that is half written, is
never used, and the last good set stays in use meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from asyncflow.api.names import CERTIFICATE_FILES, INSECURE_ENV, TLS_DIR, TLS_ENV
from asyncflow.durable import write_whole
from asyncflow.errors import AsyncFlowError, ManifestError, ProtocolError, Refused
from asyncflow.identity import ProcessIdentity
from asyncflow.rpc.addresses import is_loopback
from asyncflow.rpc.columns import Buffer

if TYPE_CHECKING:
    from asyncflow.plan.certificates import Leaf

log = logging.getLogger(__name__)

NO_TLS: Final = "no_tls"
NO_CERTIFICATE: Final = "no_certificate"
EXPIRED: Final = "expired"
OTHER_AUTHORITY: Final = "other_authority"
OTHER_JOB: Final = "other_job"
NO_IDENTITY: Final = "no_identity"
REASONS: Final = (NO_TLS, NO_CERTIFICATE, EXPIRED, OTHER_AUTHORITY, OTHER_JOB, NO_IDENTITY)
"""Why a peer is refused, as counters name it."""

_LOOK_S = 1.0
_PIECE = 1 << 18
"""Bytes that are encrypted before some are sent, and that are received before some are decrypted."""
_NOT_VALID_NOW = (9, 10)
"""X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL."""
_UNUSABLE = (ssl.SSLError, OSError, ValueError, AsyncFlowError)


class Stranger(ProtocolError):
    """A peer that is refused because of who it is. reason: one of ``REASONS``."""

    def __init__(self, what: str, *, reason: str) -> None:
        super().__init__(what, hint="Both sides need valid certificates of the same job")
        self.reason = reason


class TlsSocket:
    """TLS over a connected socket that does not block, used as such a socket is.

    The records of TLS are small (16 KiB), so they are taken from the socket and given to it many at a time. Bytes that
    were sent may still lie here, where no event loop sees them, until ``flush`` has sent all; so may bytes that came,
    until ``recv_into`` fills less than it was given.
    """

    def __init__(self, connected: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> None:
        connected.setblocking(False)
        self.family = connected.family
        self._socket = connected
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._came, self._goes, server_side=server_side)
        self._unsent = memoryview(b"")

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the socket at once."""
        self._socket.close()

    def getpeercert(self) -> dict[str, Any]:
        """Return what the peer's certificate says; nothing before the handshake is done."""
        return self._tls.getpeercert() or {}

    def version(self) -> str | None:
        """Return the version of TLS that both sides speak."""
        return self._tls.version()

    def shake(self) -> bool:
        """Go on with the handshake, and return whether it is done.

        Raises Stranger where one side refuses the other, OSError where the connection breaks.
        """
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self.flush()
                try:
                    if not self._take():
                        raise ConnectionResetError(errno.ECONNRESET, "the peer hung up")
                except BlockingIOError:
                    return False
            except ssl.SSLError as error:
                raise self._refusal(error) from error
            else:
                self.flush()
                return True

    def recv_into(self, buffer: Any) -> int:
        """Fill ``buffer`` with what came, and return how much that was: 0 where the peer has hung up.

        Raises BlockingIOError where nothing has come, Stranger where the peer refuses this process or garbles.
        """
        room, filled = memoryview(buffer), 0
        while filled < len(room):
            try:
                got: Any = self._tls.read(len(room) - filled, room[filled:])
            except ssl.SSLWantReadError:
                if filled:
                    break
                if not self._take():
                    return 0
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                break
            except ssl.SSLError as error:
                raise self._refusal(error) from error
            else:
                filled += got
        return filled

    def send(self, data: Buffer) -> int:
        """Send some of ``data``, and return how much; raises BlockingIOError where nothing goes now."""
        self.flush()
        piece, went = memoryview(data)[:_PIECE], 0
        while went < len(piece):
            went += self._tls.write(piece[went:])
        with contextlib.suppress(BlockingIOError):
            self.flush()
        return went

    def sendmsg(self, buffers: Sequence[Buffer]) -> int:
        """Send some of the first of ``buffers``, and return how much; see ``send``."""
        return self.send(buffers[0])

    @property
    def flushed(self) -> bool:
        """True when all that was sent has left."""
        return not self._unsent and not self._goes.pending

    def flush(self) -> None:
        """Send what lies here; raises BlockingIOError where not all of it goes now."""
        while not self.flushed:
            if not self._unsent:
                self._unsent = memoryview(self._goes.read())
            self._unsent = self._unsent[self._socket.send(self._unsent) :]

    def _take(self) -> int:
        """Take in what came, and return how much that was."""
        room = _room()
        count = self._socket.recv_into(room)
        if count:
            self._came.write(room[:count])
        return count

    def _refusal(self, error: ssl.SSLError) -> Stranger:
        """Tell the peer, as TLS does, that it goes no further, and return why."""
        with contextlib.suppress(OSError):
            self.flush()
        return refusal(error)


class _Rooms(threading.local):
    """Memory that each thread receives into, one connection after the other."""

    room: memoryview | None = None


_rooms = _Rooms()


def _room() -> memoryview:
    if _rooms.room is None:
        _rooms.room = memoryview(bytearray(_PIECE))
    return _rooms.room


class Credentials:
    """Files in ``folder`` by which a process shows who it is, and knows the others of its job.

    Raises ManifestError where the files are missing, do not belong together, or are not valid now.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reload_errors = 0
        self._stamp: object = None
        self._looked = -_LOOK_S
        try:
            self._stamp = self._stamp_now()
            self._load()
        except _UNUSABLE as error:
            hint = f"{TLS_ENV} names a folder with {', '.join(CERTIFICATE_FILES)}"
            what = f"the certificate of this process cannot be used: {_in_words(error)}"
            raise ManifestError(what, where=str(folder), hint=hint) from error

    def __repr__(self) -> str:
        return f"Credentials({self.process.uri})"

    @classmethod
    def of_environment(cls) -> Credentials | None:
        """Return the credentials that this process was given; None where it was given none."""
        named = os.environ.get(TLS_ENV)
        folder = Path(named or TLS_DIR)
        return cls(folder) if named or folder.exists() else None

    @property
    def process(self) -> ProcessIdentity:
        """The place of this process."""
        return self._process

    def secret(self, name: str) -> str:
        """Return a secret that lies beside the certificate; "" where there is none."""
        try:
            return (self.folder / name).read_text()
        except FileNotFoundError:
            return ""

    def dialled(self, connected: socket.socket) -> TlsSocket:
        """Begin TLS, as the side that dialled. The socket is used no more but by what this returns."""
        self.look()
        return TlsSocket(connected, self._client, server_side=False)

    def accepted(self, connected: socket.socket) -> TlsSocket:
        """Begin TLS, as the side that was dialled. The socket is used no more but by what this returns."""
        self.look()
        return TlsSocket(connected, self._server, server_side=True)

    def web(self) -> ssl.SSLContext:
        """Return the context of an HTTPS server, whose callers may show no certificate, but no wrong one."""
        self.look()
        return self._web

    def peer(self, shaken: TlsSocket | ssl.SSLObject) -> ProcessIdentity:
        """Return who is at the other end, of this job. Raises Stranger where it is another's or has no name."""
        found = _named(shaken)
        if found.job != self._process.job:
            raise Stranger(f"the peer is {found}, of another job", reason=OTHER_JOB)
        return found

    def look(self) -> None:
        """Read the files again where they have changed; asked at each new connection."""
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        try:
            if (stamp := self._stamp_now()) == self._stamp:
                return
            self._load()
        except _UNUSABLE as error:
            self.reload_errors += 1
            log.warning("the certificate in %s cannot be used yet: %s", self.folder, _in_words(error))
        else:
            self._stamp = stamp
            log.info("the certificate of %s was renewed", self._process)

    def _stamp_now(self) -> object:
        """Return what changes whenever a file is written or replaced."""
        found = [(self.folder / name).stat() for name in CERTIFICATE_FILES]
        return [(file.st_mtime_ns, file.st_ino, file.st_size) for file in found]

    def _load(self) -> None:
        """Read the files, and use them from now on if this process passes its own test."""
        client, server = (self._context(side) for side in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER))
        self._process = _with_itself(client, server)
        self._client, self._server = client, server
        self._web = self._context(ssl.PROTOCOL_TLS_SERVER)
        self._web.verify_mode = ssl.CERT_OPTIONAL

    def _context(self, protocol: int) -> ssl.SSLContext:
        authority, certificate, key = (self.folder / name for name in CERTIFICATE_FILES)
        context = ssl.SSLContext(protocol)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
        context.options |= ssl.OP_NO_TICKET
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0
        context.load_verify_locations(authority)
        context.load_cert_chain(certificate, key)
        return context


def expires_in(shaken: TlsSocket) -> float:
    """Return the seconds until the peer's certificate expires."""
    return ssl.cert_time_to_seconds(shaken.getpeercert()["notAfter"]) - time.time()


def check_exposure(host: str, credentials: Credentials | None, *, name: str) -> None:
    """Raise Refused where a process without credentials would serve other hosts at ``host``, and none has allowed it.

    host: the address that is bound, a number; name: of who serves.
    """
    if credentials is not None or is_loopback(host):
        return
    if not allows_insecure():
        hint = f"Give it a certificate ({TLS_ENV}), or say --insecure where whoever reaches it may do all"
        raise Refused(f"without a certificate {host} is not served", where=name, hint=hint)
    log.warning("%s: INSECURE: it has no certificate, and whoever reaches %s may do all that a member may", name, host)


def allows_insecure() -> bool:
    """Return whether this process may serve other hosts without a certificate."""
    return os.environ.get(INSECURE_ENV) == "1"


def keep(folder: Path, *, authority: bytes, leaf: Leaf, secrets: Mapping[str, str] | None = None) -> None:
    """Write the credentials of a process into ``folder``, which only this user may look into.

    authority: its certificate in PEM; secrets: further ones, by the name of their file. Each file is replaced whole.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = dict(zip(CERTIFICATE_FILES, (authority, leaf.certificate, leaf.key), strict=True))
    files |= {name: secret.encode() for name, secret in (secrets or {}).items()}
    for name, content in files.items():
        write_whole(folder / name, content, mode=0o600)


def refusal(error: ssl.SSLError) -> Stranger:
    """Return in words, and by reason, why a handshake failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = EXPIRED if error.verify_code in _NOT_VALID_NOW else OTHER_AUTHORITY
        return Stranger(f"the peer's certificate is refused: {error.verify_message}", reason=reason)
    said = error.reason or ""
    if "RETURN_A_CERTIFICATE" in said or "CERTIFICATE_REQUIRED" in said:
        return Stranger("a certificate is required, and none was shown", reason=NO_CERTIFICATE)
    if "EXPIRED" in said:
        return Stranger("the peer refuses this process's certificate as expired", reason=EXPIRED)
    if "UNKNOWN_CA" in said or "BAD_CERTIFICATE" in said:
        return Stranger("the peer refuses this process's certificate as another job's", reason=OTHER_AUTHORITY)
    return Stranger(f"the peer does not speak TLS 1.3: {said or error}", reason=NO_TLS)


def _named(shaken: TlsSocket | ssl.SSLObject) -> ProcessIdentity:
    """Return whom the certificate of the peer names. Raises Stranger where that is nobody."""
    certificate = shaken.getpeercert() or {}
    names: Any = certificate.get("subjectAltName", ())
    found = [ProcessIdentity.of(value) for kind, value in names if kind == "URI"]
    if len(found) != 1 or found[0] is None:
        raise Stranger("the peer's certificate names no process", reason=NO_IDENTITY)
    return found[0]


def _with_itself(client: ssl.SSLContext, server: ssl.SSLContext) -> ProcessIdentity:
    """Shake hands within this process, and return whom the certificate names that both sides showed.

    Raises SSLError where they would be refused, Stranger where the certificate names no process.
    """
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)
    waiting = list(ends)
    while waiting:
        for end in list(waiting):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            waiting.remove(end)
    return _named(ends[0])


def _in_words(error: Exception) -> str:
    """Return what is wrong with the files of this process; never what they hold."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its own certificate is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return str(error.reason or "a file holds no certificate or key")
    return str(error)
