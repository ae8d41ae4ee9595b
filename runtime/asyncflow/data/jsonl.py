"""The rows of a JSONL file: one JSON object a line, found again by the byte at which its line begins.

Invariant: a row is read from the file that was opened, also where another has taken its name; one that was written
into meanwhile is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncflow.data.files import Row
from asyncflow.errors import ManifestError

_PIECE = 1 << 16


class JsonLines:
    """The rows of the file at ``path``. Raises ManifestError where it cannot be read; where: names it there."""

    def __init__(self, path: Path, *, where: str) -> None:
        self.name = str(path)
        self.fields: set[str] = set()
        try:
            self._file = path.open("rb", buffering=_PIECE)
            self._state = self._stat()
        except OSError as error:
            raise ManifestError(f"cannot be read: {error}", where=self.name, hint=f"{where} names it") from error

    def scan(self) -> Iterator[Row]:
        """Yield the rows in order. Raises ManifestError with the line's number for one that is no JSON object."""
        position = 0
        try:
            for number, line in enumerate(self._file, 1):
                if line.strip():
                    place = f"{self.name}:{number}"
                    fields = _fields(line, place=place)
                    self.fields.update(fields)
                    yield Row(position, place, fields)
                position += len(line)
        except OSError as error:
            raise ManifestError(f"cannot be read: {error}", where=self.name) from error

    def row(self, position: int) -> dict[str, Any]:
        """Return the row whose line begins at ``position``."""
        if self._stat() != self._state:
            raise ManifestError(
                "was written into while the job reads it",
                where=self.name,
                hint="Put the new one into its place with a rename, and resume the run; or give it another name",
            )
        line = b""
        while b"\n" not in line and (more := os.pread(self._file.fileno(), _PIECE, position + len(line))):
            line += more
        return _fields(line.partition(b"\n")[0], place=self.name)

    def _stat(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns


def _fields(line: bytes, *, place: str) -> dict[str, Any]:
    try:
        fields = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        raise ManifestError(f"is not JSON: {error}", where=place) from error
    if not isinstance(fields, dict):
        raise ManifestError("is not a JSON object", where=place, hint="Write one JSON object a line, a task each")
    return fields
