"""One log file per replica, appended to over its restarts.

Invariants: a line that the supervisor adds begins with ``---``; a file that cannot be written or read costs lines, and
stops nobody.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

_TAIL_BYTES = 8192
_TAIL_LINES = 12


@contextlib.contextmanager
def open_log(path: Path) -> Iterator[TextIO]:
    """Open a log of this process's own; a disk that does not take its last words ends nobody."""
    log = path.open("a", encoding="utf-8")
    try:
        yield log
    finally:
        with contextlib.suppress(OSError):
            log.close()


class RoleLog:
    """The log of one replica; remembers where the current attempt begins."""

    def __init__(self, path: Path) -> None:
        """Name the file; it is created by the first attempt."""
        self.path = path
        self._begins_at = 0

    def begin(self, *, attempt: int, argv: Sequence[str]) -> None:
        """Head a new attempt."""
        self.note(f"attempt {attempt}: {shlex.join(argv)}")
        with contextlib.suppress(OSError):
            self._begins_at = self.path.stat().st_size

    def note(self, words: str) -> None:
        """Add a line of the supervisor's own."""
        with contextlib.suppress(OSError), self.path.open("a", encoding="utf-8") as file:
            file.write(f"--- {datetime.now(UTC).isoformat(timespec='milliseconds')} {words}\n")

    def tail(self) -> list[str]:
        """Return the last lines that the current attempt itself has written."""
        try:
            with self.path.open("rb") as file:
                file.seek(max(self._begins_at, self.path.stat().st_size - _TAIL_BYTES))
                lines = file.read().decode("utf-8", errors="replace").splitlines()
        except OSError as error:
            return [f"its log cannot be read: {error}"]
        return [line for line in lines if line.strip() and not line.startswith("--- ")][-_TAIL_LINES:]
