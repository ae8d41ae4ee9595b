"""The record of placements, ``DIR/run/processes.json``: who runs where, for people, tests and the next run.

Invariant: an attempt is on record before its process exists, so that a resumed job never uses an attempt again; where
the record is gone, or damaged, the logs and the checkpoints tell which were used.
"""

from __future__ import annotations

import contextlib
import logging
import re
from pathlib import Path

import msgspec

from asyncflow.driver.journal import ASIDE
from asyncflow.durable import write_whole
from asyncflow.errors import ManifestError

log = logging.getLogger(__name__)

_USED = re.compile(rb"^--- \S+ attempt (\d+)(?::| ended)", re.MULTILINE)
"""Lines of a log that tell of an attempt; a full disk may have cost one of them."""


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """One replica.

    state: see ``crew.State``; pid: 0 while it has no process; started: ISO 8601 UTC of this attempt; http: where it
    serves /metrics, /healthz and /readyz, "" before its first start.
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
    """Everything placed by one supervisor. mark: what its processes carry in their environment."""

    mark: str
    supervisor: int
    started: str
    driver: str
    http: str
    processes: list[Placed] = []

    def save(self, path: Path) -> None:
        """Write the record in one step."""
        write_whole(path, msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    def next_attempts(self) -> dict[str, int]:
        """Give, for each role, the first attempt that none of its replicas has used."""
        attempts: dict[str, int] = {}
        for placed in self.processes:
            attempts[placed.role] = max(attempts.get(placed.role, 0), placed.attempt + 1)
        return attempts


def load_record(path: Path) -> Record | None:
    """Read what an earlier supervisor left; None where there is none, or a damaged one, which is set aside.

    Raises ManifestError where the disk does not give it.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except FileNotFoundError:
        return None
    except OSError as error:
        what = f"the record of placements cannot be read: {error.strerror}"
        raise ManifestError(what, where=str(path), hint="Nothing was changed; try again") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as wrong:
        aside = path.with_name(f"{path.name}{ASIDE}")
        log.warning(
            "the record of placements is damaged, see %s; the logs tell which attempts there were: %s", aside, wrong
        )
        with contextlib.suppress(OSError):
            path.rename(aside)
        return None


def attempts_in_logs(folder: Path) -> dict[str, int]:
    """Return, for each role, the first attempt of which the logs and the checkpoints of a run's folder know nothing."""
    attempts: dict[str, int] = {}
    for path in (folder / "logs").glob("*-*.log"):
        with contextlib.suppress(OSError):
            used = [int(number) for number in _USED.findall(path.read_bytes())]
            role = path.stem.rpartition("-")[0]
            attempts[role] = max([attempts.get(role, 0), *(number + 1 for number in used)])
    with contextlib.suppress(OSError, ValueError):
        trainer = int((folder / "checkpoints" / "attempt").read_text())
        attempts["trainer"] = max(attempts.get("trainer", 0), trainer + 1)
    return attempts
