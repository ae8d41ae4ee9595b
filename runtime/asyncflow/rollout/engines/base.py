"""Interface of an engine, which turns prompts into tokens with their log-probs and versions, one coroutine a sequence.

The same interface fits a model in this process, a vLLM server over HTTP (a request, a response, pause-update-resume
inside ``load``) and a simulation. Requests are batched inside; the caller knows only coroutines.

An *episode* is a response of several turns: the model's tokens, an observation (tokens that somebody else chose), the
model's again, and so on. It is asked for turn by turn: ``generate`` ends with the turn, the caller adds an observation
(``Completion.observed``), and asks for what ``continues`` that. An engine keeps what it has computed of an episode.

Invariants: every token carries the log-probability of the distribution that it was drawn from, and the version of the
weights that drew it, both written where the token was made; a response ends with the token that completes the first of
its stop texts, and whether one does is a function of its ids since the last observation; a response that another
engine began, or that an observation follows, keeps its tokens, their log-probabilities and versions, and goes on behind
them; what is kept of it saves work and nothing else.
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
"""Return the text of ids, special tokens included."""

_MARGIN = 2
"""Tokens more than a text has bytes: a tokenizer may drop a space in front of the first of them."""

Finish = Literal["stop", "length", "aborted"]
SequenceName: TypeAlias = tuple[str, SampleKey]
"""The purpose of a sequence, and whose response it is."""
OPTIONS = "spec.rollout.engine.options"
"""Field of a manifest with the engine's own options."""


class StopTexts:
    """Looks for ``texts`` at the end of a response in the making."""

    def __init__(self, texts: Sequence[str], *, decode: Decode) -> None:
        self._texts = texts
        self._decode = decode
        self._window = max(len(text.encode()) for text in texts) + _MARGIN

    def met(self, ids: Sequence[int]) -> bool:
        """Return whether the last of ``ids`` completes one of the texts, given that none before it did.

        A token has at least one byte, so that no text is longer than the tokens that are looked at.
        """
        end = self._decode(ids[-self._window :])
        return any(text in end for text in self._texts)


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One response, as far as it went.

    ids int32[n]; logprobs float32[n], natural log, after temperature (of the untempered distribution where greedy);
    versions int64[n], ``Version.packed`` of the weights that made each token; loss_mask bool[n], whether the model
    chose the token, None where it chose all. A token of an observation has the log-prob 0 and the version of the token
    before the observation, so that neither ratios nor staleness know of it.
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
        """Number of tokens up to the end of the last observation: where the turn begins that is last."""
        others = np.flatnonzero(~self.chosen)
        return int(others[-1]) + 1 if len(others) else 0

    def segments(self) -> Iterator[tuple[bool, NDArray[np.int32]]]:
        """Return turns and observations in order: whether the model chose its tokens, and their ids."""
        return segments(self.ids, self.chosen)

    def observed(self, ids: Sequence[int]) -> Completion:
        """Return the response that goes on with an observation, which needs a turn before it."""
        count = len(ids)
        return Completion(
            ids=np.append(self.ids, np.array(ids, np.int32)),
            logprobs=np.append(self.logprobs, np.zeros(count, np.float32)),
            versions=np.append(self.versions, np.repeat(self.versions[-1:], count)),
            finish="aborted",
            loss_mask=np.append(self.chosen, np.zeros(count, np.bool_)),
        )

    def unended(self) -> Completion:
        """Return the response without its last token, behind which whoever goes on makes that token again."""
        return self if self.finish == "aborted" else self._first(len(self) - 1)

    def before(self, version: Version) -> Completion:
        """Return the response without the tokens that ``version`` made, and those behind them."""
        made = np.flatnonzero(self.versions == version.packed)
        return self._first(int(made[0])) if len(made) else self

    def _first(self, tokens: int) -> Completion:
        """Return the first tokens of the response, which go on."""
        return Completion(
            ids=self.ids[:tokens],
            logprobs=self.logprobs[:tokens],
            versions=self.versions[:tokens],
            finish="aborted",
            loss_mask=None if self.loss_mask is None else self.loss_mask[:tokens],
        )

    def followed_by(self, rest: Completion) -> Completion:
        """Return the response that begins with this and goes on with ``rest``."""
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
"""Response of which there is nothing yet."""


class VersionMarks:
    """Marks of the versions that make the tokens of a sequence, which ``version`` begins."""

    def __init__(self, version: Version) -> None:
        self._marks = [(0, version.packed)]

    def mark(self, tokens: int, version: Version) -> None:
        """Note that ``version`` makes the tokens from number ``tokens`` on, whatever was noted of those."""
        marks = [mark for mark in self._marks if mark[0] < tokens]
        same = marks and marks[-1][1] == version.packed
        self._marks = marks if same else [*marks, (tokens, version.packed)]

    def stale(self, tokens: int) -> int:
        """Return how many of the first ``tokens`` were made since other weights came under way."""
        return max(0, tokens - self._marks[1][0]) if len(self._marks) > 1 else 0

    def versions(self, tokens: int) -> NDArray[np.int64]:
        """Return ``Version.packed`` of what made each of the first ``tokens``, int64[tokens]."""
        versions = np.empty(tokens, dtype=np.int64)
        for start, version in self._marks:
            versions[start:] = version
        return versions


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One response that is wanted.

    temperature 0 is greedy; seed and key determine the random numbers (``rollout.sampling``); a stop id ends the
    response and is its last token, as does the token that completes a stop text; continues: the beginning of the
    response, unfinished, as another engine made it, or this one before an observation; episode: whether an observation
    may follow, behind which it is asked for what comes next. max_tokens: of the response, observations included.
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
        """Name of the sequence that it asks for."""
        return self.purpose, self.key

    @property
    def begun(self) -> int:
        """Tokens of the response that are there already."""
        return len(self.continues)

    @property
    def turn(self) -> int:
        """Tokens of the response that are older than the turn it asks for: no stop text begins in them."""
        return self.continues.turn

    def check(self, *, max_length: int) -> None:
        """Raise ManifestError for what no engine can do."""
        where = f"request {self.purpose} {self.key.serial}.{self.key.sample}"
        if self.max_tokens < 1 or not self.temperature >= 0:
            raise ManifestError(f"max_tokens={self.max_tokens}, temperature={self.temperature}", where=where)
        if not self.prompt_ids:
            raise ManifestError("the prompt has no tokens", where=where)
        if self.begun >= self.max_tokens:
            raise ManifestError(f"a response of {self.max_tokens} tokens has {self.begun} already", where=where)
        if len(self.prompt_ids) + self.max_tokens > max_length:
            raise ManifestError(
                f"{len(self.prompt_ids)} prompt tokens and {self.max_tokens} new ones exceed {max_length}",
                where=where,
                hint="Raise the engine's maximal length or lower sampling.maxTokens",
            )


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Counts of an engine's work so far.

    busy_s: seconds with at least one running sequence; tokens: made so far, by purpose, those of sequences that run
    included; stale: how many of these were made behind keys and values of older weights.
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
    """Devices of one engine: torch's name of their kind, their number, the share of their memory that it may use."""

    kind: str = "cpu"
    count: int = 1
    share: float = 1.0


class RolloutEngine(ABC):
    """The adapter of one rollout engine; made by ``open_engine``.

    folder: the Hugging Face folder with the configuration (no weights are read: they come through ``load``); slots:
    sequences that run at once; max_length: prompt and response tokens of a sequence; options: the engine's own, with a
    ManifestError for one that it does not know; decode: gives the text of ids, which stop texts need; devices: those
    that it computes on; deterministic: whether what a sequence becomes may depend on nothing but its request and the
    weights, to the bit; keeps_prefix: whether sequences that run when weights are loaded go on behind the keys and
    values of the older ones. ``Options``: the shape of the options, each field with a default, so that they are checked
    before anything starts; None: the engine alone can tell. ``can_be_deterministic``, ``can_keep_prefix``: whether it
    knows how;
    ``continues_exactly``: whether what another engine began ends here, under the same weights, as it would have there.
    """

    Options: ClassVar[type[msgspec.Struct] | None] = None
    can_be_deterministic: ClassVar[bool] = False
    can_keep_prefix: ClassVar[bool] = False
    continues_exactly: ClassVar[bool] = False
    version: Version | None = None
    spans: Spans = NO_SPANS
    """Recorder of prefills, by an engine that can tell them; given before ``start``."""

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
                f"the engine {type(self).__name__} does not promise the same bits whatever runs beside a sequence",
                where="spec.schedule.deterministic",
                hint="Use the engine transformers, or vllm on a GPU; or leave deterministic out",
            )
        if keeps_prefix and not self.can_keep_prefix:
            raise ManifestError(
                f"the engine {type(self).__name__} computes anew what there is of a response when weights change",
                where="spec.schedule.prefix",
                hint="Give prefix: recompute, or use the engine transformers or vllm",
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
        """True where it may go on with what another engine began; else that is made anew."""
        return self.continues_exactly or not self.deterministic

    def stops_of(self, request: GenerationRequest) -> StopTexts | None:
        """Return what finds the end of this response in its text, None where no text ends it. Raises ManifestError."""
        if not request.stop_texts:
            return None
        if self.decode is None:
            raise ManifestError("stop texts need a tokenizer", where=type(self).__name__, hint="Open it with decode")
        return StopTexts(request.stop_texts, decode=self.decode)

    @abstractmethod
    async def start(self) -> None:
        """Make the engine ready to load weights."""

    async def stage(self, version: Version, tensors: Mapping[str, NDArray[Any]]) -> None:  # noqa: B027
        """Prepare the weights of ``version``, which ``load`` is probably asked for next, while sequences run.

        By default nothing is prepared. tensors: as for ``load``.
        """

    @abstractmethod
    async def load(self, version: Version, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Swap to ``version``. Sequences that run go on under it; what they have so far is computed anew, or kept.

        tensors: by parameter name; bfloat16 as its uint16 bits. Raises ManifestError where names or shapes do not fit
        the model; then nothing was overwritten.
        """

    @abstractmethod
    async def generate(self, request: GenerationRequest) -> Completion:
        """Generate one response, of an episode one turn. Cancelling the coroutine frees its slot at the next step.

        Between the turns of an episode it holds no slot. What was computed of it is kept for the next turn, as far as
        there is room, until other weights are loaded.
        """

    @abstractmethod
    async def abort(self, keys: Iterable[SampleKey], *, purpose: str = "train") -> None:
        """End these sequences at the next step: their ``generate`` returns what there is, finish ``aborted``."""

    def unfinished(self) -> Mapping[SequenceName, Completion]:
        """Return what there is of each sequence that runs: so much that whoever goes on behind it makes the rest.

        By default nothing: the engine cannot tell before they end.
        """
        return {}

    async def probe(self, ids: Sequence[int]) -> NDArray[np.float32] | None:  # noqa: ARG002
        """Return log p(ids[i] | ids[:i]) for i >= 1 under the loaded weights at temperature 1, float32[n - 1].

        None, by default: the engine cannot tell.
        """
        return None

    async def ended(self) -> None:
        """Wait until the engine can no longer work, and raise why; by default for ever."""
        await asyncio.Event().wait()

    def routes(self) -> Iterable[web.RouteDef]:
        """Return the routes of the engine's own inference service; by default it has none.

        They answer 503 before the first version is loaded.
        """
        return ()

    async def metrics(self) -> str:
        """Return the engine's own metrics in Prometheus' text format; by default it has none."""
        return ""

    @abstractmethod
    def stats(self) -> EngineStats:
        """Return the counters; cheap, from any thread."""

    @abstractmethod
    async def close(self) -> None:
        """Stop; running sequences end as ``aborted``. Idempotent."""
