"""Messages between a pool and a reward process: length-prefixed msgpack over its standard input and output.

Invariants: a frame is a 4-byte big-endian length, followed by that number of bytes, at most MAX_FRAME. A process sends
one answer to each message, with the nonce of the message.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any, Literal, Self, get_args

import msgspec

from asyncflow.data.base import MODEL, Message, Prompt
from asyncflow.rewards.sandbox import Sandbox

MAX_FRAME = 64 << 20
MAX_ANSWER = 8 << 20
MOST_DETAILS = 2048
"""Copy of ``api.rewards.MOST_DETAILS``, since a reward process does not import ``api``."""
_MOST_DETAIL = 1900
"""Last characters of a failure's detail, e.g. a traceback, that are stored with the sample."""
COMPONENT = "reward/"
"""Prefix of tags with the value of one component of the reward; the name of the component follows."""
TURN_REWARDS = "turn_rewards"
"""Tag with the rewards of the model's turns, a JSON list of numbers."""
LENGTH = struct.Struct(">I")

Failure = Literal["timeout", "raised", "invalid", "out_of_range", "died", "incomplete"]
"""Reason why a sample has no reward: no answer in time (timeout), an exception (raised), not a finite number (invalid),
a number outside the manifest's bounds (out_of_range), a process that ended or violated the protocol (died), or an
incomplete group for a function over groups (incomplete)."""
FAILURES: tuple[Failure, ...] = get_args(Failure)

Takes = Literal["sample", "batch", "group"]
"""Samples of one call of a function: one sample, samples of any prompts, or all samples of one prompt."""


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """Sample to score: the prompt's question, the text of the response, the source's answer and meta (JSON values).

    length: tokens of the response, including the end token; transcript: all turns of the model and observations, in
    order; the response is the last.
    """

    prompt: str
    response: str
    answer: Any = None
    meta: dict[str, Any] = {}
    length: int = 0
    transcript: list[Message] = []

    @classmethod
    def of(cls, prompt: Prompt, transcript: list[Message], *, length: int) -> Self:
        """Return the sample of a prompt and the turns that answer it."""
        return cls(
            prompt=prompt.question,
            response=transcript[-1].content,
            answer=prompt.answer,
            meta=prompt.meta,
            length=length,
            transcript=transcript,
        )

    @property
    def turns(self) -> int:
        """Number of the model's turns, at least 1."""
        return max(1, sum(turn.role == MODEL for turn in self.transcript))


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to a process: the function to load, and the sandbox to enter before.

    config: the function's settings, None if the manifest has none; device: torch's name of the device; share: part of
    the device's memory that it may use.
    """

    nonce: bytes
    function: str
    extractor: str
    workdir: str
    parent: int
    sandbox: Sandbox
    config: dict[str, Any] | None = None
    device: str = "cpu"
    share: float = 1.0

    @property
    def place(self) -> dict[str, Any]:
        """The optional constructor arguments of a class: device, share of the device, and extractor."""
        return {"device": self.device, "share": self.share, "extractor": self.extractor}


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of one call of the function. seconds: time that the call may take."""

    nonce: bytes
    examples: list[Example]
    seconds: float


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a function for one sample.

    value: a finite number, 0 after a failure; failure: the reason why there is no value, "" if there is one; detail: a
    description of the failure, or a traceback; details: the function's details, a JSON object or nothing; turns: the
    rewards of the model's turns, whose sum is ``value``, [] if there are none; text: the answer of an environment, None
    at the end of the episode.
    """

    value: float = 0.0
    failure: Failure | Literal[""] = ""
    detail: str = ""
    details: Annotated[bytes, msgspec.Meta(max_length=MOST_DETAILS)] = b""
    turns: list[float] = []
    text: str | None = None


class ScoreAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of the process: a score for each sample, or the failure of the whole call.

    In the answer to ``Load``, failure: the reason why the function cannot be loaded; takes: the kind of its calls;
    concurrent: whether several calls may run at the same time; unrestricted: restrictions that the kernel lacks.
    """

    nonce: bytes
    scores: list[Score] = []
    failure: Literal["", "timeout", "raised", "invalid"] = ""
    detail: str = ""
    takes: Takes = "sample"
    concurrent: bool = False
    unrestricted: list[str] = []


class RewardResult(msgspec.Struct, frozen=True, kw_only=True):
    """The reward of one sample.

    value: a finite number, 0 after a failure; failure, detail, text: as in ``Score``; components: the values of the
    named components that have one; details: a JSON object or nothing, at most MOST_DETAILS bytes; turns: the rewards of
    the model's turns, [] if the whole reward is for the last turn.
    """

    value: float
    failure: Failure | Literal[""] = ""
    detail: str = ""
    components: dict[str, float] = {}
    details: bytes = b""
    turns: list[float] = []
    text: str | None = None

    @classmethod
    def incomplete(cls, count: int, *, size: int) -> Self:
        """Return the failure of a sample whose group has only ``count`` of its ``size`` samples."""
        detail = f"the function needs all samples of a prompt, but only {count} of {size} are available"
        return cls(value=0.0, failure="incomplete", detail=detail)

    @property
    def tags(self) -> dict[str, float | str]:
        """The tags of the sample, so that counts and advantages need no fetch of columns.

        reward: the value; failure, detail: the reason for a failure, if any; ``COMPONENT`` and a name: the value of a
        component; ``TURN_REWARDS``: the rewards of turns, if any.
        """
        failure = {"failure": self.failure, "detail": self.detail[-_MOST_DETAIL:]} if self.failure else {}
        return {
            "reward": self.value,
            **failure,
            **({TURN_REWARDS: f"[{','.join(f'{value:.7g}' for value in self.turns)}]"} if self.turns else {}),
            **{f"{COMPONENT}{name}": value for name, value in self.components.items()},
        }


def frame(message: msgspec.Struct) -> bytes:
    """Return the frame of ``message``. Raises ValueError if it is too large or msgpack cannot encode it."""
    try:
        body = msgspec.msgpack.encode(message)
    except (TypeError, OverflowError) as error:
        raise ValueError(str(error)) from error
    if len(body) > MAX_FRAME:
        what = f"a message of {len(body)} bytes is larger than {MAX_FRAME} bytes"
        raise ValueError(what)
    return LENGTH.pack(len(body)) + body
