"""The driver: connects data, admission, groups, evaluation and progress with the queue and the catalogue of versions.

Its loops wait for one signal (``ChangeSignal``) and are level-triggered: they act on the published versions, the
dispatched prompts, and the trained and evaluated steps. The durable state is the ledger, the checkpoint, the driver's
two files of lines, ``lives.json`` and ``rewards.json``; a driver that is killed restarts from these.

Invariants: a loop depends on the current state only, so it may be stopped and restarted at any point; a driver takes
over the partitions before it reads the ledger, so no prompt of a dead driver is accepted after that; one module
(``ending``) decides when the job is over; a version is required as long as an unfinished step or evaluation names it,
and the driver does not wait for a version that will never be available again.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from asyncflow import clock
from asyncflow.api.graph import graph_of
from asyncflow.api.job import RLJob
from asyncflow.api.status import DriverStatus, Phase, StepProgress
from asyncflow.data.prompter import Prompter
from asyncflow.data.put import PromptsThere, PutPrompts
from asyncflow.driver.dispatch import CALL_TIMEOUT_S, Dispatcher, PromptColumns, require_put, restore
from asyncflow.driver.elastic import DesiredRollouts
from asyncflow.driver.ending import Ending
from asyncflow.driver.evaluation import Evaluation, EvaluationResult, best_of
from asyncflow.driver.groups import AdvantageTask, GroupPolicy, RewardTally
from asyncflow.driver.journal import FIRST_DISPATCH, LIVES, PROMPTS, REWARDS, StateFile
from asyncflow.driver.lives import Lives
from asyncflow.driver.members import Members
from asyncflow.driver.presence import LiveState, evidence_of, live_state
from asyncflow.driver.progress import RunProgress, StepWatch, line_of, log_progress
from asyncflow.driver.samples import SampleCollector
from asyncflow.driver.sinks import Sinks
from asyncflow.driver.status import build_status, count_step, set_gauges, waiting_for
from asyncflow.driver.tasks import EVAL, TRAIN
from asyncflow.errors import DeadlineExceeded, ManifestError, PeerLost, Refused
from asyncflow.flow.admission import InFlight, admission_of
from asyncflow.flow.assignment import PromptAssignment
from asyncflow.flow.schedule import Schedule
from asyncflow.flow.stagger import Permits, Supply
from asyncflow.queue.client import QueueClient
from asyncflow.queue.protocol.messages import QueueStats
from asyncflow.rpc.directory import Directory
from asyncflow.rpc.server import RpcServer
from asyncflow.telemetry.metrics import DriverMetrics
from asyncflow.telemetry.spans import NO_SPANS, Spans
from asyncflow.training.report import ReportReply, TrainReport
from asyncflow.weights.catalogue import Catalogue
from asyncflow.weights.permits import PermitService
from asyncflow.weights.service import CatalogueService

log = logging.getLogger(__name__)

RETRY_S = 0.5

UPDATE_S = 0.5
SAVE_S = 5.0
STEP_WATCH_S = 2.0
FULL = 0.8
"""Share of the queue's bytes in use above which the driver requests a checkpoint, whose commit frees bytes."""


class ChangeSignal:
    """A signal of a possible change: ``changed`` waits for the next ``notify``, at most ``every_s`` seconds."""

    def __init__(self, *, every_s: float = 5.0) -> None:
        self._every_s = every_s
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake every waiter."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def changed(self) -> None:
        """Wait for the next ``notify``."""
        event = self._event
        try:
            async with asyncio.timeout(self._every_s):
                await event.wait()
        except TimeoutError:
            return


async def keep_running(loop: Callable[[], Awaitable[None]], *, what: str) -> NoReturn:
    """Run an endless loop, and restart it if a peer is lost or late. Log only the first failure as a warning."""
    failed = False
    while True:
        try:
            await loop()
            raise RuntimeError(f"the loop of {what} ended")
        except (PeerLost, DeadlineExceeded) as error:
            (log.debug if failed else log.warning)("%s: %s; trying again", what, error)
            failed = True
            await asyncio.sleep(RETRY_S)


@dataclass(frozen=True, kw_only=True)
class Versions:
    """Answers which versions are required and which can be evaluated, from the catalogue and the schedule.

    evaluates: whether the job has evaluations.
    """

    catalogue: Catalogue
    schedule: Schedule
    assignment: PromptAssignment
    progress: RunProgress
    evaluates: bool

    @property
    def newest(self) -> int | None:
        """Step of the newest version that was ever completely published, None before the first."""
        newest = self.catalogue.newest
        return None if newest is None else newest.step

    @property
    def nbytes(self) -> int | None:
        """Bytes of the newest version, None if it is not available."""
        newest = self.newest
        version = None if newest is None else self.catalogue.find(newest)
        return None if version is None else self.catalogue.manifest(version).nbytes

    def required(self) -> set[int]:
        """Return the steps of the versions that the members must keep.

        They include versions to be evaluated that are not in the catalogue yet: members report their versions to a
        restarted driver one by one, and a version that is not required when it is reported is deleted by all members.
        """
        unfinished = self.assignment.unfinished(trained_step=self.progress.done)
        return self.schedule.required(unfinished) | set(self._unrecorded())

    def unevaluated(self) -> list[int]:
        """Return the versions whose evaluation is planned, not recorded, and still possible."""
        newest = self.newest
        return [
            step
            for step in self._unrecorded()
            if newest is None or step > newest or self.catalogue.find(step) is not None
        ]

    def _unrecorded(self) -> list[int]:
        """Return the versions whose evaluation is planned and not recorded."""
        if not self.evaluates:
            return []
        return [step for step in self.schedule.evaluations() if step not in self.progress.evaluations]

    def judged(self) -> int:
        """Return the step up to which every planned evaluation is recorded or no longer possible."""
        unevaluated = self.unevaluated()
        return unevaluated[0] - 1 if unevaluated else self.progress.steps

    def due(self) -> list[int]:
        """Return the versions to be evaluated that are available and belong to the surviving history."""
        done = self.progress.done
        return [step for step in self.unevaluated() if step <= done and self.catalogue.find(step) is not None]


class Driver:
    """The driver of one job. ``run`` returns the phase in which the job ended."""

    def __init__(
        self,
        job: RLJob,
        *,
        folder: Path,
        server: RpcServer,
        directory: Directory,
        queue: QueueClient,
        train_prompts: Prompter,
        eval_prompts: Mapping[str, Prompter],
        decode: Callable[[Sequence[int]], str],
        sinks: Sinks,
        metrics: DriverMetrics,
        spans: Spans = NO_SPANS,
    ) -> None:
        spec = job.spec
        self.job = job
        self.queue = queue
        self.metrics = metrics
        self.spans = spans
        self.sinks = sinks
        self.schedule = Schedule.of(spec)
        self._graph = graph_of(spec)

        self.phase: Phase = "Starting"
        self.changes = ChangeSignal()
        self._stats: QueueStats | None = None
        self._step_progress: StepProgress | None = None
        self._full_at_step = -1
        self._progressed_at = clock.now()

        self.progress = RunProgress(folder, steps=spec.algorithm.steps, now=clock.now())
        self.assignment = PromptAssignment(prompts_per_step=spec.algorithm.prompts_per_step, steps=spec.algorithm.steps)
        done = self.progress.done >= self.progress.steps
        self.lives = Lives(opened=self.progress.at(FIRST_DISPATCH), closed=self.progress.last_step_at if done else None)
        self.elastic = DesiredRollouts(spec, lives=self.lives)
        self.rewards = RewardTally.of(spec, StateFile(folder / REWARDS))

        self.weights = CatalogueService(server, directory=directory, catalogue=Catalogue(keep=spec.weight_sync.keep))
        self.weights.on_newest.append(self.changes.notify)
        self.versions = Versions(
            catalogue=self.weights.catalogue,
            schedule=self.schedule,
            assignment=self.assignment,
            progress=self.progress,
            evaluates=spec.evaluation is not None,
        )
        staggered = Permits(most=spec.weight_sync.stagger) if spec.schedule.update == "staggered" else None
        self._permits = PermitService(server, directory=directory, permits=staggered, supply=self._supply)
        self.members = Members(
            directory,
            queue=queue,
            weights=self.weights,
            lives=self.lives,
            swap_at=spec.schedule.swap_at,
            memory=folder / LIVES,
            started=self.progress.now,
            changed=self.changes.notify,
            figures=metrics.figures,
        )

        self._dispatcher = Dispatcher(
            queue=queue,
            prompts=PromptColumns.of(spec, prompter=train_prompts, what="prompt"),
            assignment=self.assignment,
            schedule=self.schedule,
            policies=admission_of(spec),
            group_size=spec.algorithm.group_size,
            flow=self._flow,
            changed=self.changes.changed,
            on_first=self._first_dispatch,
            on_skip=metrics.prompts_skipped.inc,
            spans=spans,
        )
        policy = GroupPolicy.of(spec)
        self._samples = SampleCollector(
            spec.storage.samples,
            queue=queue,
            folder=folder,
            seed=spec.algorithm.seed,
            decode=decode,
            column=policy.algorithm.writes,
        )
        self._groups = AdvantageTask(
            queue=queue,
            policy=policy,
            rewards=self.rewards,
            finished=self._finished,
            excluded=self._exclude,
            complete=lambda step: self.assignment.complete_together(self.schedule.together(step)),
            late=self._late if spec.schedule.fill == "completion" else lambda _serial: None,
            exchanged=self.assignment.exchange,
            decided=self._samples.decided,
            spans=spans,
        )
        self._evaluation = Evaluation.of(
            spec,
            queue=queue,
            rewards=self.rewards,
            prompters=eval_prompts,
            steps=self.schedule.evaluations(),
            due=self.versions.due,
            changed=self.changes.changed,
            keep=self._samples.evaluating,
            finished=self._evaluated,
            spans=spans,
        )
        self._step_watch = StepWatch(
            queue, progress=self.progress, members=self.members, samples=spec.algorithm.samples_per_step
        )
        self._ending = Ending(
            folder=folder,
            queue=queue,
            progress=self.progress,
            members=self.members,
            changed=self.changes.changed,
            unevaluated=self.versions.unevaluated,
            suspending=lambda: self.phase == "Suspending",
            export_s=spec.limits.stall_seconds,
            devices=spec.devices,
            rewards=self.rewards,
            prompts_skipped=lambda: self._dispatcher.skipped,
        )

        metrics.quiet.set_function(self._quiet_s)
        metrics.stall_limit.set(spec.limits.stall_seconds)
        metrics.watch_rewards(self.rewards.outcomes)
        metrics.watch_groups(self.rewards.equal_groups)
        server.route("driver.report", TrainReport, self._report)
        server.route("driver.put_prompts", PutPrompts, self._put_prompts)

    async def run(self) -> Phase:
        """Run the job to its end and return the phase: Succeeded or Suspended."""
        queue = self.job.spec.transfer_queue
        needed = Counter(controller=queue.controllers, storage=queue.storage_units)
        await self.members.gather(needed, changed=self.changes.changed, within_s=self.job.spec.limits.start_seconds)
        await self._restore()
        self.sinks.start()
        self.phase, self._progressed_at = "Running", clock.now()
        self.spans.serve(waits="version")
        loops = {
            "dispatching": self._dispatcher.run,
            "replacing lost samples": self._dispatcher.replace_lost,
            "advantages": self._groups.run,
            "holding groups": self._groups.renew,
            "the status update": self._update,
            "progress": self._watch_step,
            "the log": self._log_progress,
            "keeping samples": self._samples.run,
        }
        if self._evaluation is not None:
            loops |= {
                "evaluations": self._evaluation.put_due,
                "counting evaluations": self._evaluation.count,
                "replacing lost evaluations": self._evaluation.replace_lost,
            }
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(keep_running(loop, what=what), name=what) for what, loop in loops.items()]
                self.phase = await self._ending.reached()
                for task in tasks:
                    task.cancel()
        finally:
            self._save()
        return self.phase

    async def conclude(self) -> None:
        """Write the summary; it includes a step that is reported meanwhile."""
        self.spans.enter("idle", waits="end")
        await self._samples.write(everything=True)
        await self._ending.conclude(self.phase)

    async def dismiss(self) -> None:
        """Direct all members to stop, and wait until they have left."""
        await self.members.dismiss(within_s=self.job.spec.limits.stop_seconds)
        await self.sinks.close()

    def status(self) -> DriverStatus:
        """Return the answer of ``GET /v1/status``."""
        newest, watched = self.versions.newest, self._step_progress
        return build_status(
            self.progress,
            phase=self.phase,
            attempt=self.members.trainer_attempt,
            newest=newest,
            versions=self.members.versions(nbytes=self.versions.nbytes, newest=newest),
            fleets=self.members.fleets(nbytes=self.versions.nbytes, newest=newest),
            rollouts=self.members.rollouts(newest=newest, lag=self.schedule.lag),
            stats=self._stats,
            checkpoint=self._ending.checkpoint,
            best=self.members.kept_best,
            idle_share=self.lives.idle_shares(clock.now()),
            recent=self.elastic.recent,
            desired_rollouts=self.elastic.desired,
            rewards=self.rewards.state,
            tasks=self.members.tasks(self._graph, self._stats),
            prompts_skipped=self._dispatcher.skipped,
            step_progress=watched if watched and watched.step == self.progress.done + 1 else None,
            clock_ahead_s=clock.offset(),
            waiting_for=(self.rewards.paused if self.phase != "Running" else "")
            or waiting_for(
                self.progress,
                spec=self.job.spec,
                members=self.members.counts,
                newest=newest,
                evaluating=self.versions.unevaluated(),
                exported=self.members.exported,
                stats=self._stats,
                quiet_s=clock.now() - self._progressed_at,
                missing_prompts=self.assignment.lacks(self.progress.done + 1) if self._dispatcher.lacks_prompts else 0,
            ),
        )

    def _quiet_s(self) -> float:
        """Return the seconds since the last step, 0 after the final step."""
        return clock.now() - self._progressed_at if self.progress.done < self.progress.steps else 0.0

    def live(self) -> LiveState:
        """Return the answer of ``GET /v1/live``."""
        return live_state(self.job.name, self.members.present(), self._stats)

    def evidence(self) -> dict[str, Any]:
        """Return the answer of ``GET /v1/evidence``."""
        rewards = self.rewards.state
        return evidence_of(
            self.job,
            steps=self.progress.lines,
            events=self.progress.events,
            lives=self.lives.dump(),
            rewards={"scored": rewards.scored, "failed": rewards.failed, "first_failure": rewards.first_failure},
        )

    def drain(self, worker: str) -> None:
        """Direct a rollout to return its work and leave. Raises StaleHandle for an unknown one."""
        self.members.drain(worker)

    def checkpoint(self) -> None:
        """Request a checkpoint from the trainer at the next step boundary."""
        self.members.ask_for_checkpoint()

    def suspend(self) -> None:
        """Write a checkpoint, then end the job; the run can be resumed. Raises Refused while the job is starting."""
        if self.phase == "Starting":
            raise Refused("the job is still starting", where="suspend", hint="Retry when /v1/status says Running")
        if self.phase in ("Running", "Paused"):
            self.phase = "Suspending"
            self.progress.note("suspend", at=clock.now())
            self.checkpoint()
            self.changes.notify()

    def resume(self) -> None:
        """Continue after a pause. Raises Refused if the job is not paused."""
        if self.phase != "Paused":
            raise Refused(f"the job is not paused but {self.phase.lower()}", where="resume")
        self.rewards.resume()
        self.phase = "Running"
        self.progress.note("resume", at=clock.now())
        self.changes.notify()

    def _pause(self) -> None:
        log.error("%s", self.rewards.paused)
        self.phase = "Paused"
        self.progress.note("pause", at=clock.now(), why=self.rewards.paused)
        self.rewards.flush()

    async def _restore(self) -> None:
        await self.queue.expire(worker=self.queue.worker, timeout=CALL_TIMEOUT_S)
        for partition in (TRAIN, EVAL):
            await self.queue.take_over(partition=partition, timeout=CALL_TIMEOUT_S)
        snapshot = await self.queue.snapshot(partition=TRAIN, timeout=CALL_TIMEOUT_S)
        restore(self.assignment, snapshot)
        available = self._dispatcher.prompts.prompter.source.available
        if available is not None and available < self.assignment.next_serial:
            raise ManifestError(
                f"the file has {available} prompts, but {self.assignment.next_serial} were dispatched",
                where=PROMPTS,
                hint="Restore the file, or start the run from scratch (--fresh)",
            )
        size = self.job.spec.algorithm.group_size
        self._groups.filtered.update(
            {step: min(state.excluded, state.filtered // size) for step, state in snapshot.steps.items()}
        )
        self.progress.catch_up(snapshot.last_staged_step, attempt=snapshot.attempt)
        self._ending.note_commit(snapshot.last_committed_step)
        self._dispatcher.count_skipped(snapshot.skipped)
        await self.queue.clear_partition(partition=EVAL, timeout=CALL_TIMEOUT_S)

    async def _update(self) -> None:
        committed, saved_at = -1, 0.0
        while True:
            self.members.observe(clock.now())
            if self.rewards.paused and self.phase == "Running":
                self._pause()
            if time.monotonic() - saved_at > SAVE_S:
                saved_at = time.monotonic()
                self._save()
            self.weights.require(self.versions.required())
            if by := self.job.spec.storage.checkpoints.keep_best:
                self.members.judged = self.versions.judged()
                self.members.best = best_of(self.progress.evaluations, by=by)
            stats = await self.queue.stats(timeout=CALL_TIMEOUT_S)
            if self._stats is not None and stats.ledger_bytes < self._stats.ledger_bytes:
                prompts = self._dispatcher.acknowledged
                require_put(await self.queue.snapshot(partition=TRAIN, timeout=CALL_TIMEOUT_S), prompts=prompts)
            self._stats = stats
            if stats.committed != committed:
                await self._ending.committed()
                committed = stats.committed
                if self._ending.checkpoint is not None:
                    self.assignment.forget(committed=self._ending.checkpoint[0])
            if (
                stats.limit
                and stats.bytes > FULL * stats.limit
                and stats.staged
                and self._full_at_step != self.progress.done
            ):
                log.warning("the queue is %.0f%% full: requesting a checkpoint", 100 * stats.bytes / stats.limit)
                self._full_at_step = self.progress.done
                self.checkpoint()
            status = self.status()
            if self.phase == "Running":
                self._recommend_rollouts(status)
            set_gauges(self.metrics, status, stats=stats, members=self.members.counts)
            self._permits.look()
            self.changes.notify()
            await asyncio.sleep(UPDATE_S)

    def _save(self) -> None:
        """Write the counts, and lines that could not be written before, for the next driver."""
        self.members.save(clock.now())
        self.progress.write()
        self.rewards.flush()

    def _recommend_rollouts(self, status: DriverStatus) -> None:
        """Update the number of rollouts that the elastic policy recommends."""
        loaded = [each for each in self.members.statuses("rollout") if int(each.get("version", -1)) >= 0]
        self.elastic.update(
            status.rollouts,
            running=sum(int(each.get("running", 0)) for each in loaded),
            slots=sum(int(each.get("slots", 0)) for each in loaded),
            queued=status.queue.ready,
            step=status.step,
            lag=status.staleness.start,
            now=clock.now(),
        )

    async def _watch_step(self) -> None:
        """Update the progress of the current step periodically."""
        while True:
            self._step_progress = await self._step_watch.observe()
            if self.progress.done >= self.progress.steps and self.lives.closed is None:
                self.lives.closed = clock.now()
            await asyncio.sleep(STEP_WATCH_S)

    async def _log_progress(self) -> None:
        await log_progress(lambda: self.status().words)

    def _flow(self) -> InFlight | None:
        newest = self.versions.newest
        if newest is None or self.phase != "Running" or self.rewards.paused:
            return None
        return InFlight(
            published=newest,
            dispatched=self.assignment.dispatched,
            running=self.assignment.running,
        )

    def _supply(self) -> Supply:
        steps, stats = self.progress.step_seconds(), self._stats
        return Supply(
            rates=self.members.sample_rates(),
            need=self.progress.samples_needed(),
            ready=stats.ready.get(f"{TRAIN}/train", 0) if stats is not None else 0,
            version_s=statistics.fmean(steps) * self.schedule.sync_every if steps else None,
        )

    def _evaluated(self, result: EvaluationResult) -> None:
        self.progress.evaluated(result, at=clock.now())
        self._samples.evaluated(result.step)
        self.sinks.notify()
        log.info("evaluated θ_%d: %s", result.step, result.words)
        self.changes.notify()

    def _finished(self, serial: int) -> bool:
        first = self.assignment.finish(serial)
        self.changes.notify()
        return first

    def _late(self, serial: int) -> tuple[int, int] | None:
        return self.assignment.late(serial, alike=self.schedule.window)

    def _exclude(self, serial: int) -> bool:
        first = self.assignment.exclude(serial)
        self.changes.notify()
        return first

    def _first_dispatch(self) -> None:
        self._progressed_at = clock.now()
        if self.lives.opened is None:
            self.lives.opened = self._progressed_at
            self.progress.note(FIRST_DISPATCH, at=self.lives.opened)

    async def _put_prompts(self, request: PutPrompts, _frames: Sequence[memoryview]) -> PromptsThere:
        try:
            return PromptsThere(await asyncio.to_thread(self._dispatcher.prompts.take, request))
        finally:
            self.changes.notify()

    async def _report(self, report: TrainReport, _frames: Sequence[memoryview]) -> ReportReply:
        self._progressed_at = clock.now()
        line = line_of(report, at=self._progressed_at, components=self._groups.components.of(report.step))
        known = self.progress.knows(report.step, attempt=report.attempt)
        again = self.progress.step(line)
        if again and self._evaluation is not None:
            self._evaluation.restart()
        self._samples.trained(report.step)
        self.sinks.notify()
        self.rewards.forget(report.step)
        self.members.observe(clock.now())
        if not known:
            count_step(self.metrics, line)
            self.elastic.step(line)
        self.lives.closed = self._progressed_at if report.step >= self.schedule.steps else None
        self.changes.notify()
        return ReportReply()
