"""The folder of one run: who may write there, and where everything lies.

    DIR/job.yaml  metrics.jsonl  summary.json  ledger/  checkpoints/  logs/<role>-<index>.log
    DIR/run/      lock  token  processes.json         (mode 0700; of the supervisor)

Invariants: at most one supervisor holds a folder, by a lock that ends with its process; a run that is already there is
never written over: it is continued on request (``resume``), or moved aside whole (``fresh``), never deleted. A start
from which nothing came, no step and no evaluation, is no run: the next one takes its place. What a start has not made
is never removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, get_args

import msgspec

from asyncflow.api.names import RoleName
from asyncflow.driver.journal import ASIDE, EVENTS, FILES, METRICS, SUMMARY
from asyncflow.durable import write_whole
from asyncflow.errors import ManifestError
from asyncflow.substrates.local import reaper
from asyncflow.substrates.local.record import load_record

_log = logging.getLogger(__name__)

JOB = "job.yaml"
QUEUE = "queue.yaml"
"""Names of the manifest in a folder, of a run and of a queue that stands alone."""
LEAST_FREE = 16 << 20
"""Bytes that must be free where a run begins: its logs, its ledger and its first checkpoint would not fit into less."""

_RUN_ENTRIES = (*(JOB, QUEUE, "ledger", "checkpoints"), *FILES, *(f"{name}{ASIDE}" for name in FILES))
"""Entries that make a folder one that holds a run: nothing of this is there when a run begins in it."""
_SUPERVISORS = ("lock", "token", "processes.json", f"processes.json{ASIDE}", "overrides.json", "reaper.log")
"""Files that the supervisor makes in ``run``."""
_LOG = re.compile(rf"(supervisor|({'|'.join(get_args(RoleName))})-\d+)\.log")
_EVALUATION = b"evaluation"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run's folder, or a queue's, that this process holds the lock of, until ``release``.

    moved_to: where the run is that was here; made: the folders that were created for it, innermost first; own_model:
    whether what lies in ``model`` was made by this run; name: of the file with the manifest.
    """

    path: Path
    lock: int
    moved_to: Path | None = None
    made: tuple[Path, ...] = ()
    own_model: bool = False
    name: str = JOB

    @classmethod
    def claim(cls, path: Path, *, resume: bool = False, fresh: bool = False, name: str = JOB) -> Self:
        """Take ``path`` for a run, creating it where needed. name: of the file for its manifest.

        What a supervisor that was killed there has left running is ended. Raises ManifestError where the folder cannot
        be written, the disk is full, another supervisor holds it, it holds a run and neither ``resume`` nor ``fresh``
        is asked for, or ``resume`` is asked for and there is nothing to continue.
        """
        path = path.absolute()
        held = holds_run(path) and not _came_to_nothing(path)
        if resume and not (path / name).is_file():
            raise ManifestError(
                "there is no run to resume", where=str(path), hint="Leave out --resume, or give its --output"
            )
        if held and not (resume or fresh):
            _check_unused(path)
            hint = "Continue it with --resume, move it aside with --fresh, or give another --output"
            raise ManifestError("the folder already holds a run", where=str(path), hint=hint)
        _check_room(path)
        try:
            moved_to = _move_aside(path) if held and fresh else None
            made = tuple(folder for folder in (path, *path.parents) if not folder.exists())
            lock = _lock(path)
            _end_predecessor(path)
            if not resume and _came_to_nothing(path):
                _clear(path)
            (path / "logs").mkdir(exist_ok=True)
        except OSError as error:
            hint = "Give an --output that can be written"
            raise ManifestError(f"cannot write there: {error.strerror}", where=str(path), hint=hint) from error
        return cls(path, lock, moved_to, made, own_model=not (path / "model").exists(), name=name)

    @property
    def job(self) -> Path:
        """The resolved manifest that the roles read."""
        return self.path / self.name

    @property
    def token(self) -> Path:
        """The bearer token of the driver's POST routes."""
        return self.path / "run" / "token"

    @property
    def processes(self) -> Path:
        """The record of placements."""
        return self.path / "run" / "processes.json"

    @property
    def overrides(self) -> Path:
        """The ``--set`` values of the run, which ``--resume`` applies again."""
        return self.path / "run" / "overrides.json"

    @property
    def summary(self) -> Path:
        """Path of the summary, which the driver writes before it ends."""
        return self.path / SUMMARY

    def log(self, name: str) -> Path:
        """The log of one replica, appended to over its restarts."""
        return self.path / "logs" / f"{name}.log"

    def write_token(self) -> None:
        """Make a new token that only this user can read."""
        write_whole(self.token, secrets.token_urlsafe(32).encode(), mode=0o600)

    def remember(self, overrides: Sequence[str]) -> None:
        """Write down the ``--set`` values of this run. Raises OSError."""
        write_whole(self.overrides, msgspec.json.encode(list(overrides)))

    def release(self, *, undo: bool = False) -> None:
        """Remove the token and let others have the folder.

        undo: this start was refused: unless a run made progress here, remove what the start has made, the folder too,
        and move back the run that it moved aside.
        """
        with contextlib.suppress(OSError):
            self.token.unlink(missing_ok=True)
        if undo and not _has_progress(self.path):
            try:
                self._undo()
            except OSError as error:
                _log.warning("%s is left as it is: %s", self.path, error)
        os.close(self.lock)

    def _undo(self) -> None:
        _clear(self.path)
        if self.own_model:
            shutil.rmtree(self.path / "model", ignore_errors=True)
        (self.path / "run" / "lock").unlink()
        for folder in (self.path / "run", self.path / "logs", *self.made):
            with contextlib.suppress(OSError):  # somebody else has put something there
                folder.rmdir()
        if self.moved_to is not None and not self.path.exists():
            self.moved_to.rename(self.path)


def remembered(path: Path) -> list[str]:
    """Return the ``--set`` values with which the run at ``path`` was begun. Raises ManifestError if unreadable."""
    file = path / "run" / "overrides.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[str])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        hint = "Remove it, and give the run's --set values again"
        raise ManifestError(
            f"the --set values of the run cannot be read: {error}", where=str(file), hint=hint
        ) from error


def holds_run(path: Path) -> bool:
    """Return whether a run has left something at ``path`` that must not be written over."""
    return any((path / entry).exists() for entry in _RUN_ENTRIES)


def _came_to_nothing(path: Path) -> bool:
    """Return whether a supervisor has begun a job at ``path`` from which nothing came that could be lost."""
    begun = (path / JOB).is_file() and (path / "run" / "processes.json").is_file()
    return begun and not _has_progress(path)


def _has_progress(path: Path) -> bool:
    if any((path / name).exists() for name in (SUMMARY, "export")):
        return True
    metrics, events = ([path / name, path / f"{name}{ASIDE}"] for name in (METRICS, EVENTS))
    return (
        any((path / "checkpoints").glob("*/manifest.json"))
        or any(file.is_file() and file.stat().st_size > 0 for file in metrics)
        or any(file.is_file() and _EVALUATION in file.read_bytes() for file in events)
    )


def _clear(path: Path) -> None:
    """Remove what a start from which nothing came has left; the lock stays."""
    for name in _RUN_ENTRIES:
        entry = path / name
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
    for log in (path / "logs").glob("*.log"):
        if _LOG.fullmatch(log.name):
            log.unlink()
    for name in _SUPERVISORS:
        if name != "lock":
            (path / "run" / name).unlink(missing_ok=True)


def _check_room(path: Path) -> None:
    """Refuse to begin on a disk that is full. Raises ManifestError."""
    disk = shutil.disk_usage(next(folder for folder in (path, *path.parents) if folder.exists()))
    if disk.total and disk.free < LEAST_FREE:
        words = f"only {disk.free >> 10} KiB are free there, and a run needs {LEAST_FREE >> 10} to begin"
        raise ManifestError(words, where=str(path), hint="Free some space, or give another --output")


def _check_unused(path: Path) -> None:
    """Raise ManifestError where another supervisor holds the folder; leave it as it is."""
    try:
        descriptor = os.open(path / "run" / "lock", os.O_RDONLY)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _in_use(path) from error
    finally:
        os.close(descriptor)


def _in_use(path: Path) -> ManifestError:
    hint = "Wait for it, end it, or give another --output"
    return ManifestError("another run is using the folder", where=str(path), hint=hint)


def _lock(path: Path) -> int:
    """Create the folder where needed and lock it for this process; the kernel unlocks when the process ends."""
    run = path / "run"
    path.mkdir(parents=True, exist_ok=True)
    run.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(run / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino != (run / "lock").stat().st_ino:
            raise BlockingIOError
    except (BlockingIOError, FileNotFoundError) as error:
        os.close(descriptor)
        raise _in_use(path) from error
    return descriptor


def _end_predecessor(path: Path) -> None:
    """End what the folder's last supervisor, which is gone since its lock is ours, has left running."""
    record = load_record(path / "run" / "processes.json")
    if record is not None:
        reaper.sweep(mark=record.mark, sessions=())


def _move_aside(path: Path) -> Path:
    """Rename the folder, which nobody may be using, to the first free name of the form ``NAME.N``."""
    lock = _lock(path)
    try:
        _end_predecessor(path)
        names = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
        return path.rename(next(name for name in names if not os.path.lexists(name)))
    finally:
        os.close(lock)
