"""Exchange of one HTTP request with a process of a tenant, whatever that process answers.

Such a process may be hostile: it may send without end, or next to nothing, or an archive that inflates, or point
elsewhere. Invariant: an exchange ends within its deadline and has received ``most`` bytes at most, heads and framing
included; what comes out of it is one JSON document as it was sent. No redirect is followed, nothing is decompressed,
no cookie is kept, and what is sent after the answer is never read: each exchange has a connection of its own.

Over TLS the process at the other end must be the one that is meant, before anything is said to it.

h11 does the parsing. aiohttp's client is not used here because it bounds neither interim responses (one connection kept
a core busy until the deadline) nor what arrives on an idle connection (800 MiB in five seconds).
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
"""The largest head of an answer."""
_CHUNK: Final = 64 << 10
_READ_BYTES: Final = 512
_SPARE_READS: Final = 256
"""An answer may need one read for each ``_READ_BYTES`` of it, and so many more: reads cost processor time."""
_JSON: Final = b"application/json"
_PORTS: Final = MappingProxyType({"http": 80, "https": 443})


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsIdentities:
    """Identities of both ends of TLS 1.3. files: certificates and key of this one; peer: the URI of the other."""

    files: Mapping[str, bytes] = field(repr=False)
    peer: str

    def context(self) -> ssl.SSLContext:
        """Return what is checked and shown in a handshake. The key is never written to a disk."""
        authority, certificate, key = (self.files[name] for name in CERTIFICATE_FILES)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(cadata=authority.decode())
        with os.fdopen(os.memfd_create("certificate"), "wb") as shown:
            shown.write(certificate + key)
            shown.flush()
            context.load_cert_chain(f"/proc/self/fd/{shown.fileno()}")
        return context

    def check(self, certificate: Mapping[str, Any]) -> None:
        """Refuse every process but the one that is meant."""
        if ("URI", self.peer) not in certificate.get("subjectAltName", ()):
            raise _Unfit(f"another process than {self.peer} answers")


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """The status of an answer, and its body where that is JSON."""

    status: int
    body: bytes


async def exchange(
    method: str, url: str, *, most: int, within_s: float, tls: TlsIdentities | None = None
) -> HttpAnswer:
    """Send a request without a body and return its final answer.

    most: bytes to receive at most; within_s: seconds for all of it; tls: who asks whom, where the scheme is https.
    Raises DeadlineExceeded, PeerLost where there is no connection or one side refuses the other's certificate, and
    ProtocolError where another process answers, or what it says is too large, encoded, not JSON, or no HTTP.
    """
    place, where = urlsplit(url), f"{method} {url}"
    if not place.hostname:
        raise PeerLost("it has no address", where=where)
    try:
        async with asyncio.timeout(within_s):
            port, secure = (
                place.port or _PORTS[place.scheme],
                tls.context() if place.scheme == "https" and tls else None,
            )
            reader, writer = await asyncio.open_connection(place.hostname, port, limit=_CHUNK, ssl=secure)
            try:
                if secure is not None and tls is not None:
                    tls.check(writer.get_extra_info("peercert"))
                http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES)
                for event in (_request(method, place), h11.EndOfMessage()):
                    writer.write(http.send(event) or b"")
                return await _answer(http, reader, most=most)
            finally:
                writer.transport.abort()
    except TimeoutError as error:
        raise DeadlineExceeded(f"no whole answer within {within_s:g} s", where=where) from error
    except OSError as error:
        raise PeerLost(f"no connection: {error.strerror or error}", where=where) from error
    except (h11.RemoteProtocolError, _Unfit) as error:
        raise ProtocolError(str(error), where=where) from error


class _Unfit(Exception):
    """The answer is not one that is read."""


def _request(method: str, place: SplitResult) -> h11.Request:
    headers = {"Host": place.netloc, "Accept": "application/json", "Accept-Encoding": "identity", "Connection": "close"}
    length = {} if method == "GET" else {"Content-Length": "0"}
    target = (place.path or "/") + (f"?{place.query}" if place.query else "")
    return h11.Request(method=method, target=target, headers=list({**headers, **length}.items()))


async def _answer(http: h11.Connection, reader: asyncio.StreamReader, *, most: int) -> HttpAnswer:
    body, received, status = bytearray(), 0, 0
    for _ in range(most // _READ_BYTES + _SPARE_READS):
        event = http.next_event()
        if event is h11.NEED_DATA:
            if received >= most:
                raise _Unfit(f"the answer has more than {most} bytes")
            data = await reader.read(min(_CHUNK, most - received))
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
            raise _Unfit("the connection was closed before the answer was whole")
    raise _Unfit("the answer came in too many small reads")


def _check(head: h11.Response) -> None:
    """Refuse what is not plain JSON, before any of it is read."""
    headers = {name: value.strip().lower() for name, value in head.headers}
    if 300 <= head.status_code < 400:
        raise _Unfit(f"a redirect (HTTP {head.status_code}), which is not followed")
    if headers.get(b"content-encoding", b"identity") != b"identity":
        raise _Unfit(f"HTTP {head.status_code} with an encoded body, and only plain JSON is read")
    if headers.get(b"content-type", b"").partition(b";")[0].strip() != _JSON:
        raise _Unfit(f"HTTP {head.status_code} with no JSON in it")
