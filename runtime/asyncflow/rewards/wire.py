"""Messages between a pool and a reward process: length-prefixed msgpack over its standard input and output.

Invariants: a frame is a 4-byte big-endian length and that many bytes, at most MAX_FRAME; a process says one thing for
each thing that it is told, with the nonce of that.
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
"""``api.rewards.MOST_DETAILS``, which a reward process does not import."""
_MOST_DETAIL = 1900
"""Characters of a failed reward's traceback, its end, that travel with the sample."""
COMPONENT = "reward/"
"""Tags that begin so hold the value of the component of the reward that is named behind."""
TURN_REWARDS = "turn_rewards"
"""Tag that holds the rewards of the model's turns, a JSON list of numbers."""
LENGTH = struct.Struct(">I")

Failure = Literal["timeout", "raised", "invalid", "out_of_range", "died", "incomplete"]
"""Why a sample has no reward: no answer in time, an exception, no finite number, a number that the manifest does not
allow, a process that ended or broke the protocol, or a function over whole groups and a group that is not whole."""
FAILURES: tuple[Failure, ...] = get_args(Failure)

Takes = Literal["sample", "batch", "group"]
"""What a function is called with: one sample, samples of any prompts, or all samples of one prompt."""


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """Sample to score: the prompt's question, the response's text, the source's answer and meta (JSON values).

    length: tokens of the response, that which ends it included; transcript: turns of the model and observations so far,
    in order, of which the response is the last.
    """

    prompt: str
    response: str
    answer: Any = None
    meta: dict[str, Any] = {}
    length: int = 0
    transcript: list[Message] = []

    @classmethod
    def of(cls, prompt: Prompt, transcript: list[Message], *, length: int) -> Self:
        """Make it of a prompt and the turns that answer it."""
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
        """Turns of the model, at least 1."""
        return max(1, sum(turn.role == MODEL for turn in self.transcript))


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The first thing that a process is told: what to load, and how to restrict itself before.

    config: the function's settings, None where the manifest has none; device: torch's name of that which it computes
    with; share: part of the device's memory that it may use.
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
        """The arguments of a class, by name, that say where its object computes, and on what."""
        return {"device": self.device, "share": self.share, "extractor": self.extractor}


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of one call of the function, which may take so many seconds."""

    nonce: bytes
    examples: list[Example]
    seconds: float


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a function for one sample.

    value: finite, 0 where there is none; failure: why there is none, "" where there is; detail: a line about that, or
    the traceback of what was raised; details: what the function said beside its reward, a JSON object, or nothing;
    turns: the rewards of the model's turns, whose sum is ``value``, [] where there are none; text: the answer of an
    environment, None where the episode ends.
    """

    value: float = 0.0
    failure: Failure | Literal[""] = ""
    detail: str = ""
    details: Annotated[bytes, msgspec.Meta(max_length=MOST_DETAILS)] = b""
    turns: list[float] = []
    text: str | None = None


class ScoreAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of the process: a score for each sample, or why the call as a whole has none.

    To ``Load`` it answers with why the function cannot be loaded, or how it is called. takes: what it is called with;
    concurrent: whether many calls may be under way; unrestricted: what the sandbox lacks.
    """

    nonce: bytes
    scores: list[Score] = []
    failure: Literal["", "timeout", "raised", "invalid"] = ""
    detail: str = ""
    takes: Takes = "sample"
    concurrent: bool = False
    unrestricted: list[str] = []


class RewardResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome for one sample.

    value: finite, 0 where there is none; failure, detail: as in ``Score``; components: the values of the named
    components that have one; details: a JSON object or nothing, at most MOST_DETAILS bytes; turns: the rewards of the
    model's turns, [] where all of it is for the last; text: as in ``Score``.
    """

    value: float
    failure: Failure | Literal[""] = ""
    detail: str = ""
    components: dict[str, float] = {}
    details: bytes = b""
    turns: list[float] = []
    text: str | None = None

    @classmethod
    def incomplete(cls, there: int, *, size: int) -> Self:
        """Return the outcome where only ``there`` of the ``size`` samples of a group came that is judged whole."""
        return cls(value=0.0, failure="incomplete", detail=f"{there} of {size} samples of its prompt are here")

    @property
    def tags(self) -> dict[str, float | str]:
        """The tags by which a sample says it, so that counting and advantages need no fetch.

        failure, detail: why there is no reward, where there is none; ``COMPONENT`` and a name: the value of that
        component, where it has one; ``TURN_REWARDS``: those of the turns, where they have some.
        """
        failure = {"failure": self.failure, "detail": self.detail[-_MOST_DETAIL:]} if self.failure else {}
        return {
            "reward": self.value,
            **failure,
            **({TURN_REWARDS: f"[{','.join(f'{value:.7g}' for value in self.turns)}]"} if self.turns else {}),
            **{f"{COMPONENT}{name}": value for name, value in self.components.items()},
        }


def frame(message: msgspec.Struct) -> bytes:
    """Return the frame of ``message``. Raises ValueError where it is too large or holds what msgpack cannot say."""
    try:
        body = msgspec.msgpack.encode(message)
    except (TypeError, OverflowError) as error:
        raise ValueError(str(error)) from error
    if len(body) > MAX_FRAME:
        message_size = f"an example of {len(body)} bytes is more than {MAX_FRAME}"
        raise ValueError(message_size)
    return LENGTH.pack(len(body)) + body
