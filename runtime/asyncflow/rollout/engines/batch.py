"""Continuous batching as a plain object: sequences occupy slots, and every step makes one token per running sequence.

A step assigns free slots to waiting sequences (a prompt is prefilled once for all sequences that share it), draws one
token per row from the current logits, frees the slots of finished sequences, and runs the model once for the rest. A
token is drawn by temperature, log-softmax, and the inverse of the cumulative distribution at a given uniform. The
object has no thread and no clock.

Invariant: the ids and log-probs of a sequence are a function of its request and the weights, never of its slot, the
other sequences, or the step at which it got its slot. A response that an engine with the same slots and length started
under these weights ends as it would have ended there, to the bit: its tokens go through the model again, step by step,
and none of them is drawn again. Tokens made by other weights are prefilled together. An observation also goes through
the model step by step, so an episode made by one version has the same bits whether or not its state was kept.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncflow.identity import Version
from asyncflow.rollout.engines.base import Completion, Finish, GenerationRequest, SequenceName, StopTexts
from asyncflow.rollout.engines.model import CausalModel, Prefix
from asyncflow.rollout.sampling import stream, uniforms
from asyncflow.telemetry.spans import NO_SPANS, Spans

_BLOCK = 256

_PREFIXES_KEPT = 8


def draw(logits: Tensor, *, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    logits [rows, vocab]; temperatures float32[rows], 0 = greedy; uniforms float64[rows] in [0, 1).
    Return ids int64[rows] and log-probs float32[rows]: of logits / temperature, for greedy rows of the logits.
    """
    greedy = temperatures == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperatures)[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    if bool(greedy.all()):
        ids = logprobs.argmax(dim=-1)
    else:
        ids = _inverse(logprobs.exp(), uniforms)
        if bool(greedy.any()):
            ids = torch.where(greedy, logprobs.argmax(dim=-1), ids)
    return ids, logprobs.gather(1, ids[:, None])[:, 0]


def _inverse(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first index whose cumulative weight, in float64, exceeds uniform * total.

    Two levels keep it cheap for a large vocabulary: first the block is found by the sums of blocks, then the index in
    the block. If rounding of the sums puts the target past the block's end, its last index of positive weight is used.
    """
    rows, vocab = weights.shape
    if vocab % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, -vocab % _BLOCK))
    blocks = weights.view(rows, -1, _BLOCK)
    ends = blocks.sum(dim=-1).double().cumsum(dim=-1)
    total = ends[:, -1:]
    target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    block = torch.searchsorted(ends, target, right=True)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, 1, _BLOCK))[:, 0]
    within = torch.searchsorted(before + inside.double().cumsum(dim=-1), target, right=True)
    last = _BLOCK - 1 - (inside > 0).int().flip(-1).argmax(dim=-1, keepdim=True)
    return (block * _BLOCK + torch.minimum(within, last))[:, 0]


class Sequence:
    """One response while it is generated.

    ``aborted`` may be set from any thread and takes effect at the next step; ``so_far`` may be called from any thread.
    """

    def __init__(self, request: GenerationRequest, *, stops: StopTexts | None = None) -> None:
        self.request = request
        self._stops = stops
        self._turn = request.turn
        self.aborted = False
        self.finish: Finish | None = None
        self._ids: list[int] = request.continues.ids.tolist()
        self._logprobs: list[float] = request.continues.logprobs.tolist()
        self._versions: list[int] = request.continues.versions.tolist()

    @property
    def made(self) -> int:
        """Number of tokens drawn by this engine."""
        return len(self._ids) - self.request.prior_tokens

    def token(self, position: int) -> int | None:
        """Return the token at a position of the response, None if it is not drawn yet."""
        return self._ids[position] if position < len(self._ids) else None

    def ids_to_prefill(self, version: int) -> list[int]:
        """Return the tokens so far if weights other than ``version`` made some of them, otherwise an empty list."""
        return list(self._ids) if any(made_by != version for made_by in self._versions) else []

    def tokens(self) -> tuple[int, ...]:
        """Return the ids of the prompt and of the response so far."""
        return (*self.request.prompt_ids, *self._ids)

    def versions(self) -> tuple[int, ...]:
        """Return the versions of the tokens of the response so far."""
        return tuple(self._versions)

    def begins_with(self, kept: _Kept) -> bool:
        """Return whether this continues the kept episode: the same tokens, made by the same versions."""
        return (
            self.tokens()[: len(kept.tokens)] == kept.tokens and self.versions()[: len(kept.versions)] == kept.versions
        )

    def append(self, token: int, logprob: float, version: int) -> None:
        """Append one token; set ``finish`` if it is the last."""
        self._ids.append(token)
        self._logprobs.append(logprob)
        if token in self.request.stop_ids or (self._stops is not None and self._stops.met(self._ids[self._turn :])):
            self.finish = "stop"
        elif len(self._ids) == self.request.max_tokens:
            self.finish = "length"
        self._versions.append(version)

    def so_far(self) -> Completion:
        """Return the partial response while the sequence runs; of one that has just ended, without its last token.

        A token counts once its version is recorded, which happens last.
        """
        recorded = len(self._versions)
        return self._completion(recorded if self.finish is None else max(0, recorded - 1), "aborted")

    def completion(self) -> Completion:
        """Return the response with all its tokens."""
        return self._completion(len(self._ids), self.finish or "aborted")

    def _completion(self, tokens: int, finish: Finish) -> Completion:
        return Completion(
            ids=np.array(self._ids[:tokens], dtype=np.int32),
            logprobs=np.array(self._logprobs[:tokens], dtype=np.float32),
            versions=np.array(self._versions[:tokens], dtype=np.int64),
            finish=finish,
            loss_mask=self._mask(tokens),
        )

    def _mask(self, tokens: int) -> NDArray[np.bool_] | None:
        partial = self.request.continues
        if partial.loss_mask is None:
            return None
        return np.append(partial.loss_mask, np.ones(max(0, tokens - len(partial)), np.bool_))[:tokens]


class _Kept(NamedTuple):
    """An episode between two turns. prefix: cache content of all its ``tokens``, including the prompt, but the last."""

    tokens: tuple[int, ...]
    versions: tuple[int, ...]
    prefix: Prefix
    oldest: int


class DecodeBatch:
    """The running sequences of one model. Call it from one thread, under ``torch.inference_mode``.

    keeps_prefix, spans: see ``RolloutEngine``. stale: number of tokens drawn on keys and values of older weights.
    """

    def __init__(
        self,
        model: CausalModel,
        *,
        slots: int,
        max_length: int,
        keeps_prefix: bool = False,
        spans: Spans = NO_SPANS,
    ) -> None:
        self._model = model
        self._spans = spans
        self._keeps_prefix = keeps_prefix
        self._cache = model.cache(slots=slots, max_length=max_length)
        self._logits = torch.zeros(slots, model.config.get_text_config().vocab_size)
        self._temperatures = torch.zeros(slots)
        self._streams = np.zeros(slots, dtype=np.uint64)
        self._positions = np.zeros(slots, dtype=np.int64)
        self._tokens = np.zeros(slots, dtype=np.int64)
        self._oldest = np.zeros(slots, dtype=np.int64)
        self._newest = np.zeros(slots, dtype=np.int64)
        self._free = list(range(slots))
        self._active: dict[int, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._prefixes: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()
        self._kept: OrderedDict[SequenceName, _Kept] = OrderedDict()
        self._version: Version | None = None
        self.prefilled = 0
        self.steps = 0
        self.stale = 0

    @property
    def running(self) -> int:
        """Number of sequences that have a slot."""
        return len(self._active)

    @property
    def waiting(self) -> int:
        """Number of sequences that wait for a slot."""
        return len(self._waiting)

    def load(self, version: Version, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Load the weights of ``version``, and recompute the caches of the running sequences, or keep them.

        If they are kept, the next token of each sequence is still drawn from the logits of the older weights.
        """
        self._model.load(tensors)
        self._prefixes.clear()
        self._version = version
        if not self._keeps_prefix:
            self._kept.clear()
            for slot, sequence in self._active.items():
                self._place(slot, sequence)

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence for a slot."""
        self._waiting.append(sequence)

    def step(self) -> list[Sequence]:
        """Generate one token of each sequence; return the sequences that ended. Do nothing if none runs or waits."""
        ended = self._remove_aborted()
        self._admit()
        if not self._active:
            return ended
        ended += self._draw()
        if self._active:
            assert self._version is not None
            active = list(self._active)
            self._cache.open()
            self._logits = self._model.decode(self._cache, torch.from_numpy(self._tokens)).float()
            self._cache.close(torch.tensor(active))
            self._newest[active] = self._version.packed
        self.steps += 1
        return ended

    def _remove_aborted(self) -> list[Sequence]:
        ended = [sequence for sequence in self._waiting if sequence.aborted]
        if ended:
            self._waiting = deque(sequence for sequence in self._waiting if not sequence.aborted)
        for slot, sequence in list(self._active.items()):
            if sequence.aborted:
                self._release(slot)
                ended.append(sequence)
        return ended

    def _admit(self) -> None:
        if self._version is None:
            return
        while self._free and self._waiting:
            sequence = self._waiting.popleft()
            request = sequence.request
            slot = self._free.pop()
            self._temperatures[slot] = request.temperature
            self._streams[slot] = stream(seed=request.seed, key=request.key)
            self._active[slot] = sequence
            self._place(slot, sequence)

    def _place(self, slot: int, sequence: Sequence) -> None:
        """Compute the cache of a sequence in its slot: in one prefill if other weights made some of its tokens.

        For the next turn of an episode, the kept state is used.
        """
        assert self._version is not None
        kept = self._kept.pop(sequence.request.name, None)
        if kept is not None and sequence.begins_with(kept):
            self._cache.begin(slot, kept.prefix)
            self._positions[slot] = len(kept.versions) - 1
            self._oldest[slot], self._newest[slot] = kept.oldest, self._version.packed
            return
        prompt_ids, response_ids = sequence.request.prompt_ids, sequence.ids_to_prefill(self._version.packed)
        prefix = self._prefill((*prompt_ids, *response_ids)) if response_ids else self._prefix(prompt_ids)
        self._cache.begin(slot, prefix)
        self._logits[slot] = prefix.logits
        self._positions[slot] = len(response_ids)
        self._oldest[slot] = self._newest[slot] = self._version.packed

    def _prefix(self, prompt_ids: tuple[int, ...]) -> Prefix:
        """Prefill a prompt, or reuse one of the most recent prefills: the samples of a group follow each other."""
        prefix = self._prefixes.pop(prompt_ids, None)
        if prefix is None:
            prefix = self._prefill(prompt_ids)
        self._prefixes[prompt_ids] = prefix
        if len(self._prefixes) > _PREFIXES_KEPT:
            self._prefixes.popitem(last=False)
        return prefix

    def _prefill(self, ids: tuple[int, ...]) -> Prefix:
        self.prefilled += 1
        with self._spans.background("prefill"):
            return self._model.prefill(ids)

    def _draw(self) -> list[Sequence]:
        numbers = torch.from_numpy(uniforms(self._streams, self._positions))
        ids, logprobs = draw(self._logits, temperatures=self._temperatures, uniforms=numbers)
        self._tokens = ids.numpy()
        tokens, values, versions = ids.tolist(), logprobs.tolist(), self._newest.tolist()
        positions = self._positions.tolist()
        self._positions += 1
        ended = []
        for slot, sequence in list(self._active.items()):
            if (known := sequence.token(positions[slot])) is not None:
                self._tokens[slot] = known
                continue
            sequence.append(tokens[slot], values[slot], versions[slot])
            self.stale += int(self._oldest[slot] != versions[slot])
            if sequence.finish is not None:
                if sequence.finish == "stop" and sequence.request.episode:
                    self._keep(slot, sequence)
                self._release(slot)
                ended.append(sequence)
        return ended

    def _keep(self, slot: int, sequence: Sequence) -> None:
        """Keep the computed state of an episode for its next turn, for at most as many episodes as there are slots."""
        prefix = self._cache.copy(slot, logits=self._logits[slot])
        oldest = int(self._oldest[slot])
        self._kept[sequence.request.name] = _Kept(sequence.tokens(), sequence.versions(), prefix, oldest)
        if len(self._kept) > self._cache.slots:
            self._kept.popitem(last=False)

    def _release(self, slot: int) -> None:
        del self._active[slot]
        self._free.append(slot)
        self._cache.end(slot)
        self._temperatures[slot] = 0.0
