"""The record of placements, ``DIR/run/processes.json``: who runs where, for people, tests and the next run.

Invariant: an attempt is on record before its process exists, so that a resumed job never uses an attempt again.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from asyncflow.durable import write_whole
from asyncflow.errors import ManifestError


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
    """Read what an earlier supervisor left; None where there was none. Raises ManifestError where it is unreadable."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        hint = "Without it attempts would be used twice; use --fresh"
        raise ManifestError(f"the record of placements cannot be read: {error}", where=str(path), hint=hint) from error
