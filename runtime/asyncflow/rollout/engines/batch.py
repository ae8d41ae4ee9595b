"""Continuous batching as a plain object: sequences take seats, every step gives each seated one a token.

A step seats who waits (a prompt is prefilled once for all who share it), draws a token a row from the logits at hand,
lets the finished leave, and runs the model once for the rest. It owns no thread and no clock.

Invariant: the ids and log-probabilities of a sequence are a function of its request and the weights: never of its slot,
its neighbours, or the step at which it was seated.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncflow.errors import Refused
from asyncflow.identity import Version
from asyncflow.rollout.engines.base import Completion, Finish, GenerationRequest
from asyncflow.rollout.engines.draw import draw
from asyncflow.rollout.engines.kv import Prefix
from asyncflow.rollout.engines.model import CausalModel
from asyncflow.rollout.engines.stopping import StopTexts
from asyncflow.rollout.sampling import stream, uniforms

_PREFIXES_KEPT = 8


class Sequence:
    """One response in the making. ``aborted`` may be set from any thread and is honoured at the next step."""

    def __init__(self, request: GenerationRequest, *, stops: StopTexts | None = None) -> None:
        self.request = request
        self._stops = stops
        self.aborted = False
        self.finish: Finish | None = None
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []

    @property
    def length(self) -> int:
        """Tokens so far."""
        return len(self._ids)

    def append(self, token: int, logprob: float, version: int) -> None:
        """Take one token; sets ``finish`` where it is the last."""
        self._ids.append(token)
        self._logprobs.append(logprob)
        self._versions.append(version)
        if token in self.request.stop_ids or (self._stops is not None and self._stops.met(self._ids)):
            self.finish = "stop"
        elif len(self._ids) == self.request.max_tokens:
            self.finish = "length"

    def completion(self) -> Completion:
        """Return what there is."""
        return Completion(
            ids=np.array(self._ids, dtype=np.int32),
            logprobs=np.array(self._logprobs, dtype=np.float32),
            versions=np.array(self._versions, dtype=np.int64),
            finish=self.finish or "aborted",
        )


class Batch:
    """The seats of one model; call from one thread under ``torch.inference_mode``."""

    def __init__(self, model: CausalModel, *, slots: int, max_length: int) -> None:
        self._model = model
        self._cache = model.cache(slots=slots, max_length=max_length)
        self._logits = torch.zeros(slots, model.config.vocab_size)
        self._temperatures = torch.zeros(slots)
        self._streams = np.zeros(slots, dtype=np.uint64)
        self._positions = np.zeros(slots, dtype=np.int64)
        self._tokens = np.zeros(slots, dtype=np.int64)
        self._free = list(range(slots))
        self._seated: dict[int, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._prefixes: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()
        self._version: Version | None = None
        self.prefilled = 0
        self.steps = 0

    @property
    def running(self) -> int:
        """Sequences that have a seat."""
        return len(self._seated)

    @property
    def waiting(self) -> int:
        """Sequences that wait for a seat."""
        return len(self._waiting)

    def load(self, version: Version, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Take the weights of ``version``. Raises Refused where a sequence is seated."""
        if self._seated:
            raise Refused(f"{len(self._seated)} sequences run under {self._version}", where=f"load {version}")
        self._model.load(tensors)
        self._prefixes.clear()
        self._version = version

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence for a seat."""
        self._waiting.append(sequence)

    def step(self) -> list[Sequence]:
        """Go on by one token; gives the sequences that ended. Does nothing where nobody runs or waits."""
        ended = self._sweep()
        self._seat()
        if not self._seated:
            return ended
        ended += self._draw()
        if self._seated:
            active = torch.tensor(list(self._seated))
            self._cache.open()
            self._logits = self._model.decode(self._cache, torch.from_numpy(self._tokens)).float()
            self._cache.close(active)
        self.steps += 1
        return ended

    def _sweep(self) -> list[Sequence]:
        ended = [sequence for sequence in self._waiting if sequence.aborted]
        if ended:
            self._waiting = deque(sequence for sequence in self._waiting if not sequence.aborted)
        for slot, sequence in list(self._seated.items()):
            if sequence.aborted:
                self._leave(slot)
                ended.append(sequence)
        return ended

    def _seat(self) -> None:
        if self._version is None:
            return
        while self._free and self._waiting:
            sequence = self._waiting.popleft()
            request = sequence.request
            slot = self._free.pop()
            prefix = self._prefix(request.prompt_ids)
            self._cache.seat(slot, prefix)
            self._logits[slot] = prefix.logits
            self._temperatures[slot] = request.temperature
            self._streams[slot] = stream(seed=request.seed, key=request.key)
            self._positions[slot] = 0
            self._seated[slot] = sequence

    def _prefix(self, prompt_ids: tuple[int, ...]) -> Prefix:
        """Prefill a prompt, or find it among the last few: the members of a group follow each other."""
        prefix = self._prefixes.pop(prompt_ids, None)
        if prefix is None:
            prefix = self._model.prefill(prompt_ids)
            self.prefilled += 1
        self._prefixes[prompt_ids] = prefix
        if len(self._prefixes) > _PREFIXES_KEPT:
            self._prefixes.popitem(last=False)
        return prefix

    def _draw(self) -> list[Sequence]:
        assert self._version is not None
        numbers = torch.from_numpy(uniforms(self._streams, self._positions))
        ids, logprobs = draw(self._logits, temperatures=self._temperatures, uniforms=numbers)
        self._tokens = ids.numpy()
        self._positions += 1
        tokens, values, version = ids.tolist(), logprobs.tolist(), self._version.packed
        ended = []
        for slot, sequence in list(self._seated.items()):
            sequence.append(tokens[slot], values[slot], version)
            if sequence.finish is not None:
                self._leave(slot)
                ended.append(sequence)
        return ended

    def _leave(self, slot: int) -> None:
        del self._seated[slot]
        self._free.append(slot)
        self._cache.leave(slot)
        self._temperatures[slot] = 0.0
