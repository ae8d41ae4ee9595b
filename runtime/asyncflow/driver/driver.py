"""The driver: wires data, admission, groups, evaluation and progress to the queue and the catalogue of versions.

Its loops share one bell (``Wake``) and look at levels: what is published, dispatched, trained, evaluated. Its durable
state is the ledger, the checkpoint, its own two files of lines, ``lives.json`` and ``rewards.json``; a driver that is
killed starts again from those.

Invariants: what a loop does is a function of levels, so it may be ended and begun again at any point; a driver takes
over before it reads the ledger, so no prompt that a dead one put comes in later; when the job is over is decided in one
place (``ending``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncflow import clock
from asyncflow.api.job import RLJob
from asyncflow.api.status import DriverStatus, Phase, StepProgress
from asyncflow.data.prompter import Prompter
from asyncflow.driver.book import PromptBook
from asyncflow.driver.dispatch import CALL_TIMEOUT_S, Dispatcher
from asyncflow.driver.ending import Ending
from asyncflow.driver.evaluation import Evaluation, EvaluationResult, best_of
from asyncflow.driver.gauges import count_step, show
from asyncflow.driver.groups import GroupPolicy, Groups
from asyncflow.driver.inside import StepWatch, tell
from asyncflow.driver.journal import LIVES, REWARDS, StateFile
from asyncflow.driver.lives import Laps, Lives
from asyncflow.driver.members import Members
from asyncflow.driver.progress import Progress, line_of
from asyncflow.driver.prompts import PromptColumns
from asyncflow.driver.rewards import RewardTally, Totals
from asyncflow.driver.status import build_status, waiting_for
from asyncflow.driver.tasks import EVAL, TRAIN
from asyncflow.driver.versions import Versions
from asyncflow.driver.wake import Wake, persevere
from asyncflow.errors import Refused
from asyncflow.flow.admission import Flow, admission_of
from asyncflow.flow.schedule import Schedule
from asyncflow.net.directory import Directory
from asyncflow.net.rpc import RpcServer
from asyncflow.queue.client.client import QueueClient
from asyncflow.queue.protocol.messages import QueueStats
from asyncflow.telemetry.metrics import DriverMetrics
from asyncflow.train.report import Reported, TrainReport
from asyncflow.weights.service import CatalogueService

log = logging.getLogger(__name__)

PULSE_S = 0.5
REMEMBER_S = 5.0
LOOK_S = 2.0
FULL = 0.8
"""Share of the queue's bytes at which a checkpoint is forced, so that its commit frees them."""


class Driver:
    """One job's driver. ``run`` gives the phase in which the job ended."""

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
        metrics: DriverMetrics,
    ) -> None:
        spec = job.spec
        self.job = job
        self.queue = queue
        self.metrics = metrics
        self.schedule = Schedule.of(spec)
        self.progress = Progress(folder, steps=spec.algorithm.steps, now=clock.now())
        self.book = PromptBook(prompts_per_step=spec.algorithm.prompts_per_step, steps=spec.algorithm.steps)
        self.weights = CatalogueService(server)
        self.wake = Wake()
        done = self.progress.done >= self.progress.steps
        self.lives = Lives(
            opened=self.progress.at("first dispatch"), closed=self.progress.last_step_at if done else None
        )
        self._laps = Laps(self.lives)
        self.members = Members(
            directory,
            queue=queue,
            weights=self.weights,
            lives=self.lives,
            memory=folder / LIVES,
            started=self.progress.now,
            changed=self.wake.tell,
        )
        self.phase: Phase = "Starting"
        self._stats: QueueStats | None = None
        self._inside: StepProgress | None = None
        self._watch = StepWatch(
            queue, members=self.members, samples=spec.algorithm.prompts_per_step * spec.algorithm.group_size
        )
        self._full_at = -1
        self._moved = clock.now()
        self._dispatcher = Dispatcher(
            queue=queue,
            prompts=PromptColumns.of(spec, prompter=train_prompts, what="prompt"),
            book=self.book,
            schedule=self.schedule,
            policies=admission_of(spec),
            group_size=spec.algorithm.group_size,
            flow=self._flow,
            changed=self.wake.changed,
            on_first=self._first_dispatch,
            on_skip=self.metrics.prompts_skipped.inc,
        )
        kept = StateFile(folder / REWARDS)
        self.rewards = RewardTally(
            needed=spec.algorithm.prompts_per_step * spec.algorithm.group_size,
            keep=kept.write,
            timeouts_fail=spec.reward.on_timeout == "drop",
        )
        self.rewards.restore(kept.read(Totals))
        metrics.watch_rewards(self.rewards.outcomes)
        self._groups = Groups(
            queue=queue,
            policy=GroupPolicy.of(spec),
            rewards=self.rewards,
            finished=self._finished,
            excluded=self._exclude,
        )
        self.versions = Versions(
            catalogue=self.weights.catalogue,
            schedule=self.schedule,
            book=self.book,
            progress=self.progress,
            evaluates=spec.evaluation is not None,
        )
        self._evaluation = Evaluation.of(
            spec,
            queue=queue,
            rewards=self.rewards,
            prompters=eval_prompts,
            steps=self.schedule.evaluations(),
            due=self.versions.due,
            changed=self.wake.changed,
            finished=self._evaluated,
        )
        self._ending = Ending(
            folder=folder,
            queue=queue,
            progress=self.progress,
            members=self.members,
            wake=self.wake,
            unevaluated=self.versions.unevaluated,
            suspending=lambda: self.phase == "Suspending",
            export_s=spec.limits.stall_seconds,
            stop_s=spec.limits.stop_seconds,
            devices=spec.devices,
            rewards=self.rewards,
            prompts_skipped=lambda: self._dispatcher.skipped,
        )
        server.route("driver.report", TrainReport, self._report)

    async def run(self) -> Phase:
        """Drive the job to its end: Succeeded or Suspended."""
        queue = self.job.spec.transfer_queue
        needed = Counter(controller=queue.controllers, storage=queue.storage_units)
        await self.members.gather(needed, changed=self.wake.changed, within_s=self.job.spec.limits.start_seconds)
        await self._restore()
        self.phase, self._moved = "Running", clock.now()
        loops = {
            "dispatching": self._dispatcher.run,
            "replacing lost samples": self._dispatcher.replace_lost,
            "advantages": self._groups.run,
            "the pulse": self._pulse,
            "progress": self._look_inside,
            "the log": self._tell,
        }
        if self._evaluation is not None:
            loops |= {
                "evaluations": self._evaluation.put_due,
                "counting evaluations": self._evaluation.count,
                "replacing lost evaluations": self._evaluation.replace_lost,
            }
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(persevere(loop, what=what), name=what) for what, loop in loops.items()]
            self.phase = await self._ending.reached()
            for task in tasks:
                task.cancel()
        return self.phase

    async def conclude(self) -> None:
        """Write the summary, then tell everybody to stop and wait until they have left."""
        await self._ending.conclude(self.phase)

    def status(self) -> DriverStatus:
        """Return what ``GET /v1/status`` answers."""
        newest = self.versions.newest
        return build_status(
            self.progress,
            phase=self.phase,
            attempt=self.members.trainer_attempt,
            newest=newest,
            version_bytes=self.versions.nbytes,
            transfer_seconds=self.members.transfer_seconds,
            rollouts=self.members.rollouts(newest=newest, lag=self.schedule.lag),
            stats=self._stats,
            checkpoint=self._ending.checkpoint,
            best=self.members.kept_best,
            idle_share=self.lives.idle_shares(clock.now()),
            recent=self._laps.recent(),
            rewards=self.rewards.state,
            prompts_skipped=self._dispatcher.skipped,
            inside=self._inside if self._inside and self._inside.step == self.progress.done + 1 else None,
            clock_ahead_s=clock.ahead(),
            waiting_for=self.rewards.paused
            or waiting_for(
                self.progress,
                spec=self.job.spec,
                members=self.members.counts,
                newest=newest,
                evaluating=self.versions.unevaluated(),
                exported=self.members.exported,
                stats=self._stats,
                quiet_s=clock.now() - self._moved,
            ),
        )

    def drain(self, worker: str) -> None:
        """Let a rollout hand back its work and leave. Raises StaleHandle for an unknown one."""
        self.members.drain(worker)

    def checkpoint(self) -> None:
        """Request a checkpoint from the trainer at the next step boundary."""
        self.members.ask_for_checkpoint()

    def suspend(self) -> None:
        """Checkpoint, then end; the run can be resumed. Raises Refused before the job is under way."""
        if self.phase == "Starting":
            raise Refused(
                "the job is not under way yet", where="suspend", hint="Ask again when /v1/status says Running."
            )
        if self.phase in ("Running", "Paused"):
            self.phase = "Suspending"
            self.progress.note("suspend", at=clock.now())
            self.checkpoint()
            self.wake.tell()

    def resume(self) -> None:
        """Go on after a pause. Raises Refused where the job is not paused."""
        if self.phase != "Paused":
            raise Refused(f"the job is not paused but {self.phase.lower()}", where="resume")
        self.rewards.resume()
        self.phase = "Running"
        self.progress.note("resume", at=clock.now())
        self.wake.tell()

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
        self.book.restore(snapshot)
        size = self.job.spec.algorithm.group_size
        self._groups.filtered.update({step: state.filtered // size for step, state in snapshot.steps.items()})
        self.progress.begin_at(snapshot.last_staged_step, attempt=snapshot.attempt)
        self._ending.note_commit(snapshot.last_committed_step)
        await self._dispatcher.recall()
        await self.queue.clear_partition(partition=EVAL, timeout=CALL_TIMEOUT_S)

    async def _pulse(self) -> None:
        committed, remembered = -1, 0.0
        while True:
            self.members.observe(clock.now())
            if self.rewards.paused and self.phase == "Running":
                self._pause()
            if time.monotonic() - remembered > REMEMBER_S:
                remembered = time.monotonic()
                self.members.remember(clock.now())
                self.progress.write()
                self.rewards.flush()
            self.weights.require(self.versions.required())
            if by := self.job.spec.storage.checkpoints.keep_best:
                self.members.judged = self.versions.judged()
                self.members.best = best_of(self.progress.evaluations, by=by)
            stats = self._stats = await self.queue.stats(timeout=CALL_TIMEOUT_S)
            if stats.committed != committed:
                await self._ending.committed()
                committed = stats.committed
            if (
                stats.limit
                and stats.bytes > FULL * stats.limit
                and stats.staged
                and self._full_at != self.progress.done
            ):
                log.warning("the queue is %.0f%% full: asking for a checkpoint", 100 * stats.bytes / stats.limit)
                self._full_at = self.progress.done
                self.checkpoint()
            show(self.metrics, self.status(), stats=stats, members=self.members.counts)
            self.wake.tell()
            await asyncio.sleep(PULSE_S)

    async def _look_inside(self) -> None:
        """Look into the step that is being made."""
        while True:
            step = self.progress.done + 1
            self._inside = await self._watch.look(step) if step <= self.progress.steps else None
            await asyncio.sleep(LOOK_S)

    async def _tell(self) -> None:
        await tell(lambda: self.status().words)

    def _flow(self) -> Flow | None:
        newest = self.versions.newest
        if newest is None or self.phase != "Running" or self.rewards.paused:
            return None
        return Flow(
            published=newest,
            dispatched=self.book.dispatched,
            running=self.book.running,
        )

    def _evaluated(self, result: EvaluationResult) -> None:
        self.progress.evaluated(result, at=clock.now())
        log.info("evaluated θ_%d: %s", result.step, result.words)
        self.wake.tell()

    def _finished(self, serial: int) -> None:
        self.book.finish(serial)
        self.wake.tell()

    def _exclude(self, serial: int) -> None:
        self.book.exclude(serial)
        self.wake.tell()

    def _first_dispatch(self) -> None:
        self._moved = clock.now()
        if self.lives.opened is None:
            self.lives.opened = self._moved
            self.progress.note("first dispatch", at=self.lives.opened)

    async def _report(self, report: TrainReport, _frames: Sequence[memoryview]) -> Reported:
        self._moved = clock.now()
        line = line_of(report, at=self._moved)
        again = self.progress.step(line)
        if again and self._evaluation is not None:
            self._evaluation.begin_anew()
        count_step(self.metrics, line)
        self.rewards.forget(report.step)
        self.members.observe(clock.now())
        self._laps.step(line)
        self.lives.closed = self._moved if report.step >= self.schedule.steps else None
        self.wake.tell()
        return Reported()
