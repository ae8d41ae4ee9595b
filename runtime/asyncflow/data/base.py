"""A prompt source: random access to checkable tasks, with a fixed split into training and held-out tasks.

Invariants: ``source.prompt(serial)`` is a pure function of (source, config, seed, purpose, serial), so that a restarted
driver gets the same prompts again. No question is both in a training and in a held-out source, since ``held_out`` is a
function of the question's text alone. A held-out source never repeats a question.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, Protocol

import msgspec

from asyncflow.errors import ManifestError

Purpose = Literal["train", "eval"]

HELD_OUT_SHARE = 0.25
"""The share of all questions that is held out for evaluation, unless both sources of a job set another share."""

MODEL: Final = "assistant"
"""Role of the model in a conversation."""
ENVIRONMENT: Final = "environment"
"""Role of the environment in a transcript of several turns."""

_TRIES = 10_000


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: str
    content: str


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One task: a question, its right answer and data for its checker, all of them JSON values.

    question: the text that identifies the task; messages: the conversation to send in place of the question, if the
    source has one; task: the name of the checker's task; meta: data for the checker.
    """

    question: str
    answer: Any = None
    task: str = ""
    meta: dict[str, Any] = {}
    messages: tuple[Message, ...] = ()

    def packed(self) -> bytes:
        """Return the prompt as bytes for a uint8 cell of the queue. Raises ValueError if it cannot be encoded."""
        try:
            return msgspec.msgpack.encode(self)
        except OverflowError as error:
            raise ValueError(str(error)) from error

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Prompt:
        """Return the prompt that ``packed`` encoded. Raises msgspec.DecodeError if ``data`` is not a prompt."""
        return msgspec.msgpack.decode(data, type=cls)


class PromptSource(Protocol):
    """Tasks by serial number."""

    @property
    def size(self) -> int | None:
        """Number of different serials; None if the source is endless."""

    @property
    def available(self) -> int | None:
        """Number of tasks put so far, for a source that is filled while the job runs; None for other sources."""

    def prompt(self, serial: int) -> Prompt:
        """Return task ``serial`` >= 0; a finite training source repeats its tasks after its end, in another order.

        Raises IndexError past the end of a held-out source, ManifestError if the source has too few tasks.
        """


def held_out(question: str, share: float = HELD_OUT_SHARE) -> bool:
    """Return whether the question belongs to evaluation, by a hash of its text with whitespace normalised."""
    return digest("held-out", " ".join(question.split())) < share * 2**63


def digest(*parts: str | int) -> int:
    """Return a 63-bit hash of the parts, which is the same on every machine."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


class GeneratedSource:
    """Tasks made by a generator: endless for training, ``size`` different ones for evaluation.

    generate: a pure function that returns the task for any index in [0, indices); name, where: name of the source and
    field of the manifest, for messages; seed: distinguishes sources with the same generator; share: the share of all
    questions that is held out.
    """

    available: int | None = None

    def __init__(
        self,
        generate: Callable[[int], Prompt],
        *,
        name: str,
        indices: int,
        seed: int,
        purpose: Purpose,
        where: str,
        size: int | None = None,
        share: float = HELD_OUT_SHARE,
    ) -> None:
        self.share = share
        self._generate = generate
        self._name = name
        self._indices = indices
        self._seed = seed
        self._purpose = purpose
        self._where = where
        self._known: list[Prompt] = []
        self._unseen = self._distinct()
        self.size = size if purpose == "eval" else None

    def prompt(self, serial: int) -> Prompt:
        """Return task ``serial``."""
        if self._purpose == "train":
            return self._first_of_class(serial)
        if self.size is not None and serial >= self.size:
            raise IndexError(f"{self._name} has {self.size} held-out prompts, not {serial + 1}")
        while len(self._known) <= serial:
            self._known.append(next(self._unseen))
        return self._known[serial]

    def _first_of_class(self, serial: int) -> Prompt:
        for attempt in range(_TRIES):
            prompt = self._generate(digest(self._purpose, self._seed, serial, attempt) % self._indices)
            if held_out(prompt.question, self.share) == (self._purpose == "eval"):
                return prompt
        raise self._exhausted(0)

    def _distinct(self) -> Iterator[Prompt]:
        seen: set[str] = set()
        repeats = 0
        for draw in range(2**62):
            prompt = self._first_of_class(draw)
            if prompt.question not in seen:
                seen.add(prompt.question)
                repeats = 0
                yield prompt
            repeats += 1
            if repeats > _TRIES:
                raise self._exhausted(len(seen))

    def _exhausted(self, found: int) -> ManifestError:
        kind = "training" if self._purpose == "train" else "held-out"
        return ManifestError(
            f"{self._name} generates only {found} different {kind} prompts with this config",
            where=self._where,
            hint="Allow more variety in config, or set a smaller size",
        )
