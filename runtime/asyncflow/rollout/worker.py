"""One rollout instance: claims rows, generates, has them scored, delivers, and swaps weights between.

Where the reward is a role of its own, nothing is scored here.

Every sample is a coroutine (generate, score, deliver); one loop steers: it begins what ``flow.instance`` admits and
swaps when that says so. Waiting for a reward or for a storage unit holds no slot.

Invariants: only the steering loop begins sequences and loads weights, so none begins while weights are loaded; what
loaded weights made is delivered, saved or handed on only once they are proved to be those of their version; nothing
that is away for a while ends the worker, only what makes going on senseless does; a worker that leaves hands what runs
on to others, who go on behind it where its versions allow that (``Job.request``). Of its time, ``generate`` counts that
with at least one running sequence; ``receive`` that in which there was none although there was work, which waited for
other weights (on their way, or here and not loaded yet); ``swap`` that in which weights were loaded and there was work:
these never overlap. ``occupied`` counts the time with at least one row on lease: what a rollout has to do, waiting for
weights and rewards included.
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
from asyncflow.flow.claims import PARKED_S
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
from asyncflow.telemetry.metrics import BusyClock, RolloutMetrics
from asyncflow.telemetry.spans import NO_SPANS, Spans
from asyncflow.weights.messages import CatalogueView
from asyncflow.weights.permits import SwapPermits
from asyncflow.weights.receiver import WeightReceiver

log = logging.getLogger(__name__)

_WATCH_S = 3600.0
_LEAVES = "the instance leaves"
_APART = "another sample of its group left before the group was scored"
_AGAIN_S = 1.0
"""An engine may hear of a sequence only after it was told to end it."""


class SwapInterval(NamedTuple):
    """The seconds from one swap to the next: all; stalled by weights; without a sequence, for whatever reason."""

    wall_s: float
    stall_s: float
    idle_s: float

    def __str__(self) -> str:
        return f"in {self.wall_s:.3f} s since the last: stalled {self.stall_s:.3f} s, idle {self.idle_s:.3f} s"


class RolloutMeter:
    """Counts for heartbeats and for ``metrics``, and records what the instance does.

    fenced: results that came too late; scoring: samples that wait for their rewards.
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
        """Take in how many sequences run now, and whether work waits for other weights.

        That shows when a claim has found nothing, ``PARKED_S`` after it was made; the time since then counts too.

        waits: why none runs, "" before the first weights; evaluating: all of them are of evaluations; step: of those
        that were begun last; version: step of the loaded weights.
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
            self.busy.begin("receive", since=max(self._free_since, time.monotonic() - PARKED_S))
        elif self._waiting and not waiting:
            self.busy.end("receive")
        self._waiting = waiting

    @contextlib.contextmanager
    def scores(self) -> Iterator[None]:
        """Count the body as one sample that waits for its reward."""
        self.scoring += 1
        try:
            with self.spans.beside("reward"):
                yield
        finally:
            self.scoring -= 1

    @contextlib.contextmanager
    def swaps(self, step: int, *, idle: bool = False) -> Iterator[None]:
        """Count the body as time in which nothing is generated since weights are loaded. step: theirs.

        idle: nothing would be, so the time counts only from when there are rows.
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
        """Take in how many rows there are on lease."""
        if bool(rows) != self._holding:
            self._holding = not self._holding
            (self.occupied.begin if self._holding else self.occupied.end)("rows")
        if rows and self._idle_swap:
            self._idle_swap = False
            self.busy.begin("swap")

    def interval(self) -> SwapInterval:
        """Return the seconds since it was asked last, or since the start."""
        before, self._last = self._last, (time.monotonic(), self.stall_s, self.generate_s)
        wall_s, stall_s, generate_s = (new - old for new, old in zip(self._last, before, strict=True))
        return SwapInterval(wall_s, stall_s, wall_s - generate_s)

    def generated(self, completion: Completion, *, begun: int) -> None:
        """Take in a sequence that ended, of which another instance had made ``begun`` tokens."""
        self._metrics.sequences.labels(completion.finish).inc()
        if completion.finish != "aborted":
            self._metrics.taken_over.inc(begun)

    def scored(self, reward: RewardResult, seconds: float) -> None:
        """Take in the reward of a sample."""
        self._metrics.reward_seconds.observe(seconds)
        if reward.failure:
            self._metrics.rewards_failed.labels(reward.failure).inc()

    def settled(self, *, taken: bool) -> None:
        """Take in what became of a result at the queue."""
        if taken:
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
        """Seconds without one because weights were received or loaded, the very first apart."""
        seconds = self.busy.seconds()
        return seconds.get("receive", 0.0) + seconds.get("swap", 0.0)


def wanted_by(instance: Instance) -> Callable[[CatalogueView], int | None]:
    """Return the ``want`` of the receiver that serves ``instance``."""
    return lambda view: instance.want(view.available, required=view.required)


class RolloutWorker:
    """Runs one instance.

    receiver, made with ``want=wanted_by(instance)``, engine and rewards are started before and closed after by the
    caller. rewards: None where responses are scored elsewhere, as ``settings.judges`` says, too; merge: see
    ``WeightLoader``; permits: of a staggered update, None where it changes weights when it can; environment: of samples
    of several turns, started and closed like the rewards; spans: records what it does.
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
        self._looked = asyncio.Event()
        self._changed = asyncio.Event()
        self._leaving = asyncio.Event()
        self._failure: Exception | None = None
        self._begun_step = -1
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
                got=self._in_flight.take,
                parked=self._parked,
                backlog=self._in_flight.backlog,
            )
            for purpose in ("train", "eval")
        ]

    def drain(self) -> None:
        """Claim no more, hand on what is not generated yet, and let ``run`` end. May be called more than once."""
        self._instance.drain()
        self._leaving.set()

    async def run(self) -> None:
        """Work until ``drain``. Raises what makes going on senseless: weights or prompts that do not fit the engine."""
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
            await self._hand_back()
        if self._failure is not None:
            raise self._failure

    def status(self) -> Status:
        """Return what heartbeats report beside what ``WeightLoader`` says; seconds and counts since the start."""
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
        """Show in ``metrics`` what is counted elsewhere; all that is unsaved was made before it is counted."""
        metrics.unsaved.set(self._in_flight.unsaved())
        stats = self._engine.stats()
        metrics.tokens.set(sum(stats.tokens.values()))
        metrics.stale.set(stats.stale)

    async def _steer(self) -> None:
        """Begin and swap, whenever anything has changed."""
        while True:
            self._changed.clear()
            self._look()
            for work in self._instance.admit():
                assert isinstance(work.id, Job)
                work.id.task = self._spawn(self._sample(work.id))
                self._begun_step = work.id.row.meta.step
            step = self._instance.swap()
            waits = self._instance.waits(self._wanted, required=self._receiver.view.required)
            self.meter.running(
                self._instance.running,
                waiting=waits and step is None,
                waits=self._waits_for(weights=waits),
                evaluating=self._instance.evaluating,
                step=self._begun_step,
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

    def _look(self) -> None:
        """Inform the instance of what can be loaded, the receiver of what is wanted, and the claimers of the change."""
        receiver = self._receiver
        self._instance.know(staged=receiver.staged, in_memory=receiver.held, available=receiver.available())
        wanted = wanted_by(self._instance)(receiver.view)
        if wanted != self._wanted:
            self._wanted = wanted
            receiver.notify()
        for claimer in self._claimers:
            claimer.changed.set()
        self._looked.set()

    async def _take_permits(self, permits: SwapPermits) -> None:
        """Take a permit to change weights whenever the instance wants one; it may have done without in the meantime."""
        instance = self._instance
        while True:
            await self._until(lambda: instance.wants_permit)
            assert instance.current is not None
            async with permits.permit(instance.current):
                if instance.wants_permit:
                    instance.take_permit()
                    self._changed.set()
                    await self._until(lambda: not instance.has_permit)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._looked.clear()
            await self._looked.wait()

    async def _swap(self, step: int, *, idle: bool) -> None:
        """Load the weights of ``step``; rows that need a version which cannot be had are given back.

        What runs goes on until the engine loads them, and stands still while it does. idle: there is no work.
        """
        began, loaded = time.monotonic(), self._instance.current
        with self._standing_still(step, unless=loaded is None or self._instance.running > 0, idle=idle):
            try:
                await self._receiver.ensure(step, timeout=self._settings.load_s)
            except DeadlineExceeded as error:
                log.warning("%s", error)
                stuck = [job for job in self._in_flight if job.task is None and job.needs(step, loaded=loaded)]
                await self._in_flight.give_back(stuck, reason="its version cannot be had")
                return
            prepared = await self.loader.prepare(step)
        began = time.monotonic() if self._instance.running else began
        self._loading = prepared.version
        with self._standing_still(step, unless=loaded is None, idle=idle):
            await self.loader.load(prepared)
        self._loading = None
        self._instance.loaded(prepared.version)
        seconds = time.monotonic() - began
        self.loader.swapped(step, seconds)
        log.info("swapped to %s in %.3f s; %s", prepared.version, seconds, self.meter.interval())

    def _standing_still(self, step: int, *, unless: bool, idle: bool) -> contextlib.AbstractContextManager[None]:
        """Count the time as that of a swap, in which nothing is generated."""
        idle = idle and not len(self._in_flight)
        return contextlib.nullcontext() if unless else self.meter.swaps(step, idle=idle)

    async def _watch(self) -> None:
        """Wake the steering loop whenever other weights can be had."""
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
        """Generate one response, have it scored, and hand it to delivery; hand on one that was ended unfinished."""
        assert self._instance.current is not None
        request = job.request(self._settings, loaded=self._instance.current, continues=self._engine.may_continue)
        job.kept = request.begun
        try:
            completion, failed = await self._episodes.run(job, request)
        finally:
            self._instance.release(job)
            self._changed.set()
        await self._until(lambda: self._loading is None or self._leaving.is_set())
        completion = self._trusted(completion)
        self.meter.generated(completion, begun=request.begun)
        if completion.finish == "aborted":
            await self._in_flight.give_back([job], reason=_LEAVES, there={job: completion})
            return
        job.made = completion
        reward = failed
        if self._scoring is not None:
            began = time.monotonic()
            with self.meter.scores():
                scored = await self._scoring.score(job, self._episodes.transcript(completion))
            if scored is None:
                await self._in_flight.give_back([job], reason=_APART, there={job: completion.unended()})
                return
            reward = failed or scored
            self.meter.scored(reward, time.monotonic() - began)
        self._delivery.put(SampleOutcome(job=job, completion=completion, reward=reward))
        self._changed.set()

    def _trusted(self, made: Completion) -> Completion:
        """Return a response without what is of weights that are loaded and not proved to be those of their version."""
        return made if self._loading is None else made.before(self._loading)

    def _settled(self, outcome: SampleOutcome, taken: bool) -> None:
        self.meter.settled(taken=taken)
        self._in_flight.forget(outcome.job)

    def _parked(self, purpose: Purpose) -> None:
        self._instance.parked(purpose)
        self._changed.set()

    async def _hand_back(self) -> None:
        """End all tasks: give back what is not begun, hand on what runs, deliver the rest, as far as time allows."""
        self._instance.drain()
        self.loader.close()
        self._looked.set()
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
        giving_back = asyncio.create_task(self._in_flight.give_back(waiting, reason=_LEAVES))
        while samples and (left := until - time.monotonic()) > 0:
            between = [job for job in self._in_flight if job.turn is not None and not job.generated]
            await self._in_flight.give_back(between, reason=_LEAVES, there=self._in_flight.there())
            await self._abort([job for job in running if not (job.gone or job.generated)], within_s=left)
            _, samples = await asyncio.wait(samples, timeout=min(left, _AGAIN_S))
        await giving_back
        await self._delivery.flush(timeout=max(0.1, until - time.monotonic()))
        there = self._in_flight.there()
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
        self.meter.running(0, waiting=False, waits="end" if self._failure is None else "lost")
        await self._in_flight.give_back(list(self._in_flight), reason=_LEAVES, there=there)
        await self._in_flight.returned()
        log.info("left; %d tokens were made here", sum(self._engine.stats().tokens.values()))

    async def _abort(self, jobs: Iterable[Job], *, within_s: float) -> None:
        """End what runs, of which the engine then says how far it came."""
        keys: defaultdict[str, list[SampleKey]] = defaultdict(list)
        for job in jobs:
            keys[job.row.meta.purpose].append(job.row.meta.key)
        try:
            async with asyncio.timeout(within_s):
                for purpose, some in keys.items():
                    await self._engine.abort(some, purpose=purpose)
        except (AsyncFlowError, TimeoutError) as error:
            log.warning("what runs is not handed on, as the engine does not end it: %r", error)

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
