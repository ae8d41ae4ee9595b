"""One rollout instance: claims rows, generates, sends responses to be scored, delivers them, and swaps weights.

If the reward is a separate role, no response is scored here. Every sample is a coroutine (generate, score, deliver).
One steering loop starts the rows that ``flow.instance`` admits, and swaps weights when it says so. A sample that waits
for its reward or for a storage unit occupies no slot.

Invariants:
* Only the steering loop starts sequences and loads weights, so no sequence starts while weights are loaded.
* Tokens made by newly loaded weights are delivered, saved or handed on only after the weights were verified.
* A temporary outage of a peer never ends the worker; only an unrecoverable error does.
* A worker that leaves hands its running sequences on to other instances, which continue them where versions allow it
  (``Job.request``).
* ``generate`` counts the time with at least one running sequence; ``receive`` the time without one although there is
  work, which waits for other weights (arriving, or not loaded yet); ``swap`` the time of loading weights while there is
  work. These never overlap. ``occupied`` counts the time with at least one leased row, including waits for weights and
  rewards.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, NamedTuple

from asyncflow.environments.pool import Environments
from asyncflow.errors import AsyncFlowError, DeadlineExceeded
from asyncflow.flow.claims import EMPTY_CLAIM_S
from asyncflow.flow.instance import Instance, Purpose
from asyncflow.identity import SampleKey, Version
from asyncflow.models.tokenizer import Tokenizer
from asyncflow.queue.client import QueueClient
from asyncflow.rewards.service import Rewards
from asyncflow.rewards.wire import RewardResult
from asyncflow.rollout.engines.base import Completion, RolloutEngine
from asyncflow.rollout.episodes import Episodes
from asyncflow.rollout.job import Job, RolloutSettings, SampleOutcome
from asyncflow.rollout.leases import Claimer, Delivery, InFlightTable
from asyncflow.rollout.loading import Merge, WeightLoader
from asyncflow.rollout.scoring import Scoring
from asyncflow.rpc.membership import Status
from asyncflow.telemetry.busy import BusyClock
from asyncflow.telemetry.metrics import RolloutMetrics
from asyncflow.telemetry.spans import NO_SPANS, Spans
from asyncflow.weights.messages import CatalogueView
from asyncflow.weights.permits import SwapPermits
from asyncflow.weights.receiver import WeightReceiver

log = logging.getLogger(__name__)

_WATCH_S = 3600.0
_LEAVING = "the instance leaves"
_INCOMPLETE = "another sample of its group left before the group was scored"
_RETRY_S = 1.0
"""Interval of repeated aborts: the first one has no effect on a sequence that the engine does not know yet."""


class SwapInterval(NamedTuple):
    """Seconds from one swap to the next: in total, stalled by weights, and without a sequence for any reason."""

    wall_s: float
    stall_s: float
    idle_s: float

    def __str__(self) -> str:
        return f"in {self.wall_s:.3f} s since the last: stalled {self.stall_s:.3f} s, idle {self.idle_s:.3f} s"


class RolloutMeter:
    """Counts for heartbeats and for ``metrics``, and records the spans of the instance.

    fenced: number of results that arrived too late; scoring: number of samples that wait for their rewards.
    """

    def __init__(self, metrics: RolloutMetrics, spans: Spans = NO_SPANS) -> None:
        self.spans = spans
        self.scoring = 0
        self.busy = BusyClock()
        self.occupied = BusyClock()
        self.fenced = 0
        self.delivered = 0
        self._metrics = metrics
        self._generating = False
        self._waiting = False
        self._holding = False
        self._idle_swap = False
        self._free_since = time.monotonic()
        self._last = (time.monotonic(), 0.0, 0.0)

    def running(
        self,
        sequences: int,
        *,
        waiting: bool,
        waits: str = "",
        evaluating: bool = False,
        step: int = -1,
        version: int = -1,
    ) -> None:
        """Record the number of running sequences, and whether work waits for other weights.

        That is known only once a claim has found nothing, ``EMPTY_CLAIM_S`` after it was made; that time counts, too.

        waits: why none runs, "" before the first weights; evaluating: whether all running sequences are of evaluations;
        step: of the sequences that were started last; version: step of the loaded weights.
        """
        self._metrics.inflight.set(sequences)
        if sequences:
            self.spans.enter("evaluation" if evaluating else "generate", step=step, version=version)
        elif waits:
            self.spans.enter("idle", waits=waits, step=-1, version=version)
        waiting = waiting and not sequences
        if bool(sequences) != self._generating:
            self._generating = not self._generating
            (self.busy.begin if self._generating else self.busy.end)("generate")
            self._free_since = time.monotonic()
        if waiting and not self._waiting:
            self.busy.begin("receive", since=max(self._free_since, time.monotonic() - EMPTY_CLAIM_S))
        elif self._waiting and not waiting:
            self.busy.end("receive")
        self._waiting = waiting

    @contextlib.contextmanager
    def scores(self) -> Iterator[None]:
        """Count the body as one sample that waits for its reward."""
        self.scoring += 1
        try:
            with self.spans.background("reward"):
                yield
        finally:
            self.scoring -= 1

    @contextlib.contextmanager
    def swaps(self, step: int, *, idle: bool = False) -> Iterator[None]:
        """Count the body as time without generation because weights are loaded. step: of these weights.

        idle: there is no work, so the time counts only from when rows arrive.
        """
        self.running(0, waiting=False)
        self._idle_swap = idle
        if not idle:
            self.busy.begin("swap")
        try:
            with self.spans.main("swap", step=-1, version=step):
                yield
        finally:
            if not self._idle_swap:
                self.busy.end("swap")
            self._idle_swap = False
        self._free_since = time.monotonic()

    def holding(self, rows: int) -> None:
        """Record the number of leased rows."""
        if bool(rows) != self._holding:
            self._holding = not self._holding
            (self.occupied.begin if self._holding else self.occupied.end)("rows")
        if rows and self._idle_swap:
            self._idle_swap = False
            self.busy.begin("swap")

    def interval(self) -> SwapInterval:
        """Return the seconds since the last call, or since the start."""
        before, self._last = self._last, (time.monotonic(), self.stall_s, self.generate_s)
        wall_s, stall_s, generate_s = (new - old for new, old in zip(self._last, before, strict=True))
        return SwapInterval(wall_s, stall_s, wall_s - generate_s)

    def generated(self, completion: Completion, *, prior_tokens: int) -> None:
        """Record a sequence that ended, of which another instance had made the first ``prior_tokens`` tokens."""
        self._metrics.sequences.labels(completion.finish).inc()
        if completion.finish != "aborted":
            self._metrics.taken_over.inc(prior_tokens)

    def scored(self, reward: RewardResult, seconds: float) -> None:
        """Record the reward of a sample."""
        self._metrics.reward_seconds.observe(seconds)
        if reward.failure:
            self._metrics.rewards_failed.labels(reward.failure).inc()

    def settled(self, *, accepted: bool) -> None:
        """Record whether the queue accepted a result."""
        if accepted:
            if not self.delivered:
                log.info("the first sample is delivered")
            self.delivered += 1
        else:
            self.fenced += 1

    @property
    def generate_s(self) -> float:
        """Seconds with a running sequence."""
        return self.busy.seconds().get("generate", 0.0)

    @property
    def stall_s(self) -> float:
        """Seconds without a sequence because weights were received or loaded, except before the first weights."""
        seconds = self.busy.seconds()
        return seconds.get("receive", 0.0) + seconds.get("swap", 0.0)


def next_version_of(instance: Instance) -> Callable[[CatalogueView], int | None]:
    """Return the function ``want`` for the receiver of ``instance``."""
    return lambda view: instance.next_pull(view.available, required=view.required)


class RolloutWorker:
    """Runs one instance.

    The caller starts and closes receiver (made with ``want=next_version_of(instance)``), engine and rewards.
    rewards: None if responses are scored elsewhere (``settings.scores_here``); merge: see ``WeightLoader``.
    permits: of a staggered update, None if the instance changes weights without permits.
    environment: of samples of several turns, started and closed like the rewards; spans: records the instance's work.
    """

    def __init__(
        self,
        *,
        queue: QueueClient,
        receiver: WeightReceiver,
        engine: RolloutEngine,
        rewards: Rewards | None,
        tokenizer: Tokenizer,
        instance: Instance,
        settings: RolloutSettings,
        metrics: RolloutMetrics,
        merge: Merge | None = None,
        permits: SwapPermits | None = None,
        environment: Environments | None = None,
        spans: Spans = NO_SPANS,
    ) -> None:
        self.meter = RolloutMeter(metrics, spans)
        self.loader = WeightLoader(
            receiver, engine, metrics=metrics, probe_gap=settings.probe_gap, merge=merge, spans=spans
        )
        metrics.refreshed.append(functools.partial(self._count, metrics))
        self._receiver = receiver
        self._engine = engine
        self._scoring = None if rewards is None else Scoring(rewards, sizes=settings.group_sizes)
        self._episodes = Episodes(
            engine, environment, tokenizer, max_turns=settings.max_turns, stop_ids=settings.stop_ids
        )
        self._instance = instance
        self._settings = settings
        self._permits = permits
        self._loading: Version | None = None
        self._updated = asyncio.Event()
        self._changed = asyncio.Event()
        self._leaving = asyncio.Event()
        self._failure: Exception | None = None
        self._last_step = -1
        self._tasks: set[asyncio.Task[None]] = set()
        self._wanted: int | None = None
        self._in_flight = InFlightTable(
            queue=queue,
            instance=instance,
            settings=settings,
            changed=self._changed.set,
            holding=self.meter.holding,
            spawn=self._spawn,
            unfinished=engine.unfinished,
            trusted=self._trusted,
            spans=spans,
        )
        self._delivery = Delivery(queue, settled=self._settled, ended=self._ended, settings=settings)
        self._claimers = [
            Claimer(
                purpose,
                queue=queue,
                instance=instance,
                slots=engine.slots,
                on_rows=self._in_flight.take,
                parked=self._parked,
                backlog=self._in_flight.backlog,
            )
            for purpose in ("train", "eval")
        ]

    def drain(self) -> None:
        """Stop claiming, hand on unfinished sequences, and let ``run`` end. May be called more than once."""
        self._instance.drain()
        self._leaving.set()

    async def run(self) -> None:
        """Work until ``drain``. Raises unrecoverable errors, such as weights or prompts that do not fit the engine."""
        for work in (
            self._steer(),
            self.loader.stage_all(),
            self._engine.ended(),
            self._watch(),
            self._in_flight.renew(),
            *([self._in_flight.save()] if self._engine.may_continue else []),
            *(claimer.run() for claimer in self._claimers),
        ):
            self._spawn(work)
        if self._permits is not None:
            self._spawn(self._take_permits(self._permits))
        try:
            await self._leaving.wait()
        finally:
            await self._leave()
        if self._failure is not None:
            raise self._failure

    def status(self) -> Status:
        """Return the status of worker and ``WeightLoader`` for heartbeats; seconds and counts since the start."""
        tokens = self._engine.stats().tokens
        return {
            **self.loader.status(),
            "waits_permit": self._permits is not None and self._instance.wants_permit,
            "slots": self._engine.slots,
            "running": self._instance.running,
            "inflight": len(self._in_flight),
            "tokens_generated": sum(tokens.values()),
            "tokens_generated_train": tokens.get("train", 0),
            "tokens_generated_eval": tokens.get("eval", 0),
            "busy_s": self.meter.generate_s,
            "held_s": self.meter.occupied.total(),
            "swap_stall_s": self.meter.stall_s,
            "delivered": self.meter.delivered,
            "fenced": self.meter.fenced,
            "lost": self._in_flight.lost,
            "draining": self._leaving.is_set(),
        }

    async def _count(self, metrics: RolloutMetrics) -> None:
        """Update ``metrics`` from other counters; unsaved comes first, so that it never exceeds the token count."""
        metrics.unsaved.set(self._in_flight.unsaved())
        stats = self._engine.stats()
        metrics.tokens.set(sum(stats.tokens.values()))
        metrics.stale.set(stats.stale)

    async def _steer(self) -> None:
        """Start sequences and swap weights, whenever anything has changed."""
        while True:
            self._changed.clear()
            self._update()
            for work in self._instance.admit():
                assert isinstance(work.id, Job)
                work.id.task = self._spawn(self._sample(work.id))
                self._last_step = work.id.row.meta.step
            step = self._instance.swap()
            waits = self._instance.waits(self._wanted, required=self._receiver.view.required)
            self.meter.running(
                self._instance.running,
                waiting=waits and step is None,
                waits=self._waits_for(weights=waits),
                evaluating=self._instance.evaluating,
                step=self._last_step,
                version=-1 if self._instance.current is None else self._instance.current.step,
            )
            if step is None:
                await self._changed.wait()
            else:
                await self._swap(step, idle=self._instance.idle and not waits)

    def _waits_for(self, *, weights: bool) -> str:
        """Return why no sequence runs, if none does; "" before the first weights."""
        instance = self._instance
        if instance.current is None:
            return ""
        if weights:
            return "weights"
        if instance.wants_permit:
            return "permit"
        if instance.held:
            return "fetch"
        if self.meter.scoring:
            return "reward"
        return "delivery" if len(self._in_flight) else "claim"

    def _update(self) -> None:
        """Pass the available versions to the instance, and notify the receiver and the claimers of changes."""
        receiver = self._receiver
        self._instance.update_versions(staged=receiver.staged, in_memory=receiver.held, available=receiver.available())
        wanted = next_version_of(self._instance)(receiver.view)
        if wanted != self._wanted:
            self._wanted = wanted
            receiver.notify()
        for claimer in self._claimers:
            claimer.changed.set()
        self._updated.set()

    async def _take_permits(self, permits: SwapPermits) -> None:
        """Take a permit to change weights whenever the instance wants one; it may no longer need it when granted."""
        instance = self._instance
        while True:
            await self._wait_until(lambda: instance.wants_permit)
            assert instance.current is not None
            async with permits.permit(instance.current):
                if instance.wants_permit:
                    instance.take_permit()
                    self._changed.set()
                    await self._wait_until(lambda: not instance.has_permit)

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._updated.clear()
            await self._updated.wait()

    async def _swap(self, step: int, *, idle: bool) -> None:
        """Load the weights of ``step``; give back rows that need a version that cannot be fetched.

        Running sequences continue until the engine loads the weights, and pause meanwhile. idle: there is no work.
        """
        started, loaded = time.monotonic(), self._instance.current
        with self._swap_time(step, unless=loaded is None or self._instance.running > 0, idle=idle):
            try:
                settings = self._settings
                await self._receiver.ensure(step, timeout=settings.load_s, lost_s=settings.lost_s)
            except DeadlineExceeded as error:
                log.warning("%s", error)
                stuck = [job for job in self._in_flight if job.task is None and job.needs(step, loaded=loaded)]
                await self._in_flight.give_back(stuck, reason="its version cannot be fetched")
                return
            prepared = await self.loader.prepare(step)
        started = time.monotonic() if self._instance.running else started
        self._loading = prepared.version
        with self._swap_time(step, unless=loaded is None, idle=idle):
            await self.loader.load(prepared)
        self._loading = None
        self._instance.loaded(prepared.version)
        seconds = time.monotonic() - started
        self.loader.swapped(step, seconds)
        log.info("swapped to %s in %.3f s; %s", prepared.version, seconds, self.meter.interval())

    def _swap_time(self, step: int, *, unless: bool, idle: bool) -> contextlib.AbstractContextManager[None]:
        """Count the body as the time of a swap, in which nothing is generated, except if ``unless``."""
        idle = idle and not len(self._in_flight)
        return contextlib.nullcontext() if unless else self.meter.swaps(step, idle=idle)

    async def _watch(self) -> None:
        """Wake the steering loop whenever the available weights change."""
        receiver = self._receiver

        def known() -> object:
            return receiver.staged, receiver.held, receiver.available(), receiver.view.required

        def differs(seen: object) -> bool:
            return known() != seen

        while True:
            seen = known()
            self._changed.set()
            with contextlib.suppress(DeadlineExceeded):
                await receiver.wait_for(functools.partial(differs, seen), what="other weights", timeout=_WATCH_S)

    async def _sample(self, job: Job) -> None:
        """Generate one response, have it scored, and queue it for delivery; hand on a response that was aborted."""
        assert self._instance.current is not None
        request = job.request(self._settings, loaded=self._instance.current, continues=self._engine.may_continue)
        job.saved_tokens = request.prior_tokens
        try:
            completion, failed = await self._episodes.run(job, request)
        finally:
            self._instance.release(job)
            self._changed.set()
        await self._wait_until(lambda: self._loading is None or self._leaving.is_set())
        completion = self._trusted(completion)
        self.meter.generated(completion, prior_tokens=request.prior_tokens)
        if completion.finish == "aborted":
            await self._in_flight.give_back([job], reason=_LEAVING, partial={job: completion})
            return
        job.response = completion
        reward = failed
        if self._scoring is not None:
            started = time.monotonic()
            with self.meter.scores():
                scored = await self._scoring.score(job, self._episodes.transcript(completion))
            if scored is None:
                await self._in_flight.give_back([job], reason=_INCOMPLETE, partial={job: completion.without_last()})
                return
            reward = failed or scored
            self.meter.scored(reward, time.monotonic() - started)
        self._delivery.put(SampleOutcome(job=job, completion=completion, reward=reward))
        self._changed.set()

    def _trusted(self, completion: Completion) -> Completion:
        """Return a response without the tokens of weights that are loaded but not verified yet."""
        return completion if self._loading is None else completion.before(self._loading)

    def _settled(self, outcome: SampleOutcome, accepted: bool) -> None:
        self.meter.settled(accepted=accepted)
        self._in_flight.forget(outcome.job)

    def _parked(self, purpose: Purpose) -> None:
        self._instance.claim_was_empty(purpose)
        self._changed.set()

    async def _leave(self) -> None:
        """End all tasks within ``drain_s``: give back rows not started, hand on running ones, deliver the rest."""
        self._instance.drain()
        self.loader.close()
        self._updated.set()
        samples = {job.task for job in self._in_flight if job.task is not None}
        for task in self._tasks - samples:
            task.cancel()
        until = time.monotonic() + self._settings.drain_s
        waiting = [job for job in self._in_flight if job.task is None]
        running = [job for job in self._in_flight if job.task is not None and not job.generated]
        log.info(
            "leaving; %d rows are given back, %d are handed on unfinished, %d are to be delivered",
            len(waiting),
            len(running),
            len(self._in_flight) - len(waiting) - len(running),
        )
        giving_back = asyncio.create_task(self._in_flight.give_back(waiting, reason=_LEAVING))
        while samples and (left := until - time.monotonic()) > 0:
            between_turns = [job for job in self._in_flight if job.turn is not None and not job.generated]
            partial = self._in_flight.partial_responses()
            await self._in_flight.give_back(between_turns, reason=_LEAVING, partial=partial)
            await self._abort([job for job in running if not (job.gone or job.generated)], within_s=left)
            _, samples = await asyncio.wait(samples, timeout=min(left, _RETRY_S))
        await giving_back
        await self._delivery.flush(timeout=max(0.1, until - time.monotonic()))
        partial = self._in_flight.partial_responses()
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
        self.meter.running(0, waiting=False, waits="end" if self._failure is None else "lost")
        await self._in_flight.give_back(list(self._in_flight), reason=_LEAVING, partial=partial)
        await self._in_flight.returned()
        log.info("left; %d tokens were made here", sum(self._engine.stats().tokens.values()))

    async def _abort(self, jobs: Iterable[Job], *, within_s: float) -> None:
        """Abort running sequences; the engine then returns their partial responses."""
        keys: defaultdict[str, list[SampleKey]] = defaultdict(list)
        for job in jobs:
            keys[job.row.meta.purpose].append(job.row.meta.key)
        try:
            async with asyncio.timeout(within_s):
                for purpose, purpose_keys in keys.items():
                    await self._engine.abort(purpose_keys, purpose=purpose)
        except (AsyncFlowError, TimeoutError) as error:
            log.warning("running sequences are not handed on, because the engine does not abort them: %r", error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception) and self._leaving.is_set():
            log.warning("a task ended with an error while the instance left: %s", error)
        elif isinstance(error, Exception):
            self._failure = error
            self._leaving.set()
