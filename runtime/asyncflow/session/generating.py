"""A rollout engine whose generating is a function of the user's: whole batches of prompts in, responses out.

Invariant: weights change between two batches only, so all tokens of a response have one version, that of the weights
under which its batch was generated.
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
"""Return for each request the tokens that follow its prompt, and what it has of a response, with their log-probs."""
Load = Callable[[Mapping[str, NDArray[Any]]], None]
"""Take the weights to generate with, by parameter name; bfloat16 as its uint16 bits."""


class UserEngine(RolloutEngine):
    """An engine that calls ``generate`` and ``load``, one at a time, in another thread than the event loop."""

    def __init__(self, *, generate: Generate, load: Load, **settings: Any) -> None:
        super().__init__(**settings)
        self._generate = generate
        self._load = load
        self._asked: list[tuple[GenerationRequest, asyncio.Future[Completion]]] = []
        self._aborted: set[SequenceName] = set()
        self._some = asyncio.Event()
        self._one = asyncio.Lock()
        self._working: asyncio.Task[None] | None = None
        self._batch: Sequence[tuple[GenerationRequest, asyncio.Future[Completion]]] = ()
        self._tokens: Counter[str] = Counter()
        self._busy_s = 0.0

    async def start(self) -> None:
        """Begin to wait for requests."""
        self._working = asyncio.create_task(self._work(), name="generate sequences")

    async def load(self, version: Version, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Load the weights as soon as no batch is generated."""
        async with self._one:
            await asyncio.to_thread(self._load, tensors)
            self.version = version

    async def generate(self, request: GenerationRequest) -> Completion:
        """Generate one response, in a batch with others that are wanted now."""
        request.check(max_length=self.max_length)
        if self.version is None:
            raise Refused("no weights were loaded yet", where=_WHERE)
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._asked.append((request, done))
        self._some.set()
        return await done

    async def abort(self, keys: Iterable[SampleKey], *, purpose: str = "train") -> None:
        """End these sequences with nothing made here: at once where they wait, else when their batch ends."""
        ended = {(purpose, key) for key in keys}
        for request, done in self._asked:
            if request.name in ended and not done.done():
                done.set_result(request.continues)
        self._aborted |= ended & {request.name for request, _ in self._batch}

    async def ended(self) -> None:
        """Raise what the user's function raised."""
        assert self._working is not None
        await asyncio.shield(self._working)

    def stats(self) -> EngineStats:
        """Return the counters."""
        return EngineStats(
            running=len(self._batch), waiting=len(self._asked), tokens=dict(self._tokens), busy_s=self._busy_s
        )

    async def close(self) -> None:
        """Take no more requests."""
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait([self._working])

    async def _work(self) -> None:
        while True:
            await self._some.wait()
            await asyncio.sleep(0)  # those that came in one claim are asked for in one turn of the loop
            batch, self._asked = self._asked[: self.slots], self._asked[self.slots :]
            if not self._asked:
                self._some.clear()
            batch = [(request, done) for request, done in batch if not done.done()]
            if batch:
                self._batch = batch
                await self._serve()
                self._batch = ()
                self._aborted.clear()

    async def _serve(self) -> None:
        requests = [request for request, _ in self._batch]
        async with self._one:
            began = time.monotonic()
            made = await asyncio.to_thread(self._generate, requests)
            self._busy_s += time.monotonic() - began
            assert self.version is not None
            completions = [self._completion(*pair, version=self.version) for pair in _pairs(requests, made)]
        for (request, done), completion in zip(self._batch, completions, strict=True):
            self._tokens[request.purpose] += len(completion) - request.begun
            if not done.done():
                done.set_result(completion)

    def _completion(
        self, request: GenerationRequest, made: tuple[Sequence[int], Sequence[float]], *, version: Version
    ) -> Completion:
        ids, logprobs = np.asarray(made[0], np.int32), np.asarray(made[1], np.float32)
        room = request.max_tokens - request.begun
        if ids.shape != logprobs.shape or not 1 <= len(ids) <= room or not np.isfinite(logprobs).all():
            what = f"a response has {ids.shape} tokens and {logprobs.shape} log-probs, or some that are not finite"
            raise ManifestError(what, where=_WHERE, hint=f"Give a log-prob for each of 1 to {room} tokens")
        if request.name in self._aborted:
            return request.continues
        end = self._end(request, ids.tolist())
        ids, logprobs = ids[:end], logprobs[:end]
        rest = Completion(
            ids=ids,
            logprobs=logprobs,
            versions=np.full(len(ids), version.packed, np.int64),
            finish="length" if end is None else "stop",
        )
        return request.continues.followed_by(rest)

    def _end(self, request: GenerationRequest, ids: Sequence[int]) -> int | None:
        """Return how many of ``ids`` there are up to the first that ends the response, None where none does."""
        stops, turn = self.stops_of(request), request.continues.ids[request.turn :].tolist()
        for count, id_ in enumerate(ids, start=1):
            turn.append(id_)
            if id_ in request.stop_ids or (stops is not None and stops.met(turn)):
                return count
        return None


def _pairs(
    requests: Sequence[GenerationRequest], made: Sequence[tuple[Sequence[int], Sequence[float]]]
) -> Iterable[tuple[GenerationRequest, tuple[Sequence[int], Sequence[float]]]]:
    if len(made) != len(requests):
        what = f"{len(made)} responses for {len(requests)} prompts"
        raise ManifestError(what, where=_WHERE, hint="Give one for each prompt, in their order")
    return zip(requests, made, strict=True)
