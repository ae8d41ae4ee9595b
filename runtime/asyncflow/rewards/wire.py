"""Messages between a pool and a reward process: length-prefixed msgpack over its standard input and output.

Invariants: a frame is a 4-byte big-endian length and that many bytes, at most MAX_FRAME; a process says one thing for
each thing that it is told, with the nonce of that.
"""

from __future__ import annotations

import struct
from typing import Any, Literal, get_args

import msgspec

from asyncflow.rewards.sandbox import Sandbox

MAX_FRAME = 64 << 20
MAX_ANSWER = 1 << 20
LENGTH = struct.Struct(">I")

Failure = Literal["timeout", "raised", "invalid", "out_of_range", "died"]
"""Why a sample has no reward: no answer in time, an exception, no finite number, a number that the manifest does not
allow, or a process that ended or broke the protocol."""
FAILURES: tuple[Failure, ...] = get_args(Failure)


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """Sample to score: the prompt's question, the response's text, the source's answer and meta (JSON values)."""

    prompt: str
    response: str
    answer: Any = None
    meta: dict[str, Any] = {}


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The first thing that a process is told: what to load, and how to restrict itself before."""

    nonce: bytes
    function: str
    extractor: str
    workdir: str
    parent: int
    sandbox: Sandbox


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One sample to score. seconds: of computation, after which the kernel ends the process."""

    nonce: bytes
    example: Example
    seconds: float


class ScoreAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of the process: a finite value, or why there is none.

    detail: a line about a failure, or the traceback of what was raised. To ``Load`` it answers with 0.0 or why the
    function cannot be loaded; unrestricted: what its sandbox lacks.
    """

    nonce: bytes
    value: float = 0.0
    failure: Literal["", "raised", "invalid"] = ""
    detail: str = ""
    unrestricted: list[str] = []


class RewardResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome for one sample.

    value: finite, 0 where there is none; failure: why there is none, "" where there is; detail: what is known of that,
    a traceback where the function raised.
    """

    value: float
    failure: Failure | Literal[""] = ""
    detail: str = ""


def frame(message: msgspec.Struct) -> bytes:
    """Return the frame of ``message``. Raises ValueError where it is too large or holds what msgpack cannot say."""
    try:
        body = msgspec.msgpack.encode(message)
    except TypeError as error:
        raise ValueError(str(error)) from error
    if len(body) > MAX_FRAME:
        message_size = f"an example of {len(body)} bytes is more than {MAX_FRAME}"
        raise ValueError(message_size)
    return LENGTH.pack(len(body)) + body
