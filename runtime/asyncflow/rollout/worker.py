"""One rollout instance: claims rows, generates, has them scored, delivers, and swaps weights between.

Every sample is a coroutine (generate, score, deliver); one loop steers: it begins what ``flow.instance`` admits and
swaps when that says so. Waiting for a reward or for a storage unit holds no slot.

Invariants: only the steering loop begins sequences and loads weights, so none runs while weights are loaded; nothing
that is away for a while ends the worker, only what makes going on senseless does.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncflow.errors import AsyncFlowError, DeadlineExceeded
from asyncflow.flow.instance import Instance
from asyncflow.identity import Version
from asyncflow.models.tokenizer import Tokenizer
from asyncflow.net.roster import Status
from asyncflow.queue.client.client import QueueClient
from asyncflow.rewards.service import Rewards
from asyncflow.rollout.claimer import Claimer
from asyncflow.rollout.delivery import Delivery
from asyncflow.rollout.desk import Desk
from asyncflow.rollout.engines.base import RolloutEngine
from asyncflow.rollout.job import Job, Outcome, RolloutSettings
from asyncflow.rollout.meter import Meter
from asyncflow.telemetry.metrics import RolloutMetrics
from asyncflow.weights.messages import CatalogueView
from asyncflow.weights.probe import Probe, Proved, refuted, split_probe
from asyncflow.weights.receiver import WeightReceiver

log = logging.getLogger(__name__)

_WATCH_S = 3600.0

Weights: TypeAlias = Mapping[str, NDArray[Any]]


def wanted_by(instance: Instance) -> Callable[[CatalogueView], int | None]:
    """Return the ``want`` of the receiver that serves ``instance``."""
    return lambda view: instance.want(view.available, required=view.required)


class RolloutWorker:
    """Runs one instance.

    receiver, made with ``want=wanted_by(instance)``, engine and rewards are started before and closed after by the
    caller. merge: makes the engine's weights of what is published, called in another thread as soon as a version is
    staged; None: they are the same.
    """

    def __init__(
        self,
        *,
        queue: QueueClient,
        receiver: WeightReceiver,
        engine: RolloutEngine,
        rewards: Rewards,
        tokenizer: Tokenizer,
        instance: Instance,
        settings: RolloutSettings,
        metrics: RolloutMetrics,
        merge: Callable[[Weights], Weights] | None = None,
    ) -> None:
        self.meter = Meter(metrics)
        self._receiver = receiver
        self._engine = engine
        self._rewards = rewards
        self._tokenizer = tokenizer
        self._instance = instance
        self._settings = settings
        self._merge = merge
        self._merging: tuple[Version, asyncio.Task[Weights]] | None = None
        self._proved: Proved | None = None
        self._changed = asyncio.Event()
        self._leaving = asyncio.Event()
        self._failure: Exception | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._wish: int | None = None
        self._desk = Desk(
            queue=queue,
            instance=instance,
            settings=settings,
            changed=self._changed.set,
            holding=self.meter.holding,
            spawn=self._spawn,
        )
        self._delivery = Delivery(queue, settled=self._settled, call_s=settings.call_s)
        self._claimers = [
            Claimer(
                purpose,
                queue=queue,
                instance=instance,
                settings=settings,
                slots=engine.slots,
                got=self._desk.take,
                parked=self._parked,
                backlog=self._desk.backlog,
            )
            for purpose in ("train", "eval")
        ]

    def drain(self) -> None:
        """Claim no more, hand back what is not generated yet, and let ``run`` end. May be called more than once."""
        self._instance.drain()
        self._leaving.set()

    async def run(self) -> None:
        """Work until ``drain``. Raises what makes going on senseless: weights or prompts that do not fit the engine."""
        for work in (
            self._steer(),
            self._stage(),
            self._engine.ended(),
            self._watch(),
            self._desk.renew(),
            *(claimer.run() for claimer in self._claimers),
        ):
            self._spawn(work)
        try:
            await self._leaving.wait()
        finally:
            await self._hand_back()
        if self._failure is not None:
            raise self._failure

    def status(self) -> Status:
        """Return what heartbeats report. version, staged: packed, -1 for none; seconds and counts since the start."""
        tokens = self._engine.stats().tokens
        version, staged = self._engine.version, self._receiver.staged
        return {
            "version": -1 if version is None else version.packed,
            "staged": -1 if staged is None else staged.packed,
            "slots": self._engine.slots,
            "running": self._instance.running,
            "inflight": len(self._desk),
            "tokens_generated": sum(tokens.values()),
            "tokens_generated_train": tokens.get("train", 0),
            "tokens_generated_eval": tokens.get("eval", 0),
            "busy_s": self.meter.generate_s,
            "held_s": self.meter.occupied.total(),
            "swap_stall_s": self.meter.stall_s,
            "swaps": self.meter.swaps,
            "delivered": self.meter.delivered,
            "fenced": self.meter.fenced,
            "lost": self._desk.lost,
            "draining": self._leaving.is_set(),
        }

    async def _steer(self) -> None:
        """Begin and swap, whenever anything has changed."""
        while True:
            self._changed.clear()
            self._look()
            for work in self._instance.admit():
                assert isinstance(work.id, Job)
                work.id.task = self._spawn(self._sample(work.id))
            step = self._instance.swap()
            waits = self._instance.waits(self._wish, required=self._receiver.view.required)
            self.meter.running(self._instance.running, waiting=waits and step is None)
            if step is None:
                await self._changed.wait()
            else:
                await self._swap(step)

    def _look(self) -> None:
        """Inform the instance of what can be loaded, the receiver of what is wanted, and the claimers of the change."""
        receiver = self._receiver
        self._instance.know(staged=receiver.staged, in_memory=receiver.held, available=receiver.available())
        wish = wanted_by(self._instance)(receiver.view)
        if wish != self._wish:
            self._wish = wish
            receiver.notify()
        for claimer in self._claimers:
            claimer.changed.set()

    async def _swap(self, step: int) -> None:
        """Load the weights of ``step``; rows that need a version which cannot be had are given back."""
        began = time.monotonic()
        loaded = self._instance.current
        with self.meter.busy("swap") if loaded is not None else contextlib.nullcontext():
            try:
                await self._receiver.ensure(step, timeout=self._settings.load_s)
            except DeadlineExceeded as error:
                log.warning("%s", error)
                stuck = [job for job in self._desk if job.task is None and job.needs(step, loaded=loaded)]
                await self._desk.give_back(stuck, reason=f"version {step} cannot be had")
                return
            version, tensors = self._receiver.take(step)
            weights, probe = await self._weights_of(version, tensors)
            if self._merging is not None and self._merging[0] == version:
                self._merging = None
            await self._engine.load(version, weights)
            if probe is not None:
                await self._prove(version, probe)
        self._instance.loaded(version)
        seconds = time.monotonic() - began
        self.meter.swapped(step, seconds)
        log.info("swapped to %s in %.3f s; %s", version, seconds, self.meter.lap())

    async def _prove(self, version: Version, probe: Probe) -> None:
        """Compare the log-probs of the loaded weights with those that were published with them.

        Raises AsyncFlowError where the engine has other weights than the catalogue says.
        """
        probe = probe.shortened(self._engine.max_length - 1)
        found = await self._engine.probe(probe.ids.tolist())
        if found is None:
            return
        gap = self.meter.probed(np.abs(found - probe.logprobs))
        log.info("%s: log-probs of %d tokens differ by %.1e from those published with it", version, len(found), gap)
        if (wrong := refuted(found, probe, before=self._proved, limit=self._settings.probe_gap)) is not None:
            what = f"the engine does not have the weights of {version}: {wrong}"
            raise AsyncFlowError(what, where="rollout.engine", hint="It has not loaded all tensors of this model")
        self._proved = Proved(probe, gap)

    async def _stage(self) -> None:
        """Prepare each version that is complete here in the engine, while it generates with the one before."""
        while True:
            staged = self._receiver.staged
            if staged is not None and self._engine.version is not None:
                weights, _ = await self._weights_of(staged, self._receiver.tensors(staged))
                await self._engine.stage(staged, weights)
            with contextlib.suppress(DeadlineExceeded):
                differs = functools.partial(lambda seen: self._receiver.staged != seen, staged)
                await self._receiver.wait_for(differs, what="a version to prepare", timeout=_WATCH_S)

    async def _weights_of(self, version: Version, tensors: Weights) -> tuple[Weights, Probe | None]:
        """Return what the engine loads of a held version, which is made in another thread and once, and its probe."""
        published, probe = split_probe(tensors)
        if self._merge is None:
            return published, probe
        if self._merging is None or self._merging[0] != version:
            work = asyncio.to_thread(self._merge, published)
            self._merging = version, asyncio.create_task(work, name=f"merge {version}")
        return await asyncio.shield(self._merging[1]), probe

    async def _watch(self) -> None:
        """Wake the steering loop whenever other weights can be had."""
        receiver = self._receiver

        def news() -> object:
            return receiver.staged, receiver.held, receiver.available(), receiver.view.required

        def differs(seen: object) -> bool:
            return news() != seen

        while True:
            seen = news()
            self._changed.set()
            with contextlib.suppress(DeadlineExceeded):
                await receiver.wait_for(functools.partial(differs, seen), what="other weights", timeout=_WATCH_S)

    async def _sample(self, job: Job) -> None:
        """Generate one response, have it scored, and hand it to delivery."""
        try:
            completion = await self._engine.generate(job.request(self._settings))
        finally:
            self._instance.release(job)
            self._changed.set()
        if completion.finish == "aborted":
            await self._desk.give_back([job], reason="aborted")
            return
        self.meter.generated(completion)
        job.generated = True
        ids = completion.ids[:-1] if completion.finish == "stop" else completion.ids
        began = time.monotonic()
        reward = await self._rewards.score(job.example(self._tokenizer.decode(ids.tolist())))
        outcome = Outcome(job=job, completion=completion, reward=reward)
        self.meter.scored(outcome, time.monotonic() - began)
        self._delivery.put(outcome)

    def _settled(self, outcome: Outcome, taken: bool) -> None:
        self.meter.settled(taken=taken)
        self._desk.forget(outcome.job)

    def _parked(self, purpose: str) -> None:
        if purpose == "eval":
            self._instance.eval_parked()
            self._changed.set()

    async def _hand_back(self) -> None:
        """End all tasks: give back what is not generated, then deliver the rest, as far as time allows."""
        self._instance.drain()
        if self._merging is not None:
            self._merging[1].cancel()
        finishing = {job.task for job in self._desk if job.generated and job.task is not None}
        for task in self._tasks - finishing:
            task.cancel()
        until = time.monotonic() + self._settings.drain_s
        begun = [job for job in self._desk if not job.generated]
        log.info("leaving; %d rows are given back, %d are to be delivered", len(begun), len(self._desk) - len(begun))
        await self._desk.give_back(begun, reason="the instance leaves")
        if finishing:
            await asyncio.wait(finishing, timeout=self._settings.drain_s)
        await self._delivery.flush(timeout=max(0.1, until - time.monotonic()))
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
        self.meter.running(0, waiting=False)
        await self._desk.give_back(list(self._desk), reason="the instance leaves")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception) and self._failure is None:
            self._failure = error
            self._leaving.set()
