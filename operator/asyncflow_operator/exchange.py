"""Exchange of one HTTP request and its answer with an untrusted process of a tenant.

The process may be hostile: it may send data without end, or very slowly, or a compressed body that inflates, or a
redirect.

Invariants: an exchange ends within its deadline and receives at most ``limit`` bytes, heads and framing included. Its
result is one JSON document as it was sent. No redirect is followed, nothing is decompressed, no cookie is kept. Each
exchange has its own connection, so data after the answer is never read. Over TLS the identity of the peer is checked
before the request is sent.

h11 parses the answer. aiohttp's client is not used because it limits neither interim responses (one connection kept a
core busy until the deadline) nor the data on an idle connection (800 MiB in five seconds).
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import h11

from asyncflow.api.names import CERTIFICATE_FILES
from asyncflow.errors import DeadlineExceeded, PeerLost, ProtocolError

HEAD_BYTES: Final = 16 << 10
"""Largest head of an answer."""
_CHUNK: Final = 64 << 10
_READ_BYTES: Final = 512
_SPARE_READS: Final = 256
"""Reads allowed in addition to one for each ``_READ_BYTES`` of the limit, because each read costs processor time."""
_JSON: Final = b"application/json"
_PORTS: Final = MappingProxyType({"http": 80, "https": 443})


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsIdentities:
    """Identities of both ends of a TLS 1.3 connection. files: own certificates and key; peer: URI of the other end."""

    files: Mapping[str, bytes] = field(repr=False)
    peer: str

    def context(self) -> ssl.SSLContext:
        """Return the trusted authority and the own certificate for a handshake. The key is never written to a disk."""
        authority, certificate, key = (self.files[name] for name in CERTIFICATE_FILES)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(cadata=authority.decode())
        with os.fdopen(os.memfd_create("certificate"), "wb") as file:
            file.write(certificate + key)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        return context

    def check(self, certificate: Mapping[str, Any]) -> None:
        """Raise _UnusableAnswer unless the peer's certificate has the URI ``peer``."""
        if ("URI", self.peer) not in certificate.get("subjectAltName", ()):
            raise _UnusableAnswer(f"another process than {self.peer} answers")


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """Status and JSON body of an answer."""

    status: int
    body: bytes


async def exchange(
    method: str, url: str, *, limit: int, within_s: float, tls: TlsIdentities | None = None
) -> HttpAnswer:
    """Send a request without a body and return its final answer.

    limit: most bytes to receive; within_s: seconds for the whole exchange; tls: the identities if the scheme is https.
    Raises DeadlineExceeded; PeerLost if there is no connection or one side refuses the other's certificate; and
    ProtocolError if another process answers, or the answer is too large, encoded, not JSON or not HTTP.
    """
    parts, where = urlsplit(url), f"{method} {url}"
    if not parts.hostname:
        raise PeerLost("it has no address", where=where)
    try:
        async with asyncio.timeout(within_s):
            port, secure = (
                parts.port or _PORTS[parts.scheme],
                tls.context() if parts.scheme == "https" and tls else None,
            )
            reader, writer = await asyncio.open_connection(parts.hostname, port, limit=_CHUNK, ssl=secure)
            try:
                if secure is not None and tls is not None:
                    tls.check(writer.get_extra_info("peercert"))
                http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES)
                for event in (_request(method, parts), h11.EndOfMessage()):
                    writer.write(http.send(event) or b"")
                return await _answer(http, reader, limit=limit)
            finally:
                writer.transport.abort()
    except TimeoutError as error:
        raise DeadlineExceeded(f"no complete answer within {within_s:g} s", where=where) from error
    except OSError as error:
        raise PeerLost(f"no connection: {error.strerror or error}", where=where) from error
    except (h11.RemoteProtocolError, _UnusableAnswer) as error:
        raise ProtocolError(str(error), where=where) from error


class _UnusableAnswer(Exception):
    """The answer is from another process, too large, or not plain JSON."""


def _request(method: str, parts: SplitResult) -> h11.Request:
    headers = {"Host": parts.netloc, "Accept": "application/json", "Accept-Encoding": "identity", "Connection": "close"}
    length = {} if method == "GET" else {"Content-Length": "0"}
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return h11.Request(method=method, target=target, headers=list({**headers, **length}.items()))


async def _answer(http: h11.Connection, reader: asyncio.StreamReader, *, limit: int) -> HttpAnswer:
    body, received, status = bytearray(), 0, 0
    for _ in range(limit // _READ_BYTES + _SPARE_READS):
        event = http.next_event()
        if event is h11.NEED_DATA:
            if received >= limit:
                raise _UnusableAnswer(f"the answer has more than {limit} bytes")
            data = await reader.read(min(_CHUNK, limit - received))
            received += len(data)
            http.receive_data(data)
        elif isinstance(event, h11.Response):
            _check(event)
            status = event.status_code
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            return HttpAnswer(status, bytes(body))
        elif not isinstance(event, h11.InformationalResponse):
            raise _UnusableAnswer("the connection was closed before the answer was complete")
    raise _UnusableAnswer("the answer came in too many small reads")


def _check(head: h11.Response) -> None:
    """Raise _UnusableAnswer if the head does not announce plain JSON, before the body is read."""
    headers = {name: value.strip().lower() for name, value in head.headers}
    if 300 <= head.status_code < 400:
        raise _UnusableAnswer(f"a redirect (HTTP {head.status_code}), which is not followed")
    if headers.get(b"content-encoding", b"identity") != b"identity":
        raise _UnusableAnswer(f"HTTP {head.status_code} with an encoded body; only plain JSON is read")
    if headers.get(b"content-type", b"").partition(b";")[0].strip() != _JSON:
        raise _UnusableAnswer(f"HTTP {head.status_code} without a JSON body")
