"""The simulated engine: service times from distributions, made-up tokens, no torch.

A response's length, ids and log-probabilities are keyed by its sample like real ones, so that runs can be compared;
only the time that it takes is simulated, by one sleep a sequence. Weights are copied as into a device's memory, though
nothing is computed with them.

Invariant: a sequence never holds the event loop, and at most ``slots`` run at once; those that run stand still while
weights are loaded.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncflow.errors import Refused
from asyncflow.identity import SampleKey, Version
from asyncflow.plugins import read_options
from asyncflow.rollout.engines.base import (
    OPTIONS,
    Completion,
    EngineStats,
    Finish,
    GenerationRequest,
    RolloutEngine,
    SequenceName,
)
from asyncflow.rollout.sampling import stream, uniforms

_LENGTH_POSITIONS = (2**40, 2**40 + 1)
"""Positions, never a token's, whose uniforms decide the length."""

_Amount = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class SimulatedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the simulated engine.

    tokens: mean response length (the median where sigma > 0; 0: max_tokens, always); sigma: of the log of the length
    (lognormal); token_s, prefill_s, load_s: seconds per token, per response and per load; time_scale: multiplies all
    three; vocab: ids are below it.
    """

    tokens: _Amount = 0.0
    sigma: _Amount = 0.0
    token_s: _Amount = 0.0
    prefill_s: _Amount = 0.0
    load_s: _Amount = 0.0
    time_scale: _Amount = 1.0
    vocab: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)] = 97


class _Sequence:
    """A sequence that waits for its slot, then makes ``left`` tokens from ``began`` to ``ends`` (monotonic).

    slot: done when it has one; aborted: set to end it; marks: from which of those tokens on which version makes them.
    """

    def __init__(self, request: GenerationRequest, *, left: int) -> None:
        self.request = request
        self.slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.aborted = asyncio.Event()
        self.began = self.ends = math.inf
        self.marks: list[tuple[int, int]] = []
        self.left = left

    def begin(self, version: Version, *, seconds: float) -> None:
        """Begin under ``version``."""
        self.began = time.monotonic()
        self.ends = self.began + seconds
        self.marks = [(0, version.packed)]

    def abort(self) -> None:
        """End it, whether it runs or waits."""
        self.aborted.set()
        if not self.slot.done():
            self.slot.set_result(None)

    def tokens(self, at: float) -> int:
        """Return how many tokens there are at a time; one is never the last before the end."""
        if at < self.began:
            return 0
        return self.left if at >= self.ends else int(self.left * (at - self.began) / (self.ends - self.began))

    def stale(self, at: float) -> int:
        """Return how many of the tokens there are at a time were made since it was first carried over."""
        return self.tokens(at) - self.marks[1][0] if len(self.marks) > 1 else 0

    def carry_over(self, version: Version, *, stopped: float) -> None:
        """Go on under ``version`` after standing still since ``stopped``."""
        still = time.monotonic() - max(stopped, self.began)
        self.marks.append((self.tokens(stopped), version.packed))
        self.began, self.ends = self.began + still, self.ends + still


class SimulatedEngine(RolloutEngine):
    """A pretended engine."""

    Options = SimulatedOptions
    can_be_deterministic = True
    can_keep_prefix = True
    continues_exactly = True

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._set = read_options(self.options, SimulatedOptions, where=OPTIONS)
        self.weights: dict[str, NDArray[Any]] = {}
        self._running: set[_Sequence] = set()
        self._waiting: dict[_Sequence, None] = {}
        self._loading = asyncio.Lock()
        self._stopped = math.inf
        self._tokens: Counter[str] = Counter()
        self._stale = 0
        self._busy_s = 0.0
        self._busy_since = 0.0
        self._closed = False

    async def start(self) -> None:
        """Do nothing: there is nothing to build."""

    async def load(self, version: Version, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Copy any tensors; only the version counts."""
        async with self._loading:
            self._stopped = time.monotonic()
            try:
                copied = await asyncio.to_thread(lambda: {name: tensor.copy() for name, tensor in tensors.items()})
                await asyncio.sleep(self._set.load_s * self._set.time_scale)
                self.weights, self.version = copied, version
            finally:
                for sequence in [each for each in self._running if each.marks]:
                    sequence.carry_over(self.version or version, stopped=self._stopped)
                self._stopped = math.inf

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sleep as long as the response would take, then make it up."""
        request.check(max_length=self.max_length)
        length = max(request.begun + 1, self._length(request))
        left = length - request.begun
        sequence = _Sequence(request, left=left)
        self._waiting[sequence] = None
        self._admit()
        try:
            await sequence.slot
            if not sequence.aborted.is_set():
                await self._run(sequence, left)
        finally:
            self._leave(sequence)
            made = sequence.tokens(self._now())
            self._tokens[request.purpose] += made
            self._stale += sequence.stale(self._now())
        finish: Finish = "aborted" if made < left else "length" if length == request.max_tokens else "stop"
        return request.continues.followed_by(self._made_up(sequence, made, finish))

    def _now(self) -> float:
        """Return the time up to which sequences have run, monotonic."""
        return min(time.monotonic(), self._stopped)

    def _admit(self) -> None:
        """Assign free slots to those that wait, in order."""
        while self._waiting and len(self._running) < self.slots:
            sequence = next(iter(self._waiting))
            del self._waiting[sequence]
            if not sequence.slot.done():
                if not self._running:
                    self._busy_since = time.monotonic()
                self._running.add(sequence)
                sequence.slot.set_result(None)

    def _leave(self, sequence: _Sequence) -> None:
        self._waiting.pop(sequence, None)
        if sequence in self._running:
            self._running.discard(sequence)
            if not self._running:
                self._busy_s += time.monotonic() - self._busy_since
            self._admit()

    async def _run(self, sequence: _Sequence, tokens: int) -> None:
        if self.version is None or self._closed:
            raise Refused(
                "no weights were loaded yet" if not self._closed else "the engine is closed", where="generate"
            )
        seconds = (self._set.prefill_s + tokens * self._set.token_s) * self._set.time_scale
        sequence.begin(self.version, seconds=seconds)
        while True:
            await _sleep_unless(sequence.aborted, sequence.ends - time.monotonic())
            async with self._loading:
                if sequence.aborted.is_set() or sequence.ends <= time.monotonic():
                    return

    def _length(self, request: GenerationRequest) -> int:
        """Return the response's length: lognormal by Box and Muller from two uniforms keyed by the sample."""
        typical = self._set.tokens or request.max_tokens
        state = np.array([stream(seed=request.seed, key=request.key)], dtype=np.uint64)
        first, second = uniforms(state, np.array(_LENGTH_POSITIONS)).tolist()
        normal = math.sqrt(-2 * math.log(1 - first)) * math.cos(2 * math.pi * second)
        return max(1, min(request.max_tokens, round(typical * math.exp(self._set.sigma * normal))))

    def _made_up(self, sequence: _Sequence, length: int, finish: Finish) -> Completion:
        """Return ``length`` tokens behind those that were there already."""
        request, versions = sequence.request, np.empty(length, dtype=np.int64)
        for start, version in sequence.marks:
            versions[start:] = version
        state = np.array([stream(seed=request.seed, key=request.key)], dtype=np.uint64)
        numbers = uniforms(state, request.begun + np.arange(length))
        return Completion(
            ids=(numbers * self._set.vocab).astype(np.int32),
            logprobs=np.full(length, -math.log(self._set.vocab), dtype=np.float32),
            versions=versions,
            finish=finish,
        )

    async def abort(self, keys: Iterable[SampleKey], *, purpose: str = "train") -> None:
        """End these sequences now."""
        ended = {(purpose, key) for key in keys}
        for sequence in (*self._running, *self._waiting):
            if (sequence.request.purpose, sequence.request.key) in ended:
                sequence.abort()

    def unfinished(self) -> Mapping[SequenceName, Completion]:
        """Return what there is of each sequence now."""
        return {
            (each.request.purpose, each.request.key): each.request.continues.followed_by(
                self._made_up(each, min(each.tokens(self._now()), each.left - 1), "aborted")
            )
            for each in self._running
        }

    def stats(self) -> EngineStats:
        """Return the counters."""
        tokens = self._tokens.copy()
        for sequence in self._running:
            tokens[sequence.request.purpose] += sequence.tokens(self._now())
        ongoing = time.monotonic() - self._busy_since if self._running else 0.0
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            tokens=dict(tokens),
            stale=self._stale if self.keeps_prefix else 0,
            busy_s=self._busy_s + ongoing,
        )

    async def close(self) -> None:
        """End what runs as aborted."""
        self._closed = True
        for sequence in (*self._running, *self._waiting):
            sequence.abort()


async def _sleep_unless(event: asyncio.Event, seconds: float) -> None:
    """Sleep ``seconds``, or until ``event`` is set."""
    if seconds <= 0:
        await asyncio.sleep(0)
        return
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
