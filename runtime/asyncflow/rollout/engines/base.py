"""Interface of an engine, which turns prompts into tokens with log-probs and versions, one coroutine per sequence.

The same interface fits a model in this process, a vLLM server over HTTP (``load`` pauses, updates and resumes it) and a
simulation. An engine batches requests internally; the caller only awaits coroutines.

An *episode* is a response of several turns: tokens of the model, an observation (tokens that the model did not choose),
tokens of the model again, and so on. It is requested turn by turn: ``generate`` returns at the end of a turn, the
caller appends an observation (``Completion.observed``) and requests a response that ``continues`` the result. An engine
may keep its computed state of an episode between turns.

Invariants:
* Every token carries its log-prob under the distribution that it was drawn from, and the version of the weights that
  drew it. Both are recorded where the token is made.
* A response ends with the token that completes the first of its stop texts. Whether a token does so is a function of
  the ids since the last observation.
* A response that another engine started, or that an observation follows, keeps its tokens, log-probs and versions; new
  tokens are appended to them. State kept between turns only saves work and never changes a result.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncflow.environments.transcripts import segments
from asyncflow.errors import ManifestError
from asyncflow.identity import SampleKey, Version
from asyncflow.telemetry.spans import NO_SPANS, Spans

if TYPE_CHECKING:
    from aiohttp import web

Decode = Callable[[Sequence[int]], str]
"""Returns the text of ids, including special tokens."""

_MARGIN = 2
"""Extra tokens to decode beyond the bytes of a text: a tokenizer may drop a space before the first token."""

Finish = Literal["stop", "length", "aborted"]
SequenceName: TypeAlias = tuple[str, SampleKey]
"""The purpose of a sequence, and the key of its sample."""
OPTIONS = "spec.rollout.engine.options"
"""Manifest field with the options that belong to the engine itself."""


class StopTexts:
    """Detects stop ``texts`` at the end of a growing response. window: most tokens that may be needed to decode one."""

    def __init__(self, texts: Sequence[str], *, decode: Decode) -> None:
        self._texts = texts
        self._decode = decode
        self.window = max(len(text.encode()) for text in texts) + _MARGIN

    def met(self, ids: Sequence[int]) -> bool:
        """Return whether the last of ``ids`` completes one of the texts, given that no earlier token did.

        Every token has at least one byte, so the decoded tokens cover the longest text.
        """
        end = self._decode(ids[-self.window :])
        return any(text in end for text in self._texts)

    def end(self, ids: Sequence[int], *, before: Sequence[int]) -> int | None:
        """Return the number of ``ids`` up to the first that completes a text, None if none does.

        before: earlier ids of the response, which complete no text.
        """
        known = [*before[-self.window :], *ids]
        first = len(known) - len(ids) + 1
        ends = range(first, len(known) + 1)
        return next((end - first + 1 for end in ends if self.met(known[max(0, end - self.window) : end])), None)


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One response, complete or partial.

    ids int32[n]; logprobs float32[n]: natural log, after temperature (of the untempered distribution if greedy).
    versions int64[n]: ``Version.packed`` of the weights that made each token.
    loss_mask bool[n]: whether the model chose the token, None if it chose all of them.
    A token of an observation has the log-prob 0 and the version of the last token before the observation, so that it
    affects neither ratios nor staleness.
    """

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int64]
    finish: Finish
    loss_mask: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def chosen(self) -> NDArray[np.bool_]:
        """Return for each token whether the model chose it, bool[n]."""
        return np.ones(len(self), np.bool_) if self.loss_mask is None else self.loss_mask

    @property
    def turn(self) -> int:
        """Number of tokens up to the end of the last observation: the start of the last turn."""
        observed = np.flatnonzero(~self.chosen)
        return int(observed[-1]) + 1 if len(observed) else 0

    def segments(self) -> Iterator[tuple[bool, NDArray[np.int32]]]:
        """Return turns and observations in order: whether the model chose the tokens, and their ids."""
        return segments(self.ids, self.chosen)

    def observed(self, ids: Sequence[int]) -> Completion:
        """Return the response extended by an observation. It needs at least one turn before."""
        count = len(ids)
        return Completion(
            ids=np.append(self.ids, np.array(ids, np.int32)),
            logprobs=np.append(self.logprobs, np.zeros(count, np.float32)),
            versions=np.append(self.versions, np.repeat(self.versions[-1:], count)),
            finish="aborted",
            loss_mask=np.append(self.chosen, np.zeros(count, np.bool_)),
        )

    def without_last(self) -> Completion:
        """Return the response without its last token, so that a continuation makes that token again."""
        return self if self.finish == "aborted" else self._first(len(self) - 1)

    def before(self, version: Version) -> Completion:
        """Return the response up to the first token that ``version`` made."""
        positions = np.flatnonzero(self.versions == version.packed)
        return self._first(int(positions[0])) if len(positions) else self

    def _first(self, tokens: int) -> Completion:
        """Return the first tokens of the response, as an unfinished one."""
        return Completion(
            ids=self.ids[:tokens],
            logprobs=self.logprobs[:tokens],
            versions=self.versions[:tokens],
            finish="aborted",
            loss_mask=None if self.loss_mask is None else self.loss_mask[:tokens],
        )

    def extended_by(self, rest: Completion) -> Completion:
        """Return this response extended by ``rest``."""
        return Completion(
            ids=np.concatenate([self.ids, rest.ids]),
            logprobs=np.concatenate([self.logprobs, rest.logprobs]),
            versions=np.concatenate([self.versions, rest.versions]),
            finish=rest.finish,
            loss_mask=None if self.loss_mask is None else np.concatenate([self.loss_mask, rest.chosen]),
        )


NOTHING = Completion(
    ids=np.empty(0, np.int32), logprobs=np.empty(0, np.float32), versions=np.empty(0, np.int64), finish="aborted"
)
"""Empty, unfinished response."""


class VersionMarks:
    """Record of the versions that make the tokens of a sequence. version: makes the first token."""

    def __init__(self, version: Version) -> None:
        self._marks = [(0, version.packed)]

    def mark(self, tokens: int, version: Version) -> None:
        """Record that ``version`` makes the tokens from index ``tokens`` on; replaces earlier marks of these tokens."""
        marks = [mark for mark in self._marks if mark[0] < tokens]
        same = marks and marks[-1][1] == version.packed
        self._marks = marks if same else [*marks, (tokens, version.packed)]

    def stale(self, tokens: int) -> int:
        """Return how many of the first ``tokens`` were made after the first change of weights during the sequence."""
        return max(0, tokens - self._marks[1][0]) if len(self._marks) > 1 else 0

    def versions(self, tokens: int) -> NDArray[np.int64]:
        """Return ``Version.packed`` of the version that made each of the first ``tokens``, int64[tokens]."""
        versions = np.empty(tokens, dtype=np.int64)
        for start, version in self._marks:
            versions[start:] = version
        return versions


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """Request of one response.

    max_tokens: of the response, including observations; temperature: 0 means greedy.
    stop_ids, stop_texts: a stop id, or the token that completes a stop text, ends the response and is its last token.
    seed: determines the random numbers together with key (``rollout.sampling``).
    continues: unfinished start of the response, made by another engine, or by this one before an observation.
    episode: whether an observation may follow the result, after which the next turn is requested.
    """

    key: SampleKey
    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()
    stop_texts: tuple[str, ...] = ()
    seed: int = 0
    purpose: str = "train"
    continues: Completion = NOTHING
    episode: bool = False

    @property
    def name(self) -> SequenceName:
        """Name of the requested sequence."""
        return self.purpose, self.key

    @property
    def prior_tokens(self) -> int:
        """Number of tokens of the response that already exist."""
        return len(self.continues)

    @property
    def turn(self) -> int:
        """Number of tokens before the requested turn; no stop text starts in them."""
        return self.continues.turn

    def check(self, *, max_length: int) -> None:
        """Raise ManifestError for a request that no engine can fulfil."""
        where = f"request {self.purpose} {self.key.serial}.{self.key.sample}"
        if self.max_tokens < 1 or not self.temperature >= 0:
            raise ManifestError(f"max_tokens={self.max_tokens}, temperature={self.temperature}", where=where)
        if not self.prompt_ids:
            raise ManifestError("the prompt has no tokens", where=where)
        if self.prior_tokens >= self.max_tokens:
            what = f"a response of at most {self.max_tokens} tokens already has {self.prior_tokens}"
            raise ManifestError(what, where=where)
        if len(self.prompt_ids) + self.max_tokens > max_length:
            raise ManifestError(
                f"{len(self.prompt_ids)} prompt tokens and {self.max_tokens} new ones exceed {max_length}",
                where=where,
                hint="Raise the engine's maximal length or lower sampling.maxTokens",
            )


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Counters of an engine's work so far.

    busy_s: seconds with at least one running sequence; tokens: number made so far by purpose, including those of
    running sequences; stale: number of tokens made on keys and values of older weights.
    """

    running: int = 0
    waiting: int = 0
    tokens: Mapping[str, int] = field(default_factory=dict)
    stale: int = 0
    prefilled: int = 0
    steps: int = 0
    busy_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Devices of one engine. kind: torch's name; count: number; share: fraction of their memory that it may use."""

    kind: str = "cpu"
    count: int = 1
    share: float = 1.0


class RolloutEngine(ABC):
    """Adapter of one rollout engine; created by ``open_engine``.

    folder: Hugging Face folder with the configuration (weights are not read from it; they come through ``load``).
    slots: number of sequences that run at the same time; max_length: prompt and response tokens of a sequence.
    options: the engine's own options; an unknown one raises ManifestError.
    decode: returns the text of ids, required for stop texts; devices: the devices that it computes on.
    deterministic: whether a sequence must depend, to the bit, on nothing but its request and the weights.
    keeps_prefix: whether sequences that run when weights are loaded keep the keys and values of the older weights.
    Options: schema of the options, each with a default, for an early check; None if only the engine can check them.
    can_be_deterministic, can_keep_prefix: whether the engine supports these settings.
    continues_exactly: whether a response that another engine started ends, under the same weights, as it would there.
    """

    Options: ClassVar[type[msgspec.Struct] | None] = None
    can_be_deterministic: ClassVar[bool] = False
    can_keep_prefix: ClassVar[bool] = False
    continues_exactly: ClassVar[bool] = False
    version: Version | None = None
    spans: Spans = NO_SPANS
    """Records prefills, if the engine can measure them; set before ``start``."""

    def __init__(
        self,
        *,
        folder: Path | None,
        slots: int,
        max_length: int,
        threads: int = 1,
        dtype: str = "float32",
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
        decode: Decode | None = None,
        devices: Devices | None = None,
        deterministic: bool = False,
        keeps_prefix: bool = False,
    ) -> None:
        if deterministic and not self.can_be_deterministic:
            raise ManifestError(
                f"the engine {type(self).__name__} does not guarantee the same bits whatever else it runs",
                where="spec.schedule.deterministic",
                hint="Use the engine transformers, or vllm on a GPU; or leave deterministic out",
            )
        if keeps_prefix and not self.can_keep_prefix:
            raise ManifestError(
                f"the engine {type(self).__name__} can only recompute running responses when weights change",
                where="spec.schedule.prefix",
                hint="Set prefix: recompute, or use the engine transformers or vllm",
            )
        if slots < 1 or max_length < 2 or threads < 1:
            raise ManifestError(
                f"slots={slots}, max_length={max_length}, threads={threads}: too small", where=type(self).__name__
            )
        self.folder = folder
        self.slots = slots
        self.max_length = max_length
        self.threads = threads
        self.dtype = dtype
        self.seed = seed
        self.options = dict(options or {})
        self.decode = decode
        self.devices = devices or Devices()
        self.deterministic = deterministic
        self.keeps_prefix = keeps_prefix

    @property
    def may_continue(self) -> bool:
        """True if the engine may continue a response that another engine started; otherwise it is made from scratch."""
        return self.continues_exactly or not self.deterministic

    def stops_of(self, request: GenerationRequest) -> StopTexts | None:
        """Return the detector of this response's stop texts, None if it has none. Raises ManifestError."""
        if not request.stop_texts:
            return None
        if self.decode is None:
            raise ManifestError("stop texts need a tokenizer", where=type(self).__name__, hint="Open it with decode")
        return StopTexts(request.stop_texts, decode=self.decode)

    @abstractmethod
    async def start(self) -> None:
        """Prepare the engine for loading weights."""

    async def stage(self, version: Version, tensors: Mapping[str, NDArray[Any]]) -> None:  # noqa: B027
        """Prepare the weights of ``version``, the probable next argument of ``load``, while sequences run.

        The default does nothing. tensors: as for ``load``.
        """

    @abstractmethod
    async def load(self, version: Version, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Swap to ``version``. Running sequences continue under it; their keys and values are recomputed, or kept.

        tensors: by parameter name; bfloat16 as its bits in uint16. Raises ManifestError, with the weights unchanged, if
        names or shapes do not match the model.
        """

    @abstractmethod
    async def generate(self, request: GenerationRequest) -> Completion:
        """Generate one response, or one turn of an episode. Cancelling the coroutine frees its slot at the next step.

        Between the turns of an episode no slot is held. The computed state of the episode is kept for the next turn if
        there is room, until other weights are loaded.
        """

    @abstractmethod
    async def abort(self, keys: Iterable[SampleKey], *, purpose: str = "train") -> None:
        """End these sequences at the next step: ``generate`` returns partial responses with finish ``aborted``."""

    def unfinished(self) -> Mapping[SequenceName, Completion]:
        """Return the partial response of each running sequence, such that a continuation yields the same rest.

        The default is empty: the engine cannot return responses before they end.
        """
        return {}

    async def probe(self, ids: Sequence[int]) -> NDArray[np.float32] | None:  # noqa: ARG002
        """Return log p(ids[i] | ids[:i]) for i >= 1 under the loaded weights at temperature 1, float32[n - 1].

        The default returns None: the engine cannot compute it.
        """
        return None

    async def ended(self) -> None:
        """Wait until the engine can no longer work, and raise the reason. The default waits forever."""
        await asyncio.Event().wait()

    def routes(self) -> Iterable[web.RouteDef]:
        """Return the routes of the engine's own inference service, by default none.

        They answer 503 until the first version is loaded.
        """
        return ()

    async def metrics(self) -> str:
        """Return the engine's own metrics in the Prometheus text format, by default none."""
        return ""

    @abstractmethod
    def stats(self) -> EngineStats:
        """Return the counters. Cheap; may be called from any thread."""

    @abstractmethod
    async def close(self) -> None:
        """Stop; running sequences end as ``aborted``. Idempotent."""
