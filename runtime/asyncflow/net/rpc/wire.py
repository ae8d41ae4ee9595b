"""The messages that calls are made of, and their headers.

A message is ``[header, body, *frames]``: header and body msgpack, frames raw bytes.

Invariant: whatever bytes come, they are a message of this protocol or an error that says what they are not.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from asyncflow.errors import AsyncFlowError, ProtocolError, Refused, from_wire
from asyncflow.net.frames import Buffer

MAX_MESSAGE = 1 << 30
"""Most bytes of a message, frames included, where nothing else is said."""
MAX_FRAMES = 65_536
MAX_TIMEOUT = 7 * 86_400.0
_HEADER_ROOM = 1024

CallId = Annotated[int, Meta(ge=0)]


class Call(Struct, frozen=True, array_like=True, tag="c1"):
    """Header of a request. timeout: seconds that the caller will still wait; frames: how many follow the body."""

    call: CallId
    method: Annotated[str, Meta(max_length=128)]
    timeout: float
    frames: Annotated[int, Meta(ge=0, le=MAX_FRAMES)]


class Cancel(Struct, frozen=True, array_like=True, tag="x1"):
    """Header without a body: the caller of ``call`` waits no longer."""

    call: CallId


class Answer(Struct, frozen=True, array_like=True, tag="a1"):
    """Header of a reply: body and frames are what the handler gave."""

    call: CallId
    frames: Annotated[int, Meta(ge=0, le=MAX_FRAMES)]


class Failure(Struct, frozen=True, array_like=True, tag="f1"):
    """Header of a reply that is an error: the body is ``AsyncFlowError.to_wire()``."""

    call: CallId


MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError)
"""What a decoder raises for bytes that are not what they should be; msgspec passes on what UTF-8 has to say."""

encode = msgspec.msgpack.Encoder().encode
to_server = msgspec.msgpack.Decoder(Call | Cancel).decode
to_client = msgspec.msgpack.Decoder(Answer | Failure).decode
error_body = msgspec.msgpack.Decoder(dict[str, str]).decode

_building = threading.Lock()
os.register_at_fork(before=_building.acquire, after_in_parent=_building.release, after_in_child=_building.release)


def encode_request(method: str, request: Struct) -> bytes:
    """Return the body of a call. Raises Refused where a text in it is not Unicode."""
    try:
        return encode(request)
    except UnicodeEncodeError as wrong:
        raise Refused(f"a text is not Unicode: {wrong}", where=method, hint="Give texts without surrogates") from None


@functools.cache
def decoder_of(kind: type[Struct]) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder of ``kind``, in any thread: where two first need a struct at once, msgspec itself crashes.

    A fork waits until none is half built.
    """
    with _building:
        return msgspec.msgpack.Decoder(kind)


def check_call(header: Call, parts: int) -> None:
    """Refuse a request whose header does not fit its ``parts`` (header, body and frames) or whose timeout is none."""
    if parts != 2 + header.frames:
        raise ProtocolError(f"a request of {header.frames} frames came in {parts} parts")
    if not 0 < header.timeout <= MAX_TIMEOUT:
        raise ProtocolError(f"a request has a timeout of {header.timeout} s")


def check_size(what: str, method: str, body: bytes, frames: Sequence[Buffer], *, limit: int) -> int:
    """Return the bytes of a message; ProtocolError where it holds more than ``limit`` of them, or too many frames."""
    size = len(body) + (sum([memoryview(frame).nbytes for frame in frames]) if frames else 0)
    if size + _HEADER_ROOM > limit or len(frames) > MAX_FRAMES:
        hint = f"Split it: at most {limit} bytes and {MAX_FRAMES} frames go in one message"
        raise ProtocolError(f"{what} {method} has {size} bytes in {len(frames)} frames", hint=hint)
    return size


def read_answer(parts: Sequence[memoryview], *, where: str) -> tuple[int, AsyncFlowError | None]:
    """Return the call that a message answers, -1 where it answers none, and the error if the answer is one."""
    try:
        header = to_client(parts[0])
    except (IndexError, *MALFORMED):
        return -1, None
    if isinstance(header, Failure):
        try:
            return header.call, from_wire(error_body(parts[1]))
        except (IndexError, *MALFORMED):
            return header.call, ProtocolError("an error came that cannot be read", where=where)
    if len(parts) == 2 + header.frames:
        return header.call, None
    return header.call, ProtocolError(f"an answer of {header.frames} frames came in {len(parts)} parts", where=where)
