"""Checkpoints of one rank, written in the background during training.

    between two steps       copy θ_k and the optimizer state (compute thread)
    during the next steps   ledger on disk -> files of all ranks -> manifest (the commit point) -> queue.commit(k)

Invariants: at most one checkpoint is written at a time, and the next starts after its end, so a slow disk delays
training and copies never accumulate. The steps of a checkpoint are in the ledger on disk before the manifest is
renamed, and the ledger records the commit afterwards. A disk error postpones a checkpoint, for DISK_S seconds at most.
If ranks share no folder, training waits until rank 0 has written everything.
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
_RETRY_S = 1.0
DISK_S = 300.0
"""Time for which checkpoints may fail because of the disk before the trainer ends, in seconds."""


class Saver:
    """Writes the checkpoints that the trainer requests.

    compute: the trainer's compute thread; leaving: set when the trainer begins to leave; failed: called for each
    checkpoint that failed because of the disk; saved: called with the duration of each written checkpoint in seconds.
    committed: step of the newest complete checkpoint; newest: the same, or the step of the checkpoint being written.
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
        self._retry_at = 0.0

    @property
    def saving(self) -> bool:
        """True while a checkpoint is being written."""
        return self._saving is not None and not self._saving.done()

    @property
    def retry_in_s(self) -> float | None:
        """Seconds until a checkpoint that failed because of the disk is retried, None if there is none."""
        if self.saving or self._failing_since is None:
            return None
        return max(0.0, self._retry_at - time.monotonic())

    def resumed(self, step: int) -> None:
        """Record that the trainer starts at ``step``, whose checkpoint exists."""
        self.committed = self.newest = step

    async def begin(self, step: int, *, samples: int) -> None:
        """Start to write a checkpoint of θ_step, the current state. Collective.

        Returns when the state may change; if another checkpoint is being written, waits for its end first. samples:
        number of samples trained so far. Raises the errors of ``finished``.
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
        """Wait until no checkpoint is being written.

        Raises Fenced for an attempt that has been replaced, CheckpointError if the disk has failed for too long,
        DeadlineExceeded if a rank is lost.
        """
        if self._saving is not None:
            await asyncio.wait([self._saving])
            self.check()

    def check(self) -> None:
        """Raise the error of the last checkpoint if it has ended with one."""
        if self._saving is not None and self._saving.done():
            self._saving.result()

    async def save_and_leave(self, step: int, *, samples: int) -> None:
        """Write a checkpoint of θ_step with all ranks that leave, unless it exists.

        Ranks wait ``leave_s`` for each other; if one is lost, nothing is written.
        """
        group = self._checkpoints.group
        group.limit_patience(patience_s=self._settings.leave_s)
        try:
            await self.finished()
            if step == self.committed:
                return
            barrier = partial(group.gather, np.zeros(1), what=f"the ranks that save θ_{step}")
            await asyncio.get_running_loop().run_in_executor(self._compute, barrier)
            await self.begin(step, samples=samples)
            await self.finished()
        except DeadlineExceeded as error:
            log.error("no checkpoint of step %d can be written, because a rank is lost: %s", step, error)

    async def close(self) -> None:
        """Wait until the current checkpoint is written, or until the wait for a lost rank times out."""
        self._checkpoints.group.limit_patience(patience_s=self._settings.leave_s)
        if self.saving and self._saving is not None:
            await asyncio.wait([self._saving])
            if error := self._saving.exception():
                log.error("the checkpoint of step %d was not written: %s", self.newest, error)
        self._thread.shutdown(wait=False)

    async def _save(
        self, manifest: CheckpointManifest, write: Callable[[Path], None], versions: dict[int, Tensors]
    ) -> None:
        started = time.monotonic()
        # Without a common folder writing is collective, and torch's collectives must run in the compute thread.
        thread = self._thread if self._checkpoints.shared else self._compute
        saving = partial(self._write, manifest, write, versions, unsynced=await self._sync())
        try:
            with self._spans.background("checkpoint", step=manifest.step, version=manifest.step):
                await asyncio.get_running_loop().run_in_executor(thread, saving)
        except DiskError as error:
            self.newest = self.committed
            self._postpone(manifest.step, error)
            return
        self._failing_since = None
        self.committed = manifest.step
        self._saved(time.monotonic() - started)
        if self._checkpoints.group.rank == 0:
            await self._commit(manifest.step)

    async def _sync(self) -> DiskError | None:
        """Sync the ledger to disk; return the error if that fails.

        A trainer that leaves waits for that only briefly, and otherwise writes no checkpoint. The run would fail with a
        checkpoint newer than the ledger on disk; a missing checkpoint only costs the steps since the last one.
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
        """Write this rank's part of an older version, or all of it if only rank 0 can access the folder."""
        first, shared = self._checkpoints.group.rank == 0, self._checkpoints.shared
        # Rank 0 has the full tensors of versions that it read from a checkpoint that no other rank can access.
        if not shared and step >= self._publication.began_at:
            probe = {name: tensor for name, tensor in slices.items() if is_probe(name)}
            weights = {name: tensor for name, tensor in slices.items() if name not in probe}
            slices = {**{name: array for name, array in self._backend.full_tensors(weights) if first}, **probe}
        if shared or first:
            Publication.save(folder, step, slices, rank=self._checkpoints.group.rank)

    async def _commit(self, step: int) -> None:
        """Notify the queue of a checkpoint; an unreachable queue learns of it when the next attempt starts."""
        commit: Callable[[], Awaitable[None]] = partial(
            self._queue.commit,
            partition=self._settings.partition,
            attempt=self._settings.attempt,
            step=step,
            timeout=_CALL_S,
        )
        committed = retry(commit, what=f"committing step {step}", timeout=self._settings.patience_s)
        try:
            await unless_leaving(committed, self._leaving)
        except GroupLeft:
            log.info("the queue was not notified of the checkpoint of step %d, because the trainer leaves", step)

    def _postpone(self, step: int, error: AsyncFlowError) -> None:
        now = time.monotonic()
        self._failed()
        since = self._failing_since = self._failing_since or now
        if now - since > DISK_S:
            what = f"no checkpoint could be written for {now - since:.0f} s: {error.what}"
            raise CheckpointError(what, where=error.where, hint=error.hint) from error
        self._retry_at = now + max(_RETRY_S, (now - since) / 4)
        outcome = "is not written, because the trainer leaves" if self._leaving.is_set() else "will be retried"
        log.error("the checkpoint of step %d %s: %s", step, outcome, error)
