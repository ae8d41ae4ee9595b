"""Checkpoints of one rank, written beside the training.

    between two steps   copy θ_k and the optimizer aside (compute thread)
    beside the next     ledger on disk -> files of all ranks -> manifest (the commit point) -> queue.commit(k)

Invariant: at most one checkpoint is on its way, and the next begins when it has ended, so a slow disk delays training
and never piles up copies. The ledger has a checkpoint's steps on disk before the manifest gets its name, and hears of
it afterwards. A disk that fails puts a checkpoint off, for DISK_S seconds at most. Where ranks see no common folder,
training waits until rank 0 has written everything.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from asyncflow.errors import AsyncFlowError, CheckpointError, DeadlineExceeded, DiskError, Refused
from asyncflow.rpc.retry import retry
from asyncflow.telemetry.spans import NO_SPANS, Spans
from asyncflow.training.backend import TrainerBackend
from asyncflow.training.checkpoint import CheckpointManifest, Checkpoints
from asyncflow.training.loops import TrainQueue
from asyncflow.training.publication import Publication
from asyncflow.training.ranks import GroupLeft, jointly, unless_leaving
from asyncflow.training.settings import TrainerSettings
from asyncflow.weights.probe import is_probe
from asyncflow.weights.sender import Tensors

log = logging.getLogger(__name__)

_CALL_S = 30.0
_SYNC_S = 10.0
_AGAIN_S = 1.0
DISK_S = 300.0
"""Seconds for which the disk may refuse checkpoints before the trainer ends."""


class Saver:
    """Writes the checkpoints that the trainer asks for.

    compute: the trainer's compute thread; leaving: set once the trainer leaves; failed: called for each checkpoint that
    the disk refused; saved: called for each that was written with the seconds that it took. committed: step of the
    newest checkpoint; newest: that, or the step of the one which is being written.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        *,
        queue: TrainQueue,
        backend: TrainerBackend,
        publication: Publication,
        settings: TrainerSettings,
        compute: ThreadPoolExecutor,
        leaving: asyncio.Event,
        failed: Callable[[], None],
        saved: Callable[[float], None],
        spans: Spans = NO_SPANS,
    ) -> None:
        self.committed = self.newest = 0
        self._checkpoints = checkpoints
        self._queue = queue
        self._backend = backend
        self._publication = publication
        self._settings = settings
        self._compute = compute
        self._leaving = leaving
        self._failed = failed
        self._saved = saved
        self._spans = spans
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._saving: asyncio.Task[None] | None = None
        self._failing_since: float | None = None
        self._again_at = 0.0

    @property
    def saving(self) -> bool:
        """True while a checkpoint is being written."""
        return self._saving is not None and not self._saving.done()

    @property
    def retry_in_s(self) -> float | None:
        """Seconds until a checkpoint that the disk refused is due again, None where none is."""
        if self.saving or self._failing_since is None:
            return None
        return max(0.0, self._again_at - time.monotonic())

    def resumed(self, step: int) -> None:
        """Note that the trainer begins at ``step``, whose checkpoint is there."""
        self.committed = self.newest = step

    async def begin(self, step: int, *, samples: int) -> None:
        """Begin to write a checkpoint of θ_step, the state as it is now; collective.

        Returns when the state may change; where another checkpoint is on its way, that is after its end. samples:
        trained so far. Raises what ``finished`` raises.
        """
        await self.finished()
        shared, carried = self._checkpoints.shared, self._publication.carried(step)
        versions = {number: self._publication.slices(number) for number in carried}
        snapshot = partial(self._backend.snapshot, shared=shared)
        write = await asyncio.get_running_loop().run_in_executor(self._compute, snapshot)
        manifest = CheckpointManifest(attempt=self._settings.attempt, step=step, samples=samples, carried=carried)
        self.newest = step
        self._saving = asyncio.create_task(self._save(manifest, write, versions), name=f"checkpoint of θ_{step}")
        if not shared:
            await self.finished()

    async def finished(self) -> None:
        """Wait until nothing is being written.

        Raises Fenced for an attempt that has been replaced, CheckpointError when the disk has failed for too long,
        DeadlineExceeded where a rank is gone.
        """
        if self._saving is not None:
            await asyncio.wait([self._saving])
            self.check()

    def check(self) -> None:
        """Raise what the checkpoint that ended last failed with."""
        if self._saving is not None and self._saving.done():
            self._saving.result()

    async def save_and_leave(self, step: int, *, samples: int) -> None:
        """Write a checkpoint of θ_step with all ranks that leave, unless there is one.

        Ranks wait ``leave_s`` for one another; where one is gone, nothing is written.
        """
        group = self._checkpoints.group
        group.limit_patience(patience_s=self._settings.leave_s)
        try:
            await self.finished()
            if step == self.committed:
                return
            there = partial(group.gather, np.zeros(1), what=f"who is left to save θ_{step}")
            await asyncio.get_running_loop().run_in_executor(self._compute, there)
            await self.begin(step, samples=samples)
            await self.finished()
        except DeadlineExceeded as error:
            log.error("no checkpoint of step %d can be written, for a rank is gone: %s", step, error)

    async def close(self) -> None:
        """Wait for the end of what is being written, or of the wait for a rank that is gone."""
        self._checkpoints.group.limit_patience(patience_s=self._settings.leave_s)
        if self.saving and self._saving is not None:
            await asyncio.wait([self._saving])
            if wrong := self._saving.exception():
                log.error("the checkpoint of step %d was not written: %s", self.newest, wrong)
        self._thread.shutdown(wait=False)

    async def _save(
        self, manifest: CheckpointManifest, write: Callable[[Path], None], versions: dict[int, Tensors]
    ) -> None:
        began = time.monotonic()
        # Without a common folder writing is collective, and torch's collectives belong into the compute thread.
        thread = self._thread if self._checkpoints.shared else self._compute
        saving = partial(self._write, manifest, write, versions, unsynced=await self._sync())
        try:
            with self._spans.beside("checkpoint", step=manifest.step, version=manifest.step):
                await asyncio.get_running_loop().run_in_executor(thread, saving)
        except DiskError as error:
            self.newest = self.committed
            self._put_off(manifest.step, error)
            return
        self._failing_since = None
        self.committed = manifest.step
        self._saved(time.monotonic() - began)
        if self._checkpoints.group.rank == 0:
            await self._tell(manifest.step)

    async def _sync(self) -> DiskError | None:
        """Sync the ledger to disk; return the error if that fails.

        A trainer that leaves does not wait long for that, and writes no checkpoint without: one that outlived the
        ledger would cost the run, where a missing one costs the steps since the last.
        """
        if self._checkpoints.group.rank > 0:
            return None
        grace_s = self._settings.leave_s
        sync = retry(partial(self._queue.sync, timeout=_SYNC_S), what="syncing the ledger", timeout=_SYNC_S)
        try:
            await unless_leaving(sync, self._leaving, grace_s=grace_s)
        except GroupLeft:
            hint = "Its steps since the last checkpoint are trained again"
            return DiskError(f"the ledger was not on disk within {grace_s:g} s", where="trainer", hint=hint)
        except (Refused, DeadlineExceeded) as error:
            return DiskError(error.what, where=error.where, hint=error.hint)
        return None

    def _write(
        self,
        manifest: CheckpointManifest,
        write: Callable[[Path], None],
        versions: dict[int, Tensors],
        *,
        unsynced: DiskError | None,
    ) -> None:
        with jointly(self._checkpoints.group, what="the ledger's sync"):
            if unsynced is not None:
                raise unsynced

        carry = [partial(self._carry, step=step, slices=slices) for step, slices in versions.items()]
        self._checkpoints.write(manifest, write, *carry)

    def _carry(self, folder: Path, step: int, slices: Tensors) -> None:
        """Write this rank's part of an older version, or all of it where only rank 0 sees the folder."""
        first, shared = self._checkpoints.group.rank == 0, self._checkpoints.shared
        # Of versions that it has read from a checkpoint which the others do not see, rank 0 has all.
        if not shared and step >= self._publication.began_at:
            probe = {name: given for name, given in slices.items() if is_probe(name)}
            weights = {name: given for name, given in slices.items() if name not in probe}
            slices = {**{name: array for name, array in self._backend.whole(weights) if first}, **probe}
        if shared or first:
            Publication.save(folder, step, slices, rank=self._checkpoints.group.rank)

    async def _tell(self, step: int) -> None:
        """Notify the queue of a checkpoint; a queue that is not reached learns of it when the next attempt begins."""
        commit: Callable[[], Awaitable[None]] = partial(
            self._queue.commit,
            partition=self._settings.partition,
            attempt=self._settings.attempt,
            step=step,
            timeout=_CALL_S,
        )
        told = retry(commit, what=f"committing step {step}", timeout=self._settings.patience_s)
        try:
            await unless_leaving(told, self._leaving)
        except GroupLeft:
            log.info("the queue was not told of the checkpoint of step %d, for the trainer leaves", step)

    def _put_off(self, step: int, error: AsyncFlowError) -> None:
        now = time.monotonic()
        self._failed()
        since = self._failing_since = self._failing_since or now
        if now - since > DISK_S:
            what = f"no checkpoint could be written for {now - since:.0f} s: {error.what}"
            raise CheckpointError(what, where=error.where, hint=error.hint) from error
        self._again_at = now + max(_AGAIN_S, (now - since) / 4)
        outcome = "is not written, for the trainer leaves" if self._leaving.is_set() else "is tried again"
        log.error("the checkpoint of step %d %s: %s", step, outcome, error)
