"""End of a job: when it has come, and what is done then.

A run succeeds when its last weights are safe and known to be: they are in a checkpoint, every evaluation that is still
possible is recorded, and the trainer has written what the run leaves behind. It is suspended when the newest step is in
a checkpoint. Only then is anybody told to stop. A job that is paused reaches no further step, so it is suspended at
once: a trainer that is told to stop writes a checkpoint of the last step that it finished.

Invariant: nothing that a success promises is still being written when it is declared; each wait for it is one that
``/v1/status`` names, and the last has a deadline.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from asyncflow import clock
from asyncflow.api.status import Phase
from asyncflow.driver.dispatch import CALL_TIMEOUT_S
from asyncflow.driver.journal import SUMMARY, write_whole
from asyncflow.driver.members import Members
from asyncflow.driver.progress import Progress
from asyncflow.driver.rewards import RewardTally
from asyncflow.driver.summary import summarize
from asyncflow.driver.tasks import TRAIN
from asyncflow.driver.wake import Wake
from asyncflow.errors import DeadlineExceeded, PeerLost
from asyncflow.queue.client.client import QueueClient

HEAR_S = 2.0
"""Seconds for which a last heartbeat is waited for, so that the figures of the last second count too."""


@dataclass(kw_only=True)
class Ending:
    """Waits for the end of one job and concludes it.

    unevaluated: gives the versions whose evaluation is still to come; suspending: whether the job is to be suspended;
    export_s: how long the trainer may take from the last commit to the end of its export; stop_s: how long the others
    have to leave; devices: that the job uses; prompts_skipped: gives how many were too long.
    checkpoint: step of the newest commit and when it was first seen, by ``clock.now``.
    """

    folder: Path
    queue: QueueClient
    progress: Progress
    members: Members
    wake: Wake
    unevaluated: Callable[[], list[int]]
    suspending: Callable[[], bool]
    export_s: float
    stop_s: float
    devices: int
    rewards: RewardTally
    prompts_skipped: Callable[[], int]
    checkpoint: tuple[int, float] | None = field(default=None, init=False)

    async def reached(self) -> Phase:
        """Wait for the end. Raises DeadlineExceeded when the trainer does not get done with its export."""
        asked = self.progress.done
        while True:
            await self.wake.changed()
            trained = self.progress.done >= self.progress.steps
            if trained and not self.unevaluated() and await self.committed():
                await self._exported()
                return "Succeeded"
            if self.suspending() and (self.rewards.paused or await self.committed()):
                return "Suspended"
            if self.suspending() and self.progress.done > asked:
                asked = self.progress.done
                self.members.ask_for_checkpoint()

    async def committed(self) -> bool:
        """Return whether the newest step is in a checkpoint, by the ledger; False while the queue cannot be asked."""
        try:
            snapshot = await self.queue.snapshot(partition=TRAIN, timeout=CALL_TIMEOUT_S)
        except (PeerLost, DeadlineExceeded):
            return False
        self.note_commit(snapshot.last_committed_step)
        return snapshot.last_committed_step >= self.progress.done

    def note_commit(self, step: int) -> None:
        """Take in which step the newest checkpoint holds, 0 for none."""
        if step > 0 and (self.checkpoint is None or step > self.checkpoint[0]):
            self.checkpoint = (step, clock.now())

    async def conclude(self, phase: Phase) -> None:
        """Write the summary, then tell everybody to stop and wait until they have left."""
        if phase == "Succeeded":
            await self.queue.close_partition(partition=TRAIN, step=self.progress.steps, timeout=CALL_TIMEOUT_S)
        audit = await self.queue.audit(timeout=CALL_TIMEOUT_S)
        finished = clock.now()
        await self.members.hear(within_s=HEAR_S)
        self.members.remember(clock.now())
        self.rewards.flush()
        self.progress.note(phase, at=finished)
        summary = summarize(
            self.progress,
            audit=audit,
            phase=phase,
            finished=finished,
            lives=self.members.lives,
            rewards=self.rewards.state,
            devices=self.devices,
            prompts_skipped=self.prompts_skipped(),
            best=self.members.kept_best,
        )
        write_whole(self.folder / SUMMARY, json.dumps(summary, indent=2) + "\n")
        await self.members.dismiss(within_s=self.stop_s)

    async def _exported(self) -> None:
        try:
            async with asyncio.timeout(self.export_s):
                while not self.members.exported:
                    await self.wake.changed()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the trainer did not write export/ within {self.export_s:g} s",
                where="driver",
                hint="Its log says why; the weights are in the newest checkpoint, and the run can be resumed.",
            ) from None
