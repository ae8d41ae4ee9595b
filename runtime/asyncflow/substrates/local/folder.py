"""The folder of one run: who may write there, and where everything lies.

    DIR/job.yaml  metrics.jsonl  summary.json  ledger/  checkpoints/  logs/<role>-<index>.log
    DIR/run/      lock  token  processes.json         (mode 0700; of the supervisor)

Invariants: at most one supervisor holds a folder, by a lock that ends with its process; a run that is already there is
never written over: it is continued on request (``resume``), or moved aside whole (``fresh``), never deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from asyncflow.durable import write_whole
from asyncflow.errors import ManifestError
from asyncflow.substrates.local import reaper
from asyncflow.substrates.local.record import load_record

_log = logging.getLogger(__name__)

_RUN_ENTRIES = ("job.yaml", "ledger", "checkpoints", "metrics.jsonl", "summary.json")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run's folder that this process holds the lock of, until ``release``."""

    path: Path
    lock: int
    moved_to: Path | None = None

    @classmethod
    def claim(cls, path: Path, *, resume: bool = False, fresh: bool = False) -> Self:
        """Take ``path`` for a run, creating it where needed.

        What a supervisor that was killed there has left running is ended. Raises ManifestError where the folder cannot
        be written, another supervisor holds it, it holds a run and neither ``resume`` nor ``fresh`` is asked for, or
        ``resume`` is asked for and there is nothing to continue.
        """
        path = path.absolute()
        held = holds_run(path)
        if resume and not (path / "job.yaml").is_file():
            raise ManifestError(
                "there is no run to resume", where=str(path), hint="Leave out --resume, or give its --output"
            )
        if held and not (resume or fresh):
            _check_unused(path)
            hint = "Continue it with --resume, move it aside with --fresh, or give another --output"
            raise ManifestError("the folder already holds a run", where=str(path), hint=hint)
        try:
            moved_to = _move_aside(path) if held and fresh else None
            lock = _lock(path)
            (path / "logs").mkdir(exist_ok=True)
        except OSError as error:
            hint = "Give an --output that can be written"
            raise ManifestError(f"cannot write there: {error.strerror}", where=str(path), hint=hint) from error
        _end_predecessor(path)
        return cls(path, lock, moved_to)

    @property
    def job(self) -> Path:
        """The resolved manifest that the roles read."""
        return self.path / "job.yaml"

    @property
    def token(self) -> Path:
        """The bearer token of the driver's POST routes."""
        return self.path / "run" / "token"

    @property
    def processes(self) -> Path:
        """The record of placements."""
        return self.path / "run" / "processes.json"

    @property
    def summary(self) -> Path:
        """What the driver found out, written before it ends."""
        return self.path / "summary.json"

    def log(self, name: str) -> Path:
        """The log of one replica, appended to over its restarts."""
        return self.path / "logs" / f"{name}.log"

    def write_token(self) -> None:
        """Make a new token that only this user can read."""
        write_whole(self.token, secrets.token_urlsafe(32).encode(), mode=0o600)

    def release(self) -> None:
        """Remove the token and let others have the folder."""
        with contextlib.suppress(OSError):
            self.token.unlink(missing_ok=True)
        os.close(self.lock)


def holds_run(path: Path) -> bool:
    """Say whether a run has left something at ``path`` that must not be written over."""
    return any((path / entry).exists() for entry in _RUN_ENTRIES)


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
