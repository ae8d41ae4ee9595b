"""The folder of one run: its lock, its files, and what a new start does with an existing run.

    DIR/job.yaml  metrics.jsonl  summary.json  ledger/  checkpoints/  logs/<role>-<index>.log
    DIR/run/      lock  token  processes.json  scale.json  tls/   (mode 0700; of the supervisor)

Invariants:

* At most one supervisor holds a folder, by a lock that the kernel releases when its process ends.
* A run is never overwritten or deleted: it is continued on request (``resume``), or moved aside (``fresh``). A start
  without progress (no step and no evaluation) does not count as a run: the next start replaces it. Only files that such
  a start has made are removed. If a role refuses the new settings of a resumed run, the run keeps its old ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import re
import secrets
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import msgspec

from asyncflow.api.names import ROLE_NAME
from asyncflow.data.sources import CACHE
from asyncflow.driver.journal import ASIDE, EVENTS, FILES, METRICS, PROMPTS, SUMMARY
from asyncflow.durable import write_whole
from asyncflow.errors import ManifestError
from asyncflow.local import reaper
from asyncflow.local.record import Record, load_record, processes_of

_log = logging.getLogger(__name__)

JOB = "job.yaml"
QUEUE = "queue.yaml"
SYNC = "weights.yaml"
"""Names of the manifest file in the folder of a run, of a standalone queue, and of a published model."""
_HOLDS = {JOB: "a run", QUEUE: "a queue", SYNC: "a published model"}
LEAST_FREE = 16 << 20
"""Bytes that must be free when a run starts: its logs, its ledger and its first checkpoint would not fit into less."""
_RUN_ENTRIES = (
    *(JOB, QUEUE, SYNC, "ledger", "checkpoints", "samples", "sinks", "spans", "steps"),
    *FILES,
    *(f"{name}{ASIDE}" for name in FILES),
)
"""Entries of a folder by which it counts as holding a run; none of them exists when a new run starts in it."""
_SUPERVISORS = (
    "lock",
    "token",
    "processes.json",
    f"processes.json{ASIDE}",
    "overrides.json",
    "scale.json",
    "forkserver.log",
    "reaper.log",
)
"""Files that the supervisor makes in ``run``."""
_FOR_RUN = ("model", CACHE)
"""Folders that roles create, but that may also exist before the run."""
_LOG = re.compile(rf"(supervisor|{ROLE_NAME}-\d+)\.log")
_EVALUATION = b"evaluation"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of a run, a queue or a published model, whose lock this process holds until ``release``.

    moved_to: new path of the run that was moved aside, if any; made: folders created for this one, innermost first;
    own: folders inside it that did not exist before; name: name of the manifest file; before: old contents of the
    settings files of a resumed run (None: absent); figures: initial size of the metrics file in bytes.
    """

    path: Path
    lock: int
    moved_to: Path | None = None
    made: tuple[Path, ...] = ()
    own: tuple[str, ...] = ()
    name: str = JOB
    before: Mapping[Path, bytes | None] = field(default_factory=dict)
    figures: int = 0

    @classmethod
    def claim(cls, path: Path, *, resume: bool = False, fresh: bool = False, name: str = JOB) -> Self:
        """Claim ``path`` for a run, creating it if needed. name: name of the manifest file.

        Processes that a killed supervisor has left running there are ended. Raises ManifestError if the folder cannot
        be written, the disk is full, another supervisor holds the folder, it holds a run and neither ``resume`` nor
        ``fresh`` is set, or ``resume`` is set and there is nothing to continue.
        """
        path = path.absolute()
        try:
            str(path).encode()
        except UnicodeEncodeError as error:
            raise ManifestError(
                "the path is not UTF-8", where=ascii(str(path)), hint="Pass another --output"
            ) from error
        has_run = holds_run(path) and not _is_failed_start(path)
        if resume and not (path / name).is_file():
            raise ManifestError(
                "there is no run to resume", where=str(path), hint="Leave out --resume, or pass its --output"
            )
        if has_run and not (resume or fresh):
            _check_unused(path)
            content = next((what for file, what in _HOLDS.items() if (path / file).is_file()), "a run")
            hint = "Move it aside with --fresh, or pass another --output"
            if name == JOB and (path / name).is_file():
                hint = "Continue it with --resume, move it aside with --fresh, or pass another --output"
            raise ManifestError(f"the folder already holds {content}", where=str(path), hint=hint)
        _check_room(path)
        try:
            moved_to = _move_aside(path) if has_run and fresh else None
            made = tuple(folder for folder in (path, *path.parents) if not folder.exists())
            lock = _lock(path, in_place_of=moved_to)
            try:
                _end_predecessor(path)
                if not resume and _is_failed_start(path):
                    _clear(path)
                (path / "logs").mkdir(exist_ok=True)
                settings = (path / name, overrides_of(path), requests_of(path)) if resume else ()
                before = {file: file.read_bytes() if file.exists() else None for file in settings}
            except BaseException:
                cls(path, lock, moved_to, made).release(undo=moved_to is not None)
                raise
        except OSError as error:
            hint = "Pass an --output that can be written"
            raise ManifestError(f"cannot write there: {error.strerror}", where=str(path), hint=hint) from error
        own = tuple(folder for folder in _FOR_RUN if not (path / folder).exists())
        return cls(path, lock, moved_to, made, own=own, name=name, before=before, figures=_figures(path))

    @property
    def job(self) -> Path:
        """The resolved manifest that the roles read."""
        return self.path / self.name

    @property
    def token(self) -> Path:
        """The bearer token of the driver's POST routes."""
        return self.path / "run" / "token"

    @property
    def tls(self) -> Path:
        """The job's certificate authority, and the certificates of its processes."""
        return self.path / "run" / "tls"

    @property
    def processes(self) -> Path:
        """The record of placements."""
        return processes_of(self.path)

    @property
    def overrides(self) -> Path:
        """The ``--set`` values of the run, which ``--resume`` applies again."""
        return overrides_of(self.path)

    @property
    def requests(self) -> Path:
        """The numbers of rollouts that users have requested with ``asyncflow scale``."""
        return requests_of(self.path)

    @property
    def summary(self) -> Path:
        """The summary, which the driver writes before it ends."""
        return self.path / SUMMARY

    def log(self, name: str) -> Path:
        """Return the log file of one replica, to which all its attempts append."""
        return self.path / "logs" / f"{name}.log"

    def write_token(self) -> None:
        """Write a new token to a file that only this user can read."""
        write_whole(self.token, secrets.token_urlsafe(32).encode(), mode=0o600)

    def save_overrides(self, overrides: Sequence[str]) -> None:
        """Save the ``--set`` values of this run. Raises OSError."""
        write_whole(self.overrides, msgspec.json.encode(list(overrides)))

    def release(self, *, undo: bool = False) -> None:
        """Remove the token and release the lock of the folder.

        undo: whether to undo this start, because it was refused. Unless the run has made progress, all files of the
        start are removed, and the run that it moved aside is moved back. A resumed run gets its old settings back,
        unless it made a step with the new ones.
        """
        with contextlib.suppress(OSError):
            self.token.unlink()
        try:
            if undo and self.before and _figures(self.path) == self.figures:
                self._restore_settings()
            elif undo and not self.before and not _has_progress(self.path):
                self._undo()
        except OSError as error:
            _log.warning("%s is left as it is: %s", self.path, error)
        os.close(self.lock)

    def _restore_settings(self) -> None:
        for file, content in self.before.items():
            if content is None:
                file.unlink(missing_ok=True)
            else:
                write_whole(file, content)

    def _undo(self) -> None:
        _clear(self.path)
        for name in self.own:
            shutil.rmtree(self.path / name, ignore_errors=True)
        (self.path / "run" / "lock").unlink()
        for folder in (self.path / "run", self.path / "logs", *self.made):
            with contextlib.suppress(OSError):  # it contains other files
                folder.rmdir()
        if self.moved_to is not None and not self.path.exists():
            self.moved_to.rename(self.path)


def saved_overrides(path: Path) -> list[str]:
    """Return the ``--set`` values with which the run at ``path`` was started. Raises ManifestError if unreadable."""
    file = overrides_of(path)
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[str])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        hint = "Remove it, and pass the run's --set values again"
        raise ManifestError(
            f"the --set values of the run cannot be read: {error}", where=str(file), hint=hint
        ) from error


def overrides_of(path: Path) -> Path:
    """Return the path of the ``--set`` values in the folder of a run."""
    return path / "run" / "overrides.json"


def requests_of(path: Path) -> Path:
    """Return the path of users' requests (``asyncflow scale``) in the folder of a run."""
    return path / "run" / "scale.json"


def record_of(path: Path) -> Record:
    """Return the record of the supervisor that holds the folder ``path`` now. Raises ManifestError if none does."""
    if (record := load_record(path)) is not None and _is_held(path):
        return record
    hint = "Continue it with asyncflow run FILE --resume" if holds_run(path) else "Pass the folder of a run"
    for alone in (path / QUEUE, path / SYNC):
        if alone.is_file():
            hint = f"Serve it again: {shlex.join(['asyncflow', 'run', str(alone), '--output', str(path)])}"
    raise ManifestError("no run is active there", where=str(path), hint=hint)


def check_run(path: Path, *files: str) -> None:
    """Raise ManifestError if the folder ``path`` has none of ``files`` of a run, by default its manifest."""
    if not any((path / name).is_file() for name in files or (JOB,)):
        raise ManifestError("there is no run", where=str(path), hint="Pass the folder of a run, e.g. runs/quickstart")


def holds_run(path: Path) -> bool:
    """Return whether ``path`` contains files of a run, which must not be overwritten."""
    return any((path / entry).exists() for entry in _RUN_ENTRIES)


def _is_failed_start(path: Path) -> bool:
    """Return whether a supervisor has started a job at ``path`` that made no progress that could be lost."""
    started = any(file.is_file() for file in (processes_of(path), overrides_of(path))) and (path / JOB).is_file()
    return started and not _has_progress(path)


def _has_progress(path: Path) -> bool:
    if any((path / name).exists() for name in (SUMMARY, "export")):
        return True
    if (prompts := path / PROMPTS).is_file() and prompts.stat().st_size > 0:
        return True
    metrics, events = ([path / name, path / f"{name}{ASIDE}"] for name in (METRICS, EVENTS))
    return (
        any((path / "checkpoints").glob("*/manifest.json"))
        or any(file.is_file() and file.stat().st_size > 0 for file in metrics)
        or any(file.is_file() and _EVALUATION in file.read_bytes() for file in events)
    )


def _figures(path: Path) -> int:
    metrics = path / METRICS
    return metrics.stat().st_size if metrics.exists() else 0


def _clear(path: Path) -> None:
    """Remove the files of a start that made no progress, except the lock."""
    for name in _RUN_ENTRIES:
        entry = path / name
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
    for log in (path / "logs").glob("*.log"):
        if _LOG.fullmatch(log.name):
            log.unlink()
    shutil.rmtree(path / "run" / "tls", ignore_errors=True)
    for name in _SUPERVISORS:
        if name != "lock":
            (path / "run" / name).unlink(missing_ok=True)


def _check_room(path: Path) -> None:
    """Raise ManifestError if the disk is too full for a run to start."""
    disk = shutil.disk_usage(next(folder for folder in (path, *path.parents) if folder.exists()))
    if disk.total and disk.free < LEAST_FREE:
        what = f"only {disk.free >> 10} KiB are free there, and a run needs {LEAST_FREE >> 10} KiB to start"
        raise ManifestError(what, where=str(path), hint="Free some space, or pass another --output")


def _check_unused(path: Path) -> None:
    """Raise ManifestError if another supervisor holds the folder; do not change the folder."""
    if _is_held(path):
        raise _in_use(path)


def _is_held(path: Path) -> bool:
    """Return whether a supervisor holds the folder."""
    try:
        descriptor = os.open(path / "run" / "lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _in_use(path: Path) -> ManifestError:
    hint = "Wait for it, end it, or pass another --output"
    return ManifestError("another run is using the folder", where=str(path), hint=hint)


def _lock(path: Path, *, in_place_of: Path | None = None) -> int:
    """Create the folder if needed and lock it for this process; the kernel releases the lock when the process ends.

    in_place_of: new path of the run that was moved aside for it; it is moved back if the folder cannot be created.
    """
    run = path / "run"
    try:
        path.mkdir(parents=True, exist_ok=True)
        run.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(run / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        if in_place_of is not None:
            with contextlib.suppress(OSError):
                run.rmdir()
            in_place_of.rename(path)
        raise
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino != (run / "lock").stat().st_ino:
            raise BlockingIOError
    except (BlockingIOError, FileNotFoundError) as error:
        os.close(descriptor)
        raise _in_use(path) from error
    return descriptor


def _end_predecessor(path: Path) -> None:
    """End the processes that the folder's last supervisor, which has ended, left running; rename a damaged record."""
    record, file = load_record(path), processes_of(path)
    if record is not None and record.lock in (0, (path / "run" / "lock").stat().st_ino):
        reaper.sweep(mark=record.mark, sessions=())
    elif record is None and file.exists():
        aside = file.with_name(f"{file.name}{ASIDE}")
        _log.warning("the record of placements is damaged, see %s; used attempts are read from the logs", aside)
        with contextlib.suppress(OSError):
            file.rename(aside)


def _move_aside(path: Path) -> Path:
    """Rename the folder, which must not be in use, to the first free name of the form ``NAME.N``."""
    lock = _lock(path)
    try:
        _end_predecessor(path)
        names = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
        return path.rename(next(name for name in names if not os.path.lexists(name)))
    finally:
        os.close(lock)
