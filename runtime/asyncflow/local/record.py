"""The record of a supervisor: the placement of each replica, and the attempts in its log.

Invariants:

* An attempt is recorded before its process exists, so it is never reused. If the record is missing, damaged, or lacks
  the role, the used attempts are read from the logs and the checkpoints.
* A line that the supervisor adds to a log begins with ``---``. A log that cannot be written or read stops no process.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

import msgspec

from asyncflow.durable import write_whole
from asyncflow.errors import ManifestError
from asyncflow.local.scaling import Scale

_USED = re.compile(rb"^--- \S+ attempt (\d+)(?::| ended)", re.MULTILINE)
"""Lines of a log that name an attempt: at its start and at its end, since a full disk may have lost one of the two."""

_TAIL_BYTES = 8192
_TAIL_LINES = 12


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """One replica.

    state: value of ``lifecycle.ProcessState``; pid: 0 while it has no process; started: start time of this attempt, ISO
    8601 UTC; http: URL of its /metrics, /healthz and /readyz, "" before its first start.
    """

    role: str
    index: int
    attempt: int
    state: str
    pid: int = 0
    started: str = ""
    restarts: int = 0
    log: str = ""
    http: str = ""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """All replicas placed by one supervisor.

    mark: mark of the run in its processes' environment; lock: inode number of the folder's lock, which a copy of the
    folder does not share, 0 in a record of an older version; supervisor: its pid; driver: address to which all
    processes connect; http: URL of the first replica's status; control: URL of the driver's control service, ""
    without a driver; scales: wanted numbers of replicas of elastic roles.
    """

    mark: str
    supervisor: int
    started: str
    driver: str
    http: str
    control: str = ""
    lock: int = 0
    processes: list[Placed] = []
    scales: list[Scale] = []

    def save(self, path: Path) -> None:
        """Write the record in one step."""
        write_whole(path, msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    def next_attempts(self) -> dict[str, int]:
        """Return for each role the first attempt that no replica of the role has used."""
        attempts: dict[str, int] = {}
        for placed in self.processes:
            attempts[placed.role] = max(attempts.get(placed.role, 0), placed.attempt + 1)
        return attempts


def load_record(path: Path) -> Record | None:
    """Return the last record of the folder ``path``, None if there is no such folder or record, or if it is damaged.

    Raises ManifestError if the file cannot be read.
    """
    file = processes_of(path)
    try:
        return msgspec.json.decode(file.read_bytes(), type=Record)
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    except OSError as error:
        what = f"the record of placements cannot be read: {error.strerror}"
        raise ManifestError(what, where=str(file), hint="Use the account of the run, or check the disk") from error


def first_attempts(folder: Path, roles: Iterable[str], *, record: Record | None) -> dict[str, int]:
    """Return, for each of ``roles``, the first attempt that was never used in a run's folder.

    record: record of the last supervisor, if any. For a role that it lacks, the logs and the checkpoints are read.
    """
    attempts = record.next_attempts() if record is not None else {}
    return {role: attempts.get(role) or _first_in_logs(folder, role) for role in roles}


def _first_in_logs(folder: Path, role: str) -> int:
    used = [-1]
    for path in (folder / "logs").glob(f"{role}-*.log"):
        with contextlib.suppress(OSError):
            used += map(int, _USED.findall(path.read_bytes() if path.stem.rpartition("-")[0] == role else b""))
    if role == "trainer":
        with contextlib.suppress(OSError, ValueError):
            used.append(int((folder / "checkpoints" / "attempt").read_text()))
    return max(used) + 1


@contextlib.contextmanager
def open_log(path: Path) -> Iterator[TextIO]:
    """Open a log of this process; an OSError on closing, such as a full disk, is ignored."""
    log = path.open("a", encoding="utf-8")
    try:
        yield log
    finally:
        with contextlib.suppress(OSError):
            log.close()


class RoleLog:
    """The log of one replica; remembers the position at which the current attempt starts."""

    def __init__(self, path: Path) -> None:
        """Set the path; the first attempt creates the file."""
        self.path = path
        self._offset = 0

    def begin(self, *, attempt: int, argv: Sequence[str]) -> None:
        """Add the first line of a new attempt."""
        self.note(f"attempt {attempt}: {shlex.join(argv)}")
        with contextlib.suppress(OSError):
            self._offset = self.path.stat().st_size

    def note(self, text: str) -> None:
        """Add a line from the supervisor."""
        with contextlib.suppress(OSError), self.path.open("a", encoding="utf-8") as file:
            file.write(f"--- {datetime.now(UTC).isoformat(timespec='milliseconds')} {text}\n")

    def tail(self) -> list[str]:
        """Return the last lines that the process of the current attempt has written."""
        try:
            with self.path.open("rb") as file:
                file.seek(max(self._offset, self.path.stat().st_size - _TAIL_BYTES))
                lines = file.read().decode("utf-8", errors="replace").splitlines()
        except OSError as error:
            return [f"its log cannot be read: {error}"]
        return [line for line in lines if line.strip() and not line.startswith("--- ")][-_TAIL_LINES:]


def processes_of(path: Path) -> Path:
    """Return the path of the record of placements in the folder of a run."""
    return path / "run" / "processes.json"
