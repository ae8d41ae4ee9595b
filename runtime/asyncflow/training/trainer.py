"""One rank of the trainer, from its checkpoint to the last step.

    start:  checkpoint or θ_0 -> queue.begin(j) -> publish θ_j
    step k: slots of D_k -> gradient -> step -> queue.step_done(k) -> publish θ_k -> report
            periodically: checkpoint -> queue.commit(k), in the background of the next steps (``saving``)

All ranks write checkpoints together, of a step that all have completed. Rank 0 alone decides on the time, reports the
checkpoints to queue and driver, and commits. All ranks publish, each its part of the weights.

Invariants: the rename of a checkpoint's manifest is the commit point. The queue's ledger is on disk before it, and
records the commit after it. So whenever this process or its machine dies, the queue un-commits exactly the steps that
no checkpoint contains. A disk error postpones checkpoints. A trainer of an older attempt gets ``Fenced`` at its next
claim, publication or checkpoint, and ends. Ranks that leave do so after the same step (``ranks``). One separate thread
computes; the event loop only waits, so that heartbeats and fetching continue.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec
import numpy as np

from asyncflow import clock
from asyncflow.errors import (
    Diverged,
    ManifestError,
    ProtocolError,
    RowsLost,
    StaleHandle,
)
from asyncflow.identity import Version
from asyncflow.queue.protocol.messages import StepTotals
from asyncflow.rpc.membership import Directives, Status
from asyncflow.rpc.retry import retry
from asyncflow.telemetry.spans import NO_SPANS, Spans
from asyncflow.training.backend import TrainerBackend
from asyncflow.training.batch import MicroBatch
from asyncflow.training.checkpoint import Checkpoints
from asyncflow.training.loops import (
    SILENT_SAMPLES,
    FilledSlot,
    SlotPrefetcher,
    TrainQueue,
    mini_batches,
    repeated,
    streaming,
    synchronous,
)
from asyncflow.training.meter import RankMeter
from asyncflow.training.publication import Publication, Publisher, Weights
from asyncflow.training.ranks import GroupLeft, ProcessGroup, gather_bytes, jointly, unless_leaving
from asyncflow.training.recording import StepRecorder
from asyncflow.training.report import StepTally, TrainReport, describe
from asyncflow.training.saving import Saver
from asyncflow.training.settings import TrainerSettings
from asyncflow.weights.probe import WeightProbe
from asyncflow.weights.sender import Tensors

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
_CALL_S = 30.0
_GRACE_S = 2.0
_MEASURED = 4
"""Most samples of each older version per step whose log-probs are recomputed with the weights that generated them."""


class Trainer:
    """One rank of the trainer.

    folder: the model folder.
    materialise: writes θ_0 into the folder; called by rank 0 if needed.
    report: receives rank 0's reports.
    directives: returns the driver's latest directives.
    begun: whether the gang has met and the initial weights of this attempt are published.
    failed: called for each checkpoint that failed because of the disk.
    announced, saved: called with the duration in seconds of each finished publication and each written checkpoint.
    recorder: records the trained samples.
    spans: recorder of this rank's spans.
    """

    def __init__(
        self,
        *,
        queue: TrainQueue,
        sender: Publisher,
        backend: TrainerBackend,
        group: ProcessGroup,
        checkpoints: Checkpoints,
        report: Callable[[TrainReport], Awaitable[None]],
        directives: Callable[[], Directives],
        settings: TrainerSettings,
        folder: Path,
        materialise: Callable[[], None],
        failed: Callable[[], None] = lambda: None,
        announced: Callable[[float], None] = lambda _: None,
        saved: Callable[[float], None] = lambda _: None,
        spans: Spans = NO_SPANS,
        recorder: StepRecorder | None = None,
    ) -> None:
        self.step = 0
        self.begun = False
        self.meter = RankMeter(spans)
        backend.spans = spans
        self._queue = queue
        self._publication = Publication(
            sender,
            schedule=settings.schedule,
            attempt=settings.attempt,
            patience_s=settings.patience_s,
            lagged=backend.settings.loss.old == "lagged",
            ended=announced,
            spans=spans,
            digested=(lambda _: None) if recorder is None else recorder.published,
        )
        self._recorder = recorder
        self._backend = backend
        self._group = group
        self._checkpoints = checkpoints
        checkpoints.group = group.background()
        self._report = report
        self._directives = directives
        self._settings = settings
        self._folder = folder
        self._materialise = materialise
        self._prefetcher = SlotPrefetcher(queue, rank=group.rank, settings=settings, meter=self.meter, poll=self._poll)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self._tally = StepTally()
        self._older_samples: dict[int, list[MicroBatch]] = {}
        self._lagged: tuple[int, Weights | None] = 0, None
        self._warned_unmeasured = False
        self._samples = 0
        self._updating = self._within_step = False
        self._checkpoint_requests = directives().checkpoint
        self._leaving = asyncio.Event()
        self._saver = Saver(
            checkpoints,
            queue=queue,
            backend=backend,
            publication=self._publication,
            settings=settings,
            compute=self._thread,
            leaving=self._leaving,
            failed=failed,
            saved=saved,
            spans=spans,
        )
        self._since = (clock.now(), self._clock())

    def status(self) -> Status:
        """Return the status for heartbeats. step: the last completed one; trained: this rank's samples of the next one.

        publishing: step of the version that is being published, -1 for none; publish_s: duration of the last
        publication, left out before the first; saving: whether a checkpoint is being written.
        """
        took = {} if self._publication.seconds is None else {"publish_s": self._publication.seconds}
        return {
            **took,
            "step": self.step,
            "trained": self._backend.trained // self._settings.epochs,
            "publishing": self._publication.underway,
            "saving": self._saver.saving,
            "busy_s": self.meter.busy.total(),
            "waiting_for": self._prefetcher.waiting_for,
        }

    def leave(self) -> None:
        """Finish the current work, write a checkpoint of the last completed step, and return from ``run``.

        The current work is the micro-batch. It is the whole step if all ranks have contributed their gradient to it, or
        if one of several updates may have been made. The other ranks leave too.
        """
        self._leaving.set()
        if not self._updating:
            self._group.leave()

    async def run(self) -> int:
        """Train; return the last completed step. Raises Fenced if a newer attempt of the trainer has started.

        Raises RowsLost if samples of a slot were lost with a storage unit (they are regenerated only for a step that
        starts again), Diverged if the gradients are no longer finite, and ManifestError if a micro-batch does not fit
        the device. In these cases the completed steps are saved in a checkpoint, so no other step is repeated.
        Nothing is saved if the current step has already made an update, because the weights then belong to no step.
        """
        spans = self.meter.spans
        try:
            await self._start()
            spans.enter("idle", waits="queue", step=self.step + 1)
            await self._loop()(self)
            await self._unless_leaving(self._publication.announced())
        except GroupLeft:
            log.info("leaving after step %d", self.step)
            await self._save_completed()
            await self._publication.announced(within_s=_GRACE_S)
        except (Diverged, ManifestError):
            # Between the updates of a step the weights belong to no step; a diverged step has made no update.
            if not self._within_step:
                await self._save_completed()
            raise
        except StaleHandle as error:
            await self._save_completed()
            hint = f"Step {self.step + 1} is repeated"
            raise RowsLost(error.what, where=error.where, hint=hint) from error
        finally:
            self._publication.close()
            await self._saver.close()
            self._thread.shutdown(wait=False, cancel_futures=True)
            spans.enter("idle", waits="end")
        return self.step

    async def steps(self) -> AsyncIterator[int]:
        """Yield the remaining steps in order."""
        while self.step < self._settings.schedule.steps:
            await self._poll()
            yield self.step + 1

    def slots(self, step: int) -> AsyncGenerator[FilledSlot, None]:
        """Return the slots of D_step."""
        return self._prefetcher.slots(step, tokens=self._backend.slot_tokens)

    async def accumulate(self, step: int, slot: FilledSlot) -> None:
        """Compute the gradient of one slot."""
        self._register(step, slot.batch)
        with self.meter("compute", step=step):
            await self._compute(self._add, step, slot.batch)

    async def revisit(self, step: int, slots: Sequence[FilledSlot]) -> None:
        """Make all updates of a step except the last, whose gradient is accumulated.

        After the first gather no rank leaves before the step is finished, because the weights are not a version.
        """
        for slot in slots:
            self._register(step, slot.batch)
        with self.meter("publish", step=step):
            await self._publication.copied()
        self._updating = True
        try:
            with self.meter("compute", step=step):
                await self._compute(self._make_updates, step, slots)
        except GroupLeft:
            self._updating = False
            raise

    async def finish(self, step: int, totals: StepTotals | None) -> None:
        """Make θ_step from the accumulated gradient, publish and report it."""
        with self.meter("publish", step=step):
            await self._publication.copied()
        published = self._settings.schedule.publishes(step)
        with self.meter("optimizer", step=step):
            tally, metrics = await self._compute(self._optimize, step, totals)
            probe = await self._compute(self._backend.probe) if published else None
        self.step, self._updating, self._within_step = step, False, False
        if self._leaving.is_set():
            self._group.leave()
        self._samples += tally.samples
        if self._recorder is not None:
            self._recorder.finish(step)
        await self._retry(
            lambda: self._queue.step_done(**self._handle, step=step, rank=self._group.rank, timeout=_CALL_S),
            what=f"notifying the queue that step {step} is done",
        )
        if published:
            await self._publish(step, partial(self._weights, probe))
        if self._group.rank == 0:
            report = self._describe(tally, metrics, published=published)
            await self._retry(lambda: self._report(report), what=f"reporting step {step}")
        every, last = self._settings.checkpoint_every, step == self._settings.schedule.steps
        evaluated = self._settings.checkpoint_evaluated and self._settings.schedule.evaluates(step)
        due = last or evaluated or (every > 0 and step % every == 0)
        await self._checkpoint_if(due or self._checkpoint_requested())
        if last:
            await self._await_last_checkpoint()

    async def _await_last_checkpoint(self) -> None:
        """Wait until the last step is in a checkpoint, retrying after disk errors."""
        await self._saver.finished()
        while (retry_s := self._saver.retry_in_s) is not None:
            await asyncio.sleep(retry_s)
            await self._poll()
            await self._checkpoint_if(False)
            await self._saver.finished()

    def _loop(self) -> Callable[[Trainer], Awaitable[None]]:
        updates = self._settings.epochs * self._settings.mini_batches
        if updates > 1 or self._backend.settings.loss.algorithm.whole_step:
            return repeated
        return synchronous if self._settings.whole else streaming

    def _version(self, step: int) -> int:
        return Version(self._settings.attempt, step).packed

    async def _start(self) -> None:
        checkpoint, carried = await self._compute(self._load)
        await self._retry(
            lambda: self._queue.begin(**self._handle, step=self.step, world=self._group.world, timeout=_CALL_S),
            what=f"starting at step {self.step}",
        )
        if self._recorder is not None:
            self._recorder.begin(self.step, ranks=self._group.world)
        for step in carried:
            read = partial(Publication.read, checkpoint, step, group=self._group, shared=self._checkpoints.shared)
            await self._publish(step, read)
        await self._compute(self._group.gather, np.zeros(1), what="the ranks at the start")
        probe = await self._compute(self._backend.probe)
        await self._publish(self.step, partial(self._weights, probe))
        await self._unless_leaving(self._publication.announced())
        self._since = (clock.now(), self._clock())
        self._publication.began_at = self.step
        self.begun = True
        log.info("attempt %d starts at step %d", self._settings.attempt, self.step)

    def _load(self) -> tuple[Path | None, list[int]]:
        """Resume; return the checkpoint's folder if this rank can access it, and the steps of the carried versions."""
        found, group, checkpoints = None, self._group, self._checkpoints
        checkpoints.claim(self._settings.attempt)
        with jointly(group, what="looking for a checkpoint"):
            if group.rank == 0:
                found = checkpoints.latest()
                if found is None or self._backend.settings.needs_initial_weights:
                    self._materialise()
        place = (found.manifest.step, found.manifest.samples, found.manifest.carried) if found is not None else None
        gathered = gather_bytes(group, msgspec.json.encode(place), what="the step to start at")[0]
        resumed = msgspec.json.decode(gathered, type=tuple[int, int, list[int]] | None)
        self.step, self._samples, carried = resumed or (0, 0, [])
        self._saver.resumed(self.step)
        with jointly(group, what="reading the checkpoint"):
            if resumed is not None and checkpoints.shared:
                found = checkpoints.at(self.step)
                found.verify(read=checkpoints.handled, rank=group.rank, world=group.world)
            elif found is not None:
                found.verify(read=checkpoints.handled)
        checkpoint = found.folder if found is not None else None
        self._backend.load(self._folder, checkpoint=checkpoint)
        return checkpoint, carried

    def _register(self, step: int, batch: MicroBatch) -> None:
        """Count and record a slot, and keep some of its samples for ``_measure_older``."""
        self._tally.add(batch, step=step)
        if self._recorder is not None:
            self._recorder.add(batch)
        if self._group.rank == 0:
            self._keep_older(batch, current=self._version(step - 1))

    def _add(self, step: int, batch: MicroBatch) -> None:
        if self._backend.settings.loss.old == "lagged":
            batch = self._with_lagged(step, batch)
        self._backend.micro_batch(batch, version=self._version(step - 1))

    def _with_lagged(self, step: int, batch: MicroBatch) -> MicroBatch:
        """Return ``batch`` with the log-probs under the published θ_{step-2}. Collective.

        Returns it unchanged, so that the old policy is the policy itself, in step 1, and if a rank lacks its part of
        those weights: in the first step after a resume of ranks that do not share their folder, or from a checkpoint
        without them.
        """
        if step == 1:
            return batch
        cached, weights = self._lagged
        if cached != step:
            weights = self._publication.weights_of(Version(self._settings.attempt, step - 2))
            if not self._group.gather(np.array([bool(weights)]), what=f"the holders of θ_{step - 2}").all():
                log.warning("step %d has no older weights: its old policy is θ_%d", step, step - 1)
                weights = None
            self._lagged = step, weights
        return batch if weights is None else self._backend.prepare(batch, weights=weights)

    def _keep_older(self, batch: MicroBatch, *, current: int) -> None:
        """Keep some samples of each older version for ``_measure_older``."""
        versions = batch.sole_versions()
        for version in np.unique(versions[(versions >= 0) & (versions != current)]).tolist():
            kept = self._older_samples.setdefault(version, [])
            more = np.flatnonzero(versions == version)[: _MEASURED - sum(map(len, kept))]
            if len(more):
                kept.append(batch.take(more.tolist()))

    def _measure_older(self) -> None:
        """Compare engine and trainer on rank 0's samples of older versions whose weights all ranks hold. Collective.

        Each rank holds its slices of the weights.
        """
        samples, self._older_samples = self._older_samples, {}
        counts = msgspec.json.encode([(version, len(batches)) for version, batches in samples.items()])
        gathered = gather_bytes(self._group, counts, what="the older versions to measure")[0]
        if not (wanted := msgspec.json.decode(gathered, type=list[tuple[int, int]])):
            return
        held = [self._publication.weights_of(Version.unpack(version)) for version, _ in wanted]
        holders = self._group.gather(np.array([*map(bool, held)]), what="the holders of the older versions")
        for (version, number), weights, ranks in zip(wanted, held, holders.T, strict=True):
            if ranks.all():
                for batch in samples.get(version, [MicroBatch.empty()] * number):
                    self._backend.measure(batch, weights=weights or {})
            elif not self._warned_unmeasured:
                self._warned_unmeasured = True
                log.warning(
                    "logprob_gap_p99 leaves out samples whose weights are not kept, first those of %s: "
                    "it is measured for the current weights, and for as many older ones as fit into 1 GiB",
                    Version.unpack(version),
                )

    def _make_updates(self, step: int, slots: Sequence[FilledSlot]) -> None:
        batch, totals = MicroBatch.joined([slot.batch for slot in slots]), slots[-1].totals
        serials = np.array([key.serial for key in batch.keys], dtype=np.int64)
        own = np.unique(serials)
        groups = np.full(max(len(own), totals.groups if totals else 0), -1)
        groups[: len(own)] = own
        groups = self._group.gather(groups, what=f"the groups of step {step}")
        parts = mini_batches(serials, groups=groups[groups >= 0], count=self._settings.mini_batches)
        batch = self._backend.prepare(batch)
        for number, chosen in enumerate(parts * self._settings.epochs):
            if number:
                self._backend.update(step)
                self._within_step = True
            version = None if number else self._version(step - 1)
            self._backend.micro_batch(batch.take(chosen.tolist()), version=version)
            if not number:
                self._measure_older()

    def _optimize(self, step: int, totals: StepTotals | None) -> tuple[StepTally, dict[str, float]]:
        self._lagged = 0, None
        self._measure_older()
        tally = StepTally.merged(self._group.gather(self._tally.array(), what=f"the samples of step {step}"))
        self._tally = StepTally()
        if totals is None or totals.samples != tally.samples:
            raise ProtocolError(
                f"step {step} has {totals.samples if totals else 'unknown'} samples, but {tally.samples} came",
                where="trainer",
            )
        metrics = self._backend.finish_step(step)
        if SILENT_SAMPLES in metrics:  # each epoch counts them
            metrics[SILENT_SAMPLES] /= self._settings.epochs
        return tally, metrics

    async def _publish(self, step: int, weights: Callable[[], Tensors]) -> None:
        with self.meter("publish", step=step):
            await self._unless_leaving(self._publication.begin(step, weights))

    def _weights(self, probe: WeightProbe | None) -> Tensors:
        probe_tensors = probe.tensors if probe is not None and self._group.rank == 0 else {}
        return {**dict(self._backend.tensors(dtype=self._settings.published)), **probe_tensors}

    async def _poll(self) -> None:
        """Follow the driver's directives; called between micro-batches, with the weights of the last completed step."""
        directives = self._directives()
        if self._leaving.is_set() or directives.stop or directives.drain:
            self.leave()
            raise GroupLeft
        if await self._group.left():
            raise GroupLeft
        self._publication.check()
        self._saver.check()
        if self._group.world == 1:
            await self._checkpoint_if(self._checkpoint_requested())

    def _checkpoint_requested(self) -> bool:
        """Return whether the driver has requested a checkpoint, and the current step has none."""
        before, self._checkpoint_requests = self._checkpoint_requests, self._directives().checkpoint
        return self._checkpoint_requests > before and self.step > self._saver.newest

    async def _save_completed(self) -> None:
        self._group.leave()
        await self._saver.save_and_leave(self.step, samples=self._samples)

    async def _checkpoint_if(self, wanted: bool) -> None:
        """Start a checkpoint if rank 0 wants one, or is to retry one that failed because of the disk. Collective."""
        due = self._saver.retry_in_s == 0
        own = np.array([wanted or due])
        if (await self._compute(self._group.gather, own, what=f"whether to save θ_{self.step}"))[0, 0]:
            with self.meter("checkpoint", step=self.step):
                await self._saver.begin(self.step, samples=self._samples)

    def _describe(self, tally: StepTally, metrics: dict[str, float], *, published: bool) -> TrainReport:
        (started, before), (ended, now) = self._since, (clock.now(), self._clock())
        self._since = (ended, now)
        return describe(
            tally,
            metrics,
            attempt=self._settings.attempt,
            ranks=self._group.world,
            step=self.step,
            published=published,
            spent={cause: now[cause] - before.get(cause, 0.0) for cause in now},
            publication_s=self._publication.seconds,
            busy_s=self.meter.busy.total(),
            started=started,
            ended=ended,
        )

    def _clock(self) -> dict[str, float]:
        return {"wall": time.monotonic(), **self.meter.busy.seconds(), **self.meter.waits.seconds()}

    @property
    def _handle(self) -> dict[str, Any]:
        return {"partition": self._settings.partition, "attempt": self._settings.attempt}

    async def _retry(self, attempt: Callable[[], Awaitable[None]], *, what: str) -> None:
        """Retry until it succeeds; once the trainer is leaving, only for two more seconds (then raise GroupLeft)."""
        await self._unless_leaving(retry(attempt, what=what, timeout=self._settings.patience_s))

    async def _unless_leaving(self, work: Coroutine[Any, Any, None]) -> None:
        await unless_leaving(work, self._leaving)

    async def _compute(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        def call() -> T:
            return function(*args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(self._thread, call)
