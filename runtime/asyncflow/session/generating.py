"""A rollout engine that generates by a function of the user, from whole batches of prompts to their responses.

Invariant: weights change between two batches only, so all tokens generated in a batch have the version of the weights
that were loaded for that batch.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncflow.errors import ManifestError, Refused
from asyncflow.identity import SampleKey, Version
from asyncflow.rollout.engines.base import Completion, EngineStats, GenerationRequest, RolloutEngine, SequenceName

_WHERE = "generate_sequences"

Generate = Callable[[Sequence[GenerationRequest]], Sequence[tuple[Sequence[int], Sequence[float]]]]
"""Returns for each request the tokens that follow its prompt and its partial response, if any, and their log-probs."""
Load = Callable[[Mapping[str, NDArray[Any]]], None]
"""Loads the weights to generate with, by parameter name; bfloat16 values are passed as their uint16 bits."""


class UserEngine(RolloutEngine):
    """An engine that calls ``generate`` and ``load``, one at a time, outside the thread of the event loop."""

    def __init__(self, *, generate: Generate, load: Load, **settings: Any) -> None:
        super().__init__(**settings)
        self._generate = generate
        self._load = load
        self._pending: list[tuple[GenerationRequest, asyncio.Future[Completion]]] = []
        self._aborted: set[SequenceName] = set()
        self._has_requests = asyncio.Event()
        self._lock = asyncio.Lock()
        self._working: asyncio.Task[None] | None = None
        self._batch: Sequence[tuple[GenerationRequest, asyncio.Future[Completion]]] = ()
        self._tokens: Counter[str] = Counter()
        self._busy_s = 0.0

    async def start(self) -> None:
        """Start serving requests."""
        self._working = asyncio.create_task(self._work(), name="generate sequences")

    async def load(self, version: Version, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Load the weights as soon as no batch is being generated."""
        async with self._lock:
            await asyncio.to_thread(self._load, tensors)
            self.version = version

    async def generate(self, request: GenerationRequest) -> Completion:
        """Generate one response, in a batch with other pending requests."""
        request.check(max_length=self.max_length)
        if self.version is None:
            raise Refused("no weights were loaded yet", where=_WHERE)
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._pending.append((request, done))
        self._has_requests.set()
        return await done

    async def abort(self, keys: Iterable[SampleKey], *, purpose: str = "train") -> None:
        """End these sequences without new tokens: waiting ones immediately, running ones when their batch ends."""
        ended = {(purpose, key) for key in keys}
        for request, done in self._pending:
            if request.name in ended and not done.done():
                done.set_result(request.continues)
        self._aborted |= ended & {request.name for request, _ in self._batch}

    async def ended(self) -> None:
        """Wait for the end of the engine, and raise the exception of the user's function, if any."""
        assert self._working is not None
        await asyncio.shield(self._working)

    def stats(self) -> EngineStats:
        """Return the counters."""
        return EngineStats(
            running=len(self._batch), waiting=len(self._pending), tokens=dict(self._tokens), busy_s=self._busy_s
        )

    async def close(self) -> None:
        """Stop serving requests."""
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait([self._working])

    async def _work(self) -> None:
        while True:
            await self._has_requests.wait()
            await asyncio.sleep(0)  # requests of one claim arrive in the same iteration of the event loop
            batch, self._pending = self._pending[: self.slots], self._pending[self.slots :]
            if not self._pending:
                self._has_requests.clear()
            batch = [(request, done) for request, done in batch if not done.done()]
            if batch:
                self._batch = batch
                await self._serve()
                self._batch = ()
                self._aborted.clear()

    async def _serve(self) -> None:
        requests = [request for request, _ in self._batch]
        async with self._lock:
            start = time.monotonic()
            responses = await asyncio.to_thread(self._generate, requests)
            self._busy_s += time.monotonic() - start
            assert self.version is not None
            completions = [self._completion(*pair, version=self.version) for pair in _pairs(requests, responses)]
        for (request, done), completion in zip(self._batch, completions, strict=True):
            self._tokens[request.purpose] += len(completion) - request.prior_tokens
            if not done.done():
                done.set_result(completion)

    def _completion(
        self, request: GenerationRequest, response: tuple[Sequence[int], Sequence[float]], *, version: Version
    ) -> Completion:
        ids, logprobs = np.asarray(response[0], np.int32), np.asarray(response[1], np.float32)
        room = request.max_tokens - request.prior_tokens
        if ids.shape != logprobs.shape or not 1 <= len(ids) <= room or not np.isfinite(logprobs).all():
            what = f"a response has {ids.shape} tokens and {logprobs.shape} log-probs, or some that are not finite"
            raise ManifestError(what, where=_WHERE, hint=f"Return 1 to {room} tokens, each with a log-prob")
        if request.name in self._aborted:
            return request.continues
        end = self._end(request, ids.tolist())
        ids, logprobs = ids[:end], logprobs[:end]
        generated = Completion(
            ids=ids,
            logprobs=logprobs,
            versions=np.full(len(ids), version.packed, np.int64),
            finish="length" if end is None else "stop",
        )
        return request.continues.extended_by(generated)

    def _end(self, request: GenerationRequest, ids: Sequence[int]) -> int | None:
        """Return the number of ``ids`` up to and including the one that ends the response, None if none does."""
        stops, turn = self.stops_of(request), request.continues.ids[request.turn :].tolist()
        stop = next((count for count, id_ in enumerate(ids, start=1) if id_ in request.stop_ids), None)
        return stop if stops is None else stops.end(ids[:stop], before=turn) or stop


def _pairs(
    requests: Sequence[GenerationRequest], responses: Sequence[tuple[Sequence[int], Sequence[float]]]
) -> Iterable[tuple[GenerationRequest, tuple[Sequence[int], Sequence[float]]]]:
    if len(responses) != len(requests):
        what = f"{len(responses)} responses for {len(requests)} prompts"
        raise ManifestError(what, where=_WHERE, hint="Return one response for each prompt, in the same order")
    return zip(requests, responses, strict=True)
