"""The in-process engine: a Hugging Face model with continuous batching and one step thread.

Coroutines submit sequences and wait on futures; the thread takes new sequences between steps. A load of weights is a
message to the same thread, so it always happens between two steps.

Invariant: only the step thread accesses model, cache and batch. All other access goes through one lock.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import torch
from numpy.typing import NDArray

from asyncflow.errors import ManifestError, Refused
from asyncflow.identity import SampleKey, Version
from asyncflow.plugins import NoOptions, read_options
from asyncflow.rollout.engines.base import (
    OPTIONS,
    Completion,
    EngineStats,
    GenerationRequest,
    RolloutEngine,
    SequenceName,
)
from asyncflow.rollout.engines.batch import DecodeBatch, Sequence
from asyncflow.rollout.engines.model import CausalModel

_JOIN_S = 30.0
_SWITCH_S = 0.001


class TransformersEngine(RolloutEngine):
    """A Hugging Face causal model in this process (torch, CPU).

    An error inside a step or a load is final: every ``generate`` and ``load`` raises it from then on. Weights that do
    not fit are refused without this effect.
    """

    Options = NoOptions
    can_be_deterministic = True
    can_keep_prefix = True
    continues_exactly = True

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        if self.folder is None:
            raise ManifestError("engine transformers needs a model folder", where="spec.rollout.engine")
        read_options(self.options, self.Options, where=OPTIONS)
        self._folder = self.folder
        self._wake = threading.Condition()
        self._arrived: list[Sequence] = []
        self._loads: deque[tuple[Version, Mapping[str, NDArray[Any]], Future[None]]] = deque()
        self._open: dict[Sequence, Future[Completion]] = {}
        self._closing = False
        self._broken: Exception | None = None
        self._batch: DecodeBatch | None = None
        self._tokens: Counter[str] = Counter()
        self._busy_s = 0.0
        self._busy_since: float | None = None
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    async def start(self) -> None:
        """Build the model in the step thread; its weights are undefined until ``load``.

        The step thread releases the GIL in every operation and needs it again soon, so the interpreter's switch
        interval is shortened.
        """
        sys.setswitchinterval(_SWITCH_S)
        self._thread.start()
        await asyncio.wrap_future(self._ready)

    async def load(self, version: Version, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Overwrite the weights between two steps."""
        done: Future[None] = Future()
        with self._wake:
            self._check_alive()
            self._loads.append((version, tensors, done))
            self._wake.notify()
        await asyncio.wrap_future(done)

    async def generate(self, request: GenerationRequest) -> Completion:
        """Generate one response; cancelling frees its slot at the next step."""
        request.check(max_length=self.max_length)
        sequence = Sequence(request, stops=self.stops_of(request))
        done: Future[Completion] = Future()
        with self._wake:
            self._check_alive()
            if self.version is None:
                raise Refused("no weights were loaded yet", where="generate")
            self._open[sequence] = done
            self._arrived.append(sequence)
            self._wake.notify()
        try:
            return await asyncio.wrap_future(done)
        finally:
            sequence.aborted = True

    async def abort(self, keys: Iterable[SampleKey], *, purpose: str = "train") -> None:
        """End these sequences at the next step."""
        wanted = {(purpose, key) for key in keys}
        with self._wake:
            for sequence in self._open:
                if sequence.request.name in wanted:
                    sequence.aborted = True

    def unfinished(self) -> Mapping[SequenceName, Completion]:
        """Return the partial response of each running sequence."""
        with self._wake:
            sequences = list(self._open)
        return {each.request.name: each.so_far() for each in sequences}

    def stats(self) -> EngineStats:
        """Return the counters."""
        with self._wake:
            since = self._busy_since
            tokens = self._tokens.copy()
            for sequence in self._open:
                tokens[sequence.request.purpose] += sequence.made
            open_, running = len(self._open), self._batch.running if self._batch else 0
            return EngineStats(
                running=min(running, open_),
                waiting=max(0, open_ - running),
                tokens=dict(tokens),
                stale=self._batch.stale if self._batch else 0,
                prefilled=self._batch.prefilled if self._batch else 0,
                steps=self._batch.steps if self._batch else 0,
                busy_s=self._busy_s + (time.monotonic() - since if since is not None else 0.0),
            )

    async def close(self) -> None:
        """Stop the thread; running sequences end as aborted."""
        with self._wake:
            self._closing = True
            for sequence in self._open:
                sequence.aborted = True
            self._wake.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, _JOIN_S)

    def _check_alive(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._closing:
            raise _closed()

    def _run(self) -> None:
        torch.set_num_threads(self.threads)
        with torch.inference_mode():
            try:
                batch = DecodeBatch(
                    CausalModel(self._folder, dtype=self.dtype, longest=self.max_length),
                    slots=self.slots,
                    max_length=self.max_length,
                    keeps_prefix=self.keeps_prefix,
                    spans=self.spans,
                )
            except Exception as error:  # noqa: BLE001 - raised by start(), which waits for it
                self._fail(error)
                self._ready.set_exception(error)
                return
            self._batch = batch
            self._ready.set_result(None)
            try:
                while self._iterate(batch):
                    pass
                self._fail(_closed())
            except Exception as error:  # noqa: BLE001 - raised by every generate() and load(), now and later
                self._fail(error)

    def _iterate(self, batch: DecodeBatch) -> bool:
        """Take new sequences, then load or step once; wait if there is nothing to do. False: closed and empty."""
        with self._wake:
            while not (self._arrived or self._loads or self._closing or batch.running or batch.waiting):
                self._end_busy()
                self._wake.wait()
            arrived, self._arrived = self._arrived, []
            load = self._loads.popleft() if self._loads else None
        for sequence in arrived:
            batch.submit(sequence)
        if load is not None:
            self._load(batch, *load)
        if batch.running or batch.waiting:
            if self._busy_since is None:
                self._busy_since = time.monotonic()
            self._finish(batch.step())
        with self._wake:
            return not (self._closing and not self._arrived and not batch.running and not batch.waiting)

    def _end_busy(self) -> None:
        if self._busy_since is not None:
            self._busy_s += time.monotonic() - self._busy_since
            self._busy_since = None

    def _load(
        self, batch: DecodeBatch, version: Version, tensors: Mapping[str, NDArray[Any]], done: Future[None]
    ) -> None:
        try:
            batch.load(version, tensors)
        except Exception as error:
            if done.set_running_or_notify_cancel():
                done.set_exception(error)
            if not isinstance(error, (ManifestError, Refused)):
                raise
            return
        self.version = version
        if done.set_running_or_notify_cancel():
            done.set_result(None)

    def _finish(self, ended: list[Sequence]) -> None:
        if not ended:
            return
        with self._wake:
            futures = [(sequence, self._open.pop(sequence)) for sequence in ended]
            for sequence, _ in futures:
                self._tokens[sequence.request.purpose] += sequence.made
        for sequence, done in futures:
            if done.set_running_or_notify_cancel():
                done.set_result(sequence.completion())

    def _fail(self, error: Exception) -> None:
        with self._wake:
            self._broken = error
            waiting: list[Future[Any]] = [*self._open.values(), *(done for _, _, done in self._loads)]
            self._open.clear()
            self._loads.clear()
        for done in waiting:
            if done.set_running_or_notify_cancel():
                done.set_exception(error)


def _closed() -> Refused:
    return Refused("the engine is closed", where="engine transformers")
