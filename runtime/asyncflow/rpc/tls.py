"""TLS 1.3 between processes of one job: each side shows a certificate of the job's authority, which names it.

The credentials of a process are three files in a folder, ``ca.crt``, ``tls.crt`` and ``tls.key``. Their issuer replaces
them before they expire, and they are read again when they change. An existing connection keeps its certificate. TLS
sessions are not resumed, so each new connection proves its identity.

Invariants: only TLS 1.3 is used, and no data is exchanged with a peer without a currently valid certificate that the
authority of this job signed. A set of files that cannot be used, for example a half-written one, is never used, and the
last valid set stays in use.
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
"""Reason why a peer is refused, as counters name it."""

_CHECK_INTERVAL_S = 1.0
_NOT_VALID_NOW = (9, 10)
"""X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL."""
_UNUSABLE = (ssl.SSLError, OSError, ValueError, AsyncFlowError)


class PeerRefused(ProtocolError):
    """Refusal of a peer because of its identity or its behaviour."""

    def __init__(self, what: str, *, reason: Reason) -> None:
        hint = "Both sides need valid certificates of the same job" if reason in get_args(_ByTls) else ""
        super().__init__(what, hint=hint)
        self.reason = reason


class Credentials:
    """Files in ``folder`` by which a process proves its identity, and verifies its peers in the job.

    process: the identity in them. Raises ManifestError if files are missing, do not match, or are not valid now.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reload_errors = 0
        self._stamp: object = None
        self._checked_at = -_CHECK_INTERVAL_S
        try:
            self._stamp = self._stamp_now()
            self._load()
        except _UNUSABLE as error:
            hint = f"{TLS_ENV} names a folder with {', '.join(CERTIFICATE_FILES)}"
            what = f"the certificate of this process cannot be used: {_describe(error)}"
            raise ManifestError(what, where=str(folder), hint=hint) from error

    def __repr__(self) -> str:
        return f"Credentials({self.process.uri})"

    @classmethod
    def of_environment(cls) -> Credentials | None:
        """Return the credentials that this process has; None if it has none."""
        named = os.environ.get(TLS_ENV)
        folder = Path(named or TLS_DIR)
        return cls(folder) if named or folder.exists() else None

    def secret(self, name: str) -> str:
        """Return a secret stored in the folder of the certificate; "" if there is none."""
        try:
            return (self.folder / name).read_text()
        except FileNotFoundError:
            return ""

    def client(self) -> ssl.SSLContext:
        """Return the TLS context for outgoing connections."""
        self.look()
        return self._client

    def server(self) -> ssl.SSLContext:
        """Return the TLS context for incoming connections."""
        self.look()
        return self._server

    def web(self) -> ssl.SSLContext:
        """Return the TLS context of an HTTPS server, whose callers may show no certificate, but no invalid one."""
        self.look()
        return self._web

    def peer(self, ssl_object: ssl.SSLObject) -> ProcessIdentity:
        """Return the peer's identity. Raises PeerRefused if it belongs to another job or has no identity."""
        found = _identity_of(ssl_object)
        if found.job != self.process.job:
            raise PeerRefused(f"the peer is {found}, of another job", reason="other_job")
        return found

    def look(self) -> None:
        """Read the files again if they have changed. Called for each new connection."""
        now = time.monotonic()
        if now - self._checked_at < _CHECK_INTERVAL_S:
            return
        self._checked_at = now
        try:
            if (stamp := self._stamp_now()) == self._stamp:
                return
            self._load()
        except _UNUSABLE as error:
            self.reload_errors += 1
            log.warning("the certificate in %s cannot be used yet: %s", self.folder, _describe(error))
        else:
            self._stamp = stamp
            log.info("the certificate of %s was renewed", self.process)

    def _stamp_now(self) -> object:
        """Return a value that changes whenever a file is written or replaced."""
        found = [(self.folder / name).stat() for name in CERTIFICATE_FILES]
        return [(file.st_mtime_ns, file.st_ino, file.st_size) for file in found]

    def _load(self) -> None:
        """Read the files, and use them from now on if a handshake of this process with itself succeeds."""
        client, server = (self._context(side) for side in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER))
        self.process = _handshake_with_itself(client, server)
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


def expires_in(ssl_object: ssl.SSLObject) -> float:
    """Return the seconds until the peer's certificate expires."""
    certificate: Any = ssl_object.getpeercert()
    return ssl.cert_time_to_seconds(certificate["notAfter"]) - time.time()


def check_exposure(host: str, credentials: Credentials | None, *, name: str) -> None:
    """Raise Refused if a process without credentials would serve other hosts at ``host`` without explicit permission.

    host: the bound numeric address; name: of the server.
    """
    if credentials is not None or is_loopback(host):
        return
    if os.environ.get(INSECURE_ENV) != "1":
        hint = f"Set {TLS_ENV} to its certificate, or use --insecure, which gives everyone who can reach it full access"
        raise Refused(f"without a certificate {host} is not served", where=name, hint=hint)
    log.warning("%s: INSECURE: it has no certificate; everyone who can reach %s has the rights of a member", name, host)


def refusal(error: BaseException) -> PeerRefused:
    """Return the error of a handshake as a refusal with a message and a reason."""
    match error:
        case PeerRefused():
            return error
        case ssl.SSLCertVerificationError():
            reason: Reason = "expired" if error.verify_code in _NOT_VALID_NOW else "other_authority"
            return PeerRefused(f"the peer's certificate is refused: {error.verify_message}", reason=reason)
        case ssl.SSLError(reason=str(text)) if "RETURN_A_CERTIFICATE" in text:
            return PeerRefused("a certificate is required, and none was shown", reason="no_certificate")
        case ssl.SSLError(reason=str(text)) if "ALERT" in text:
            return PeerRefused(f"the peer ended the handshake: {text}", reason="hung_up")
        case ssl.SSLError():
            return PeerRefused(f"the peer does not speak TLS 1.3: {error.reason or error}", reason="no_tls")
        case TimeoutError():
            return PeerRefused("a peer did not identify itself in time", reason="late")
        case OSError():
            what = "the peer ended the handshake: it may hold a certificate of another job"
            return PeerRefused(what, reason="hung_up")
        case _:
            return PeerRefused(str(error), reason="protocol")


def _identity_of(ssl_object: ssl.SSLObject) -> ProcessIdentity:
    """Return the identity in the peer's certificate. Raises PeerRefused if it has none."""
    certificate: Any = ssl_object.getpeercert() or {}
    found = [ProcessIdentity.of(value) for kind, value in certificate.get("subjectAltName", ()) if kind == "URI"]
    if len(found) != 1 or found[0] is None:
        raise PeerRefused("the peer's certificate names no process", reason="no_identity")
    return found[0]


def _handshake_with_itself(client: ssl.SSLContext, server: ssl.SSLContext) -> ProcessIdentity:
    """Do a TLS handshake within this process, and return the identity in its certificate.

    Raises SSLError if the handshake fails, PeerRefused if the certificate names no process.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)
    waiting = list(ends)
    while waiting:
        for end in list(waiting):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            waiting.remove(end)
    return _identity_of(ends[0])


def _describe(error: Exception) -> str:
    """Return the problem with the files of this process, without their content."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its own certificate is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return str(error.reason or "a file holds no certificate or key")
    return str(error)
