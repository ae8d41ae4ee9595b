"""What passes between a pool and a reward process: length-prefixed msgpack over its standard input and output.

Invariant: a frame is a 4-byte big-endian length and that many bytes, at most MAX_FRAME; one answer for each question.
"""

from __future__ import annotations

import struct
from typing import Any, Literal

import msgspec

MAX_FRAME = 64 << 20
LENGTH = struct.Struct(">I")


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """What is scored: the prompt's question, the response's text, the source's answer and meta (JSON values)."""

    prompt: str
    response: str
    answer: Any = None
    meta: dict[str, Any] = {}


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """What the process says: a finite value, or why there is none."""

    value: float = 0.0
    error: str = ""


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame of a process: the function is loaded, or why it is not."""

    error: str = ""


Flag = Literal["", "timeout", "error", "crashed"]


class RewardResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome for one sample.

    value: finite, 0 where flagged; flag: "" or what went wrong (no answer in time, an exception or a result that is no
    finite number, the process died); detail: one line for the log.
    """

    value: float
    flag: Flag = ""
    detail: str = ""


def frame(message: msgspec.Struct) -> bytes:
    """Give the frame of ``message``. Raises ValueError where it is too large or holds what msgpack cannot say."""
    try:
        body = msgspec.msgpack.encode(message)
    except TypeError as error:
        raise ValueError(str(error)) from error
    if len(body) > MAX_FRAME:
        message_size = f"an example of {len(body)} bytes is more than {MAX_FRAME}"
        raise ValueError(message_size)
    return LENGTH.pack(len(body)) + body
