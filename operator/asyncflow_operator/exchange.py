"""One HTTP request to a process of a tenant, whatever that process answers.

Such a process may be hostile: it may send without end, or next to nothing, or an archive that inflates, or point
elsewhere. Invariant: an exchange ends within its deadline and has received ``most`` bytes at most, heads and framing
included; what comes out of it is one JSON document as it was sent. No redirect is followed, nothing is decompressed,
no cookie is kept, and what is sent after the answer is never read: each exchange has a connection of its own.

h11 does the parsing. aiohttp's client is not used here because it bounds neither interim responses (one connection kept
a core busy until the deadline) nor what arrives on an idle connection (800 MiB in five seconds).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final
from urllib.parse import SplitResult, urlsplit

import h11

from asyncflow.errors import DeadlineExceeded, PeerLost, ProtocolError

HEAD_BYTES: Final = 16 << 10
"""The largest head of an answer."""
_CHUNK: Final = 64 << 10
_PIECE_BYTES: Final = 512
_SPARE_PIECES: Final = 256
"""An answer may arrive in one piece for each ``_PIECE_BYTES`` of it, and so many more: pieces cost processor time."""
_JSON: Final = b"application/json"
_HTTP_PORT: Final = 80


@dataclass(frozen=True, slots=True)
class Answer:
    """The status of an answer, and its body where that is JSON."""

    status: int
    body: bytes


async def exchange(
    method: str, url: str, *, most: int, within_s: float, headers: Mapping[str, str] = MappingProxyType({})
) -> Answer:
    """Send a request without a body and return its final answer.

    most: bytes to receive at most; within_s: seconds for all of it. Raises DeadlineExceeded, PeerLost where there is no
    connection, and ProtocolError where the answer is too large, encoded, not JSON, or no HTTP.
    """
    place, where = urlsplit(url), f"{method} {url}"
    if not place.hostname:
        raise PeerLost("it has no address", where=where)
    try:
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_connection(place.hostname, place.port or _HTTP_PORT, limit=_CHUNK)
            try:
                http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES)
                for event in (_request(method, place, headers), h11.EndOfMessage()):
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


def _request(method: str, place: SplitResult, headers: Mapping[str, str]) -> h11.Request:
    usual = {"Host": place.netloc, "Accept": "application/json", "Accept-Encoding": "identity", "Connection": "close"}
    length = {} if method == "GET" else {"Content-Length": "0"}
    target = (place.path or "/") + (f"?{place.query}" if place.query else "")
    return h11.Request(method=method, target=target, headers=list({**usual, **length, **headers}.items()))


async def _answer(http: h11.Connection, reader: asyncio.StreamReader, *, most: int) -> Answer:
    body, received, status = bytearray(), 0, 0
    for _ in range(most // _PIECE_BYTES + _SPARE_PIECES):
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
            return Answer(status, bytes(body))
        elif not isinstance(event, h11.InformationalResponse):
            raise _Unfit("the connection was closed before the answer was whole")
    raise _Unfit("the answer came in too many pieces")


def _check(head: h11.Response) -> None:
    """Refuse what is not plain JSON, before any of it is read."""
    headers = {name: value.strip().lower() for name, value in head.headers}
    if 300 <= head.status_code < 400:
        raise _Unfit(f"a redirect (HTTP {head.status_code}), which is not followed")
    if headers.get(b"content-encoding", b"identity") != b"identity":
        raise _Unfit(f"HTTP {head.status_code} with an encoded body, and only plain JSON is read")
    if headers.get(b"content-type", b"").partition(b";")[0].strip() != _JSON:
        raise _Unfit(f"HTTP {head.status_code} with no JSON in it")
