"""TLS 1.3 between processes of one job: each side shows a certificate of the job's authority, and names itself by it.

A process has its credentials in a folder of three files, ``ca.crt``, ``tls.crt`` and ``tls.key``, which whoever issues
certificates replaces before they expire. They are read again when they change. A connection that is there already goes
on with what it began with; there is no session to resume, so each new one proves who it is.

Invariants: nothing but TLS 1.3 is spoken, and nothing is exchanged with a peer without a certificate that is valid now
and was signed by the authority of this job; a set of files that cannot be used, such as one that is half written, is
never used, and the last good set stays in use meanwhile.
"""

from __future__ import annotations

import logging
import os
import ssl
import time
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from asyncflow.api.names import CERTIFICATE_FILES, INSECURE_ENV, TLS_DIR, TLS_ENV
from asyncflow.errors import AsyncFlowError, ManifestError, ProtocolError, Refused
from asyncflow.identity import ProcessIdentity
from asyncflow.rpc.addresses import is_loopback

log = logging.getLogger(__name__)

_ByTls = Literal["no_tls", "no_certificate", "expired", "other_authority", "other_job", "no_identity"]
Reason: TypeAlias = _ByTls | Literal["hung_up", "other_user", "late", "full", "protocol"]
"""Why a peer is refused, as counters name it."""

_LOOK_S = 1.0
_NOT_VALID_NOW = (9, 10)
"""X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL."""
_UNUSABLE = (ssl.SSLError, OSError, ValueError, AsyncFlowError)


class PeerRefused(ProtocolError):
    """A peer that is refused because of who it is."""

    def __init__(self, what: str, *, reason: Reason) -> None:
        hint = "Both sides need valid certificates of the same job" if reason in get_args(_ByTls) else ""
        super().__init__(what, hint=hint)
        self.reason = reason


class Credentials:
    """Files in ``folder`` by which a process shows who it is, and knows the others of its job.

    process: whom they name. Raises ManifestError where files are missing, not of one another, or not valid now.
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

    def secret(self, name: str) -> str:
        """Return a secret that lies beside the certificate; "" where there is none."""
        try:
            return (self.folder / name).read_text()
        except FileNotFoundError:
            return ""

    def client(self) -> ssl.SSLContext:
        """Return the context of the side that dials."""
        self.look()
        return self._client

    def server(self) -> ssl.SSLContext:
        """Return the context of the side that is dialled."""
        self.look()
        return self._server

    def web(self) -> ssl.SSLContext:
        """Return the context of an HTTPS server, whose callers may show no certificate, but no wrong one."""
        self.look()
        return self._web

    def peer(self, shaken: ssl.SSLObject) -> ProcessIdentity:
        """Return who is at the other end, of this job. Raises PeerRefused where it is another's or has no name."""
        found = _named(shaken)
        if found.job != self.process.job:
            raise PeerRefused(f"the peer is {found}, of another job", reason="other_job")
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
            log.info("the certificate of %s was renewed", self.process)

    def _stamp_now(self) -> object:
        """Return what changes whenever a file is written or replaced."""
        found = [(self.folder / name).stat() for name in CERTIFICATE_FILES]
        return [(file.st_mtime_ns, file.st_ino, file.st_size) for file in found]

    def _load(self) -> None:
        """Read the files, and use them from now on if this process passes its own test."""
        client, server = (self._context(side) for side in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER))
        self.process = _with_itself(client, server)
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


def expires_in(shaken: ssl.SSLObject) -> float:
    """Return the seconds until the peer's certificate expires."""
    certificate: Any = shaken.getpeercert()
    return ssl.cert_time_to_seconds(certificate["notAfter"]) - time.time()


def check_exposure(host: str, credentials: Credentials | None, *, name: str) -> None:
    """Raise Refused where a process without credentials would serve other hosts at ``host``, and none has allowed it.

    host: the address that is bound, a number; name: of who serves.
    """
    if credentials is not None or is_loopback(host):
        return
    if os.environ.get(INSECURE_ENV) != "1":
        hint = f"Give it a certificate ({TLS_ENV}), or say --insecure where whoever reaches it may do all"
        raise Refused(f"without a certificate {host} is not served", where=name, hint=hint)
    log.warning("%s: INSECURE: it has no certificate, and whoever reaches %s may do all that a member may", name, host)


def refusal(error: BaseException) -> PeerRefused:
    """Return in words, and by reason, why a peer was not let in."""
    match error:
        case PeerRefused():
            return error
        case ssl.SSLCertVerificationError():
            reason: Reason = "expired" if error.verify_code in _NOT_VALID_NOW else "other_authority"
            return PeerRefused(f"the peer's certificate is refused: {error.verify_message}", reason=reason)
        case ssl.SSLError(reason=str(said)) if "RETURN_A_CERTIFICATE" in said:
            return PeerRefused("a certificate is required, and none was shown", reason="no_certificate")
        case ssl.SSLError(reason=str(said)) if "ALERT" in said:
            return PeerRefused(f"the peer ended the handshake: {said}", reason="hung_up")
        case ssl.SSLError():
            return PeerRefused(f"the peer does not speak TLS 1.3: {error.reason or error}", reason="no_tls")
        case TimeoutError():
            return PeerRefused("a peer did not say who it is in time", reason="late")
        case OSError():
            what = "the peer ended the handshake: it may hold a certificate of another job"
            return PeerRefused(what, reason="hung_up")
        case _:
            return PeerRefused(str(error), reason="protocol")


def _named(shaken: ssl.SSLObject) -> ProcessIdentity:
    """Return whom the certificate of the peer names. Raises PeerRefused where that is nobody."""
    certificate = shaken.getpeercert() or {}
    names: Any = certificate.get("subjectAltName", ())
    found = [ProcessIdentity.of(value) for kind, value in names if kind == "URI"]
    if len(found) != 1 or found[0] is None:
        raise PeerRefused("the peer's certificate names no process", reason="no_identity")
    return found[0]


def _with_itself(client: ssl.SSLContext, server: ssl.SSLContext) -> ProcessIdentity:
    """Shake hands within this process, and return whom the certificate names that both sides showed.

    Raises SSLError where they would be refused, PeerRefused where the certificate names no process.
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
