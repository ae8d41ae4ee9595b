"""Checkpoints: folders that are complete or ignored, and the checkpoint with the best evaluation, which is kept.

    checkpoints/attempt                     the newest attempt that may write here
    checkpoints/step-000010/...             files of the backend, and earlier versions that are still needed
    checkpoints/step-000010/rank-0001/...   files of the other ranks of a gang
    checkpoints/step-000010/manifest.json   written last, by rank 0
    checkpoints/best.json                   step, figure and value; step 0 is the model at the start of the run

Files are written into a temporary folder and synced, the folder is renamed, and then ``manifest.json`` is renamed into
it. If the ranks of a gang share the folder, each writes, syncs and digests its own files; otherwise rank 0 writes all
of them. The driver evaluates, and its ``Directives`` contain the best version that it knows and the step up to which
all evaluations are decided. The trainer has a checkpoint of each evaluated version, and records the best of them in
``best.json``.

Invariants: the last rename is the commit point. A folder without a manifest is not a checkpoint, whatever it contains;
a folder with a manifest has files of exactly the listed sizes and digests. A trainer of an older attempt writes no
checkpoint. A write that fails on one rank fails on all ranks, commits nothing, and may be retried. The best version was
evaluated and has a complete checkpoint, unless it is θ_0. A checkpoint whose evaluation is not decided is kept. The
record of the best survives restarts of trainer and driver: a restarted driver that has lost earlier evaluations
replaces the best only by a better one.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import msgspec
import numpy as np

from asyncflow.durable import make_folder, sync, write_whole
from asyncflow.errors import AsyncFlowError, CheckpointError, DiskError, Fenced, ManifestError
from asyncflow.rpc.membership import Best, Directives
from asyncflow.training.ranks import ProcessGroup, SingleProcess, gather_bytes, jointly

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_ATTEMPT = "attempt"
_RANK = "rank-"
_FORMAT = 1
_CHUNK = 1 << 24

BEST = "best.json"


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a checkpoint: its relative path, size in bytes, and digest."""

    path: str
    size: int
    sha256: str


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Manifest of a checkpoint.

    step: its weights are θ_step, from trainer ``attempt``; samples: number trained in steps 1..step; carried: steps of
    the earlier versions in it, oldest first; saved_at: unix time.
    """

    attempt: int
    step: int
    samples: int
    carried: list[int] = []
    saved_at: float = 0.0
    files: list[StoredFile] = []
    format: int = _FORMAT


class Checkpoint(msgspec.Struct, frozen=True):
    """A complete checkpoint: its folder and its manifest."""

    folder: Path
    manifest: CheckpointManifest

    def verify(self, *, read: Callable[[int], None] = lambda _: None, rank: int = 0, world: int = 1) -> None:
        """Verify all files, or one rank's share of the files among ``world`` ranks, against the manifest.

        read: called with the number of bytes read each time. Raises CheckpointError at the first file that has changed.
        """
        for file in self.manifest.files[rank::world]:
            path = self.folder / file.path
            if not path.is_file() or path.stat().st_size != file.size or _digest(path, read) != file.sha256:
                raise CheckpointError(
                    f"{file.path} is missing or not as it was written ({file.size} bytes)",
                    where=str(self.folder),
                    hint="The disk has lost or changed it. Move this folder away to resume from an older checkpoint",
                )


class Checkpoints:
    """The checkpoints of one job in ``folder``.

    group: the ranks that write together; each calls ``claim`` and ``write`` at the same point. The default is this
    process alone. shared: whether all ranks can access the folder of rank 0, known after ``claim``.

    The newest ``keep`` checkpoints are kept, and those that ``also`` selects from the steps of all checkpoints.
    """

    def __init__(self, folder: Path, *, keep: int = 2, also: Callable[[list[int]], set[int]] | None = None) -> None:
        self.folder = folder
        self.shared = True
        self.group: ProcessGroup = SingleProcess()
        self._keep = max(1, keep)
        self._also = also
        self._handled = 0
        self._draft: Path | None = None

    def progress(self) -> int:
        """Return a number that changes while a checkpoint is written or read; for another thread, may block."""
        draft, written = self._draft, 0
        if draft is not None:
            with contextlib.suppress(OSError):
                written = sum(file.stat().st_size for file in draft.rglob("*"))
        return self._handled + written

    def handled(self, bytes_: int) -> None:
        """Record that ``bytes_`` more bytes were synced or read."""
        self._handled += bytes_

    def claim(self, attempt: int) -> None:
        """Fence all older attempts, and determine whether all ranks can access the folder.

        Raises Fenced if a newer attempt has claimed the folder, DiskError if rank 0 cannot write, CheckpointError if
        the file of the newest attempt is damaged.
        """
        with jointly(self.group, what="claiming the checkpoints"):
            if self.group.rank == 0:
                try:
                    make_folder(self.folder)
                    self._check(attempt)
                    write_whole(self.folder / _ATTEMPT, str(attempt).encode())
                except OSError as error:
                    raise _unwritable(self.folder, error) from error
        seen = False
        with contextlib.suppress(OSError):
            seen = self.newest_attempt() == attempt
        self.shared = bool(self.group.gather(np.array([seen]), what="access to the checkpoints").all())

    def latest(self) -> Checkpoint | None:
        """Return the complete checkpoint of the highest step, or None; incomplete folders are ignored."""
        complete = self._complete()
        return complete[-1] if complete else None

    def at(self, step: int) -> Checkpoint:
        """Return the complete checkpoint of ``step``. Raises DiskError if it cannot be read."""
        return _read(_folder(self.folder, step) / MANIFEST)

    def write(self, manifest: CheckpointManifest, *fill: Callable[[Path], None]) -> Checkpoint:
        """Write a checkpoint with the functions ``fill``, and commit it; blocks until it is on disk.

        Each function writes into the folder that it receives, which is empty and this rank's own; if the ranks share no
        folder, only rank 0's exists. A function may be collective: no rank starts one before all have finished the
        previous one. Fills in ``manifest.files`` and ``saved_at``. Raises Fenced for an attempt that has been replaced,
        and DiskError if a disk is full or not writable; then nothing is committed and no files remain.
        """
        final, group = _folder(self.folder, manifest.step), self.group
        process = group.gather(np.array([os.getpid()]), what="the checkpoint's draft")[0, 0]
        draft = self.folder / f".step-{manifest.step:06d}.{manifest.attempt}.{process}"
        own = draft / f"{_RANK}{group.rank:04d}" if group.rank else draft
        writes = group.rank == 0 or self.shared
        try:
            with self._writing(final, what="the checkpoint's folder"):
                if group.rank == 0:
                    self._check(manifest.attempt)
                    shutil.rmtree(draft, ignore_errors=True)
                    draft.mkdir(parents=True)
            self._draft = draft
            files: list[StoredFile] = []
            with self._writing(final, what="the ranks' folders"):
                if writes:
                    own.mkdir(exist_ok=True)
            for write_files in fill:
                with self._writing(final, what="the checkpoint's files"):
                    write_files(own)
            with self._writing(final, what="the sync of the checkpoint's files"):
                if writes:
                    files = _stored(draft, own, self.handled)
            gathered = gather_bytes(group, msgspec.json.encode(files), what="the checkpoint's files")
            files = [file for part in gathered for file in msgspec.json.decode(part, type=list[StoredFile])]
            manifest = msgspec.structs.replace(manifest, files=files, saved_at=time.time())
            with self._writing(final, what="the checkpoint's commit"):
                if group.rank == 0:
                    self._commit(manifest, draft, final)
        finally:
            self._draft = None
            if group.rank == 0:
                shutil.rmtree(draft, ignore_errors=True)
        if group.rank == 0:
            self.prune(manifest.attempt)
            log.info("checkpoint of step %d written to %s", manifest.step, final)
        return Checkpoint(final, manifest)

    @contextlib.contextmanager
    def _writing(self, final: Path, *, what: str) -> Iterator[None]:
        """Raise the error of any rank on all ranks, an OSError as a DiskError."""
        with jointly(self.group, what=what):
            try:
                yield
            except OSError as error:
                raise _unwritable(final, error) from error

    def _commit(self, manifest: CheckpointManifest, draft: Path, final: Path) -> None:
        if self.group.world > 1:
            sync(draft)
        self._replace(final, draft)
        try:
            sync(self.folder)
            self._check(manifest.attempt)
            write_whole(final / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        except OSError:
            self._undo(final, attempt=manifest.attempt)
            raise

    def newest_attempt(self) -> int | None:
        """Return the newest attempt that has claimed the folder, or None. Raises CheckpointError."""
        path = self.folder / _ATTEMPT
        try:
            return int(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            hint = "Make sure that no other trainer of this run is active, and remove this file"
            raise CheckpointError("the newest attempt is not a number", where=str(path), hint=hint) from error

    def _check(self, attempt: int) -> None:
        newest = self.newest_attempt()
        if newest is not None and newest > attempt:
            raise Fenced(f"attempt {attempt} of the trainer was replaced by attempt {newest}", where=str(self.folder))

    def _complete(self) -> list[Checkpoint]:
        found = [_read(path) for path in self.folder.glob(f"step-*/{MANIFEST}")]
        return sorted(found, key=lambda checkpoint: checkpoint.manifest.step)

    def _replace(self, final: Path, draft: Path) -> None:
        """Rename ``draft`` to ``final``, after removing the folder of an older attempt, its manifest first."""
        (final / MANIFEST).unlink(missing_ok=True)
        if final.exists():
            sync(final)
            shutil.rmtree(final)
        draft.rename(final)

    def _undo(self, final: Path, *, attempt: int) -> None:
        """Remove a folder of this attempt whose manifest may have been renamed already, its manifest first."""
        with contextlib.suppress(OSError, Fenced):
            self._check(attempt)
            (final / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(final)

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints in ascending order."""
        return [each.manifest.step for each in self._complete()]

    def prune(self, attempt: int) -> None:
        """Remove checkpoints that are not kept, and incomplete folders; after an error the next call tries again."""
        try:
            self._check(attempt)
            complete = self._complete()
            also = self._also([each.manifest.step for each in complete]) if self._also is not None else ()
            for old in complete[: -self._keep]:
                if old.manifest.step not in also:
                    (old.folder / MANIFEST).unlink()
            for folder in (*self.folder.glob("step-*"), *self.folder.glob(".step-*")):
                if not (folder / MANIFEST).exists():
                    shutil.rmtree(folder)
        except (OSError, AsyncFlowError) as error:
            log.warning("older checkpoints cannot be removed: %s", error)


def _folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def _read(path: Path) -> Checkpoint:
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=CheckpointManifest)
    except OSError as error:
        raise DiskError(f"the manifest cannot be read: {error}", where=str(path)) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"the manifest cannot be read: {error}",
            where=str(path),
            hint="Move this folder away to resume from an older checkpoint",
        ) from error
    if manifest.format != _FORMAT:
        raise CheckpointError(
            f"format {manifest.format} is not {_FORMAT}",
            where=str(path),
            hint="Resume with the version that wrote it",
        )
    return Checkpoint(path.parent, manifest)


def _stored(draft: Path, folder: Path, handled: Callable[[int], None]) -> list[StoredFile]:
    """Sync all files in ``folder`` except the folders of other ranks; return them with paths relative to ``draft``.

    handled: called with the number of bytes synced or read each time.
    """
    found = [path for path in folder.rglob("*") if not path.relative_to(folder).parts[0].startswith(_RANK)]
    files = sorted(path for path in found if path.is_file())
    readable = stat.S_IMODE(folder.stat().st_mode) & 0o666
    for path in files:
        path.chmod(readable)  # by whom the folder is; safetensors gives access to the owner only
        sync(path)
        handled(path.stat().st_size)
    for path in (*(path for path in found if path.is_dir()), folder):
        sync(path)
    return [
        StoredFile(path=str(path.relative_to(draft)), size=path.stat().st_size, sha256=_digest(path, handled))
        for path in files
    ]


def _digest(path: Path, read: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            read(len(chunk))
    return digest.hexdigest()


def _unwritable(path: Path, error: OSError) -> DiskError:
    return DiskError(
        f"the checkpoint cannot be written: {error.strerror or error}",
        where=str(path),
        hint="Free space, or use a folder that this process may write to",
    )


class BestCheckpoints:
    """Decides which checkpoints are kept because of their evaluations. ``best``: the best so far, or None.

    by: name of the compared figure; evaluates: returns whether θ_step is evaluated; directives: returns the driver's
    latest directives.
    """

    def __init__(
        self, folder: Path, *, by: str, evaluates: Callable[[int], bool], directives: Callable[[], Directives]
    ) -> None:
        self._folder = folder
        self._by = by
        self._evaluates = evaluates
        self._directives = directives
        found = read_best(folder)
        self.best = found if found is not None and found.by == by else None

    def keeps(self, steps: Collection[int]) -> set[int]:
        """Return the steps of complete checkpoints to keep. Raises OSError if the best cannot be recorded."""
        directives = self._directives()
        candidate, known = directives.best, {0, *steps}
        if self.best is not None and self.best.step not in known:
            log.warning("the checkpoint of θ_%d, the best so far, no longer exists", self.best.step)
            self.best = None
        better = candidate is not None and (self.best is None or candidate.value > self.best.value)
        if candidate is not None and better and candidate.by == self._by and candidate.step in known:
            write_whole(self._folder / BEST, msgspec.json.format(msgspec.json.encode(candidate), indent=1))
            self.best = candidate
            log.info("θ_%d is the best so far: %s %.4g", candidate.step, candidate.by, candidate.value)
        undecided = {step for step in steps if step > directives.judged and self._evaluates(step)}
        return undecided | ({self.best.step} if self.best is not None else set())


def read_best(folder: Path) -> Best | None:
    """Return the best version recorded in the folder of the checkpoints; None if there is none or it is unreadable."""
    file = folder / BEST
    try:
        return msgspec.json.decode(file.read_bytes(), type=Best)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        log.warning("%s cannot be read, so the best checkpoint is unknown: %s", file, error)
        return None


def find_checkpoint(checkpoints: Checkpoints, which: str) -> tuple[int, Checkpoint | None]:
    """Return the step that ``newest``, ``best`` or a number refers to, and its checkpoint, None for θ_0.

    Raises ManifestError if there is none, CheckpointError if it cannot be read.
    """
    where, steps = str(checkpoints.folder), checkpoints.steps()
    if which == "newest":
        step = max(steps, default=-1)
    elif which == "best":
        best = read_best(checkpoints.folder)
        step = best.step if best is not None else -1
    else:
        step = int(which)
    if step in steps:
        return step, checkpoints.at(step)
    if step == 0:
        return step, None
    hint = "Use another run, or step 0, the model at the start of the run"
    if steps:
        hint = f"Use newest, or a step that has a checkpoint: {', '.join(map(str, steps))}"
    if which == "best":
        what = "no checkpoint is known to be the best: only a run with storage.checkpoints.keepBest says so"
        raise ManifestError(what, where=where, hint=hint)
    what = f"there is no checkpoint of step {step}" if step > 0 else "there is no checkpoint yet"
    raise ManifestError(what, where=where, hint=hint)
