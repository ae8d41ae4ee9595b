"""The simulated engine: service times from distributions, invented tokens, no torch.

A response's length, ids and log-probs are keyed by its sample, as for a real engine, so that runs can be compared. Only
its duration is simulated, by one timer for the sequence that ends next. Weights are copied, as into a device's memory,
but nothing is computed with them.

Invariant: a sequence never blocks the event loop, and at most ``slots`` sequences run at the same time. Running
sequences advance at one common rate (``_Clock``), and pause while weights are loaded.
"""

from __future__ import annotations

import asyncio
import heapq
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
    VersionMarks,
)
from asyncflow.rollout.lengths import Lengths
from asyncflow.rollout.sampling import stream, uniforms

_RESOLUTION_S = 1e-9
"""Resolution of timers."""

_Amount = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class SimulatedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the simulated engine.

    tokens: mean response length (the median if sigma > 0; 0: always max_tokens).
    sigma: standard deviation of the log of the length (lognormal); rho: correlation of the logs within a group.
    token_s, prefill_s, load_s: seconds per token, per response and per load.
    share_s: additional seconds per token for each further running sequence: with n running, each token takes
    token_s + share_s * (n - 1).
    recompute_s: seconds per token whose cache is computed again. At a load, unless caches are kept, these are the
    prompts and tokens of all running sequences, which pause for the sum. For a response that another instance started,
    they are its tokens; for an observation, the tokens of the observation.
    time_scale: factor of all seconds; vocab: ids are below it.
    Source of the model: decoding is bound by memory, reading weights (token_s) and the cache of each sequence
    (share_s); computing a cache again is bound by arithmetic.
    """

    tokens: _Amount = 0.0
    sigma: _Amount = 0.0
    rho: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    token_s: _Amount = 0.0
    share_s: _Amount = 0.0
    recompute_s: _Amount = 0.0
    prefill_s: _Amount = 0.0
    load_s: _Amount = 0.0
    time_scale: _Amount = 1.0
    vocab: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)] = 97

    def __post_init__(self) -> None:
        """Refuse share_s without token_s."""
        if self.share_s and not self.token_s:
            raise ValueError("share_s without token_s: a sequence that runs alone must take time, too")


class _Sequence:
    """A sequence that waits for a slot, then makes ``left`` tokens from ``began`` to ``ends`` by the engine's clock.

    slot: done when it has a slot; ended: done when it has all tokens or is aborted; marks: the version of each token.
    """

    def __init__(self, request: GenerationRequest, *, left: int, version: Version) -> None:
        self.request = request
        self.slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.aborted = False
        self.began = self.ends = math.inf
        self.marks = VersionMarks(version)
        self.left = left

    def abort(self) -> None:
        """End the sequence, whether it runs or waits."""
        self.aborted = True
        for future in (self.slot, self.ended):
            if not future.done():
                future.set_result(None)

    def tokens(self, at: float) -> int:
        """Return the number of tokens made at a time of the clock; the last token exists only from ``ends`` on."""
        if at < self.began:
            return 0
        return self.left if at >= self.ends else int(self.left * (at - self.began) / (self.ends - self.began))

    def length(self, at: float) -> int:
        """Return the number of tokens at a time, including the prompt and the start of the response."""
        return len(self.request.prompt_ids) + self.request.prior_tokens + self.tokens(at)

    def stale(self, at: float) -> int:
        """Return the number of tokens made, by a time, after the sequence was first carried over."""
        return self.marks.stale(self.tokens(at))


class _Clock:
    """The common time of all running sequences, in seconds of a sequence that runs alone.

    share: by how much each further sequence slows it down. The end of a sequence speeds up the others from that time
    on, even if the event loop processes it late. The clock does not advance while it is stopped.
    """

    def __init__(self, *, share: float) -> None:
        self._share = share
        self._running: list[tuple[float, int, _Sequence]] = []
        self._started = 0
        self._value = 0.0
        self._since = 0.0
        self._stopped = False
        self._timer: asyncio.TimerHandle | None = None

    def now(self) -> float:
        """Return its time, and complete the sequences that have ended by then."""
        now = asyncio.get_running_loop().time()
        left, self._since = now - self._since, now
        if self._stopped:
            return self._value
        while self._running and (needed := self._until_next()) <= left + _RESOLUTION_S:
            self._value, _, sequence = heapq.heappop(self._running)
            left = max(0.0, left - max(0.0, needed))
            if not sequence.ended.done():
                sequence.ended.set_result(None)
        self._value += left / self._slowdown()
        return self._value

    def begin(self, sequence: _Sequence, *, seconds: float) -> None:
        """Run a sequence that takes ``seconds`` when it runs alone."""
        sequence.began = self.now()
        sequence.ends = sequence.began + seconds
        self._started += 1
        heapq.heappush(self._running, (sequence.ends, self._started, sequence))
        self._wake()

    def leave(self, sequence: _Sequence) -> float:
        """Remove a sequence, ended or not, and return the time."""
        now = self.now()
        if any(sequence is each for _, _, each in self._running):
            self._running = [each for each in self._running if each[2] is not sequence]
            heapq.heapify(self._running)
        self._wake()
        return now

    def stop(self) -> None:
        """Stop the clock."""
        self.now()
        self._stopped = True
        self._wake()

    def resume(self) -> None:
        """Start the clock again."""
        self.now()
        self._stopped = False
        self._wake()

    def _slowdown(self) -> float:
        return 1 + self._share * max(0, len(self._running) - 1)

    def _until_next(self) -> float:
        """Return the seconds until the next sequence ends."""
        return (self._running[0][0] - self._value) * self._slowdown()

    def _wake(self) -> None:
        """Set the timer to the end of the next sequence."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running and not self._stopped:
            self._timer = asyncio.get_running_loop().call_at(self._since + self._until_next(), self._on_timer)

    def _on_timer(self) -> None:
        self.now()
        self._wake()


class SimulatedEngine(RolloutEngine):
    """An engine that only simulates the time of generation."""

    Options = SimulatedOptions
    can_be_deterministic = True
    can_keep_prefix = True
    continues_exactly = True

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._set = read_options(self.options, SimulatedOptions, where=OPTIONS)
        self._lengths = Lengths(tokens=self._set.tokens, sigma=self._set.sigma, rho=self._set.rho)
        self.weights: dict[str, NDArray[Any]] = {}
        self._running: set[_Sequence] = set()
        self._waiting: dict[_Sequence, None] = {}
        self._loading = asyncio.Lock()
        self._kept: dict[SequenceName, int] = {}
        self._clock = _Clock(share=self._set.share_s / self._set.token_s if self._set.share_s else 0.0)
        self._tokens: Counter[str] = Counter()
        self._stale = 0
        self._busy_s = 0.0
        self._busy_since = 0.0
        self._closed = False

    async def start(self) -> None:
        """Do nothing: the engine has no model to build."""

    async def load(self, version: Version, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Copy the tensors, which may be any; only the version matters."""
        async with self._loading:
            self._clock.stop()
            try:
                copied = await asyncio.to_thread(lambda: {name: tensor.copy() for name, tensor in tensors.items()})
                recompute_s = 0.0
                now = self._clock.now()
                if not self.keeps_prefix:
                    self._kept.clear()
                    recompute_s = self._set.recompute_s * sum(each.length(now) for each in self._running)
                await asyncio.sleep((self._set.load_s + recompute_s) * self._set.time_scale)
                self.weights, self.version = copied, version
                for sequence in (*self._running, *self._waiting):
                    sequence.marks.mark(sequence.tokens(now), version)
            finally:
                self._clock.resume()

    async def generate(self, request: GenerationRequest) -> Completion:
        """Wait as long as the response would take, then invent it."""
        request.check(max_length=self.max_length)
        if self.version is None or self._closed:
            raise Refused("the engine is closed" if self._closed else "no weights were loaded yet", where="generate")
        drawn = self._lengths.of(request.key, seed=request.seed, most=request.max_tokens, turn=request.turn)
        length = max(request.prior_tokens + 1, drawn)
        left = length - request.prior_tokens
        sequence = _Sequence(request, left=left, version=self.version)
        self._waiting[sequence] = None
        self._admit()
        try:
            await sequence.slot
            if not sequence.aborted:
                await self._run(sequence, left)
        finally:
            at = self._clock.leave(sequence)
            made = sequence.tokens(at)
            self._leave(sequence)
            self._tokens[request.purpose] += made
            self._stale += sequence.stale(at)
        finish: Finish = "aborted" if made < left else "length" if length == request.max_tokens else "stop"
        if finish == "stop" and request.episode:
            self._kept[request.name] = length
            if len(self._kept) > self.slots:
                del self._kept[next(iter(self._kept))]
        return request.continues.extended_by(self._invented(sequence, made, finish))

    def _admit(self) -> None:
        """Assign free slots to waiting sequences, in order."""
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
        request = sequence.request
        kept = self._kept.pop(request.name, None)
        prefill_s = self._set.prefill_s if kept is None else 0.0
        prefill_s += max(0, request.prior_tokens - (kept or 0)) * self._set.recompute_s
        seconds = (prefill_s + tokens * self._set.token_s) * self._set.time_scale
        self._clock.begin(sequence, seconds=seconds)
        await sequence.ended

    def _invented(self, sequence: _Sequence, length: int, finish: Finish) -> Completion:
        """Return ``length`` tokens that follow the start of the response."""
        request = sequence.request
        state = np.array([stream(seed=request.seed, key=request.key)], dtype=np.uint64)
        numbers = uniforms(state, request.prior_tokens + np.arange(length))
        return Completion(
            ids=(numbers * self._set.vocab).astype(np.int32),
            logprobs=np.full(length, -math.log(self._set.vocab), dtype=np.float32),
            versions=sequence.marks.versions(length),
            finish=finish,
        )

    async def abort(self, keys: Iterable[SampleKey], *, purpose: str = "train") -> None:
        """End these sequences immediately."""
        ended = {(purpose, key) for key in keys}
        for sequence in (*self._running, *self._waiting):
            if sequence.request.name in ended:
                sequence.abort()

    def unfinished(self) -> Mapping[SequenceName, Completion]:
        """Return the partial response of each running sequence."""
        now = self._clock.now()
        return {
            each.request.name: each.request.continues.extended_by(
                self._invented(each, min(each.tokens(now), each.left - 1), "aborted")
            )
            for each in self._running
        }

    def stats(self) -> EngineStats:
        """Return the counters."""
        now, tokens, stale = self._clock.now(), self._tokens.copy(), self._stale
        for sequence in self._running:
            tokens[sequence.request.purpose] += sequence.tokens(now)
            stale += sequence.stale(now)
        ongoing = time.monotonic() - self._busy_since if self._running else 0.0
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            tokens=dict(tokens),
            stale=stale if self.keeps_prefix else 0,
            busy_s=self._busy_s + ongoing,
        )

    async def close(self) -> None:
        """End running and waiting sequences as aborted."""
        self._closed = True
        for sequence in (*self._running, *self._waiting):
            sequence.abort()
