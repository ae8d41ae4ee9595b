"""Files that survive their writer.

Invariant: a line is written by one ``write`` call; a last line that a killed writer left unfinished is cut off when the
file is opened again, so every line that is read is whole.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from asyncflow import durable
from asyncflow.errors import AsyncFlowError

FULL_DISK = "Free some space; the run can be resumed."


class Journal:
    """Appends to ``path`` and remembers what it holds. Raises AsyncFlowError where the file cannot be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[dict[str, Any]] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab+", buffering=0)
            self._recover()
        except OSError as error:
            raise AsyncFlowError(f"cannot be opened: {error}", where=str(path)) from error

    def append(self, line: dict[str, Any]) -> None:
        """Write one line; it is there for every reader when this returns."""
        try:
            self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        except OSError as error:
            raise AsyncFlowError(f"cannot be written: {error}", where=str(self.path), hint=FULL_DISK) from error
        self.lines.append(line)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _recover(self) -> None:
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(self.path, whole)
        self.lines = [json.loads(line) for line in data[:whole].splitlines()]


def write_whole(path: Path, text: str) -> None:
    """Write a text file that a reader sees whole or not at all. Raises AsyncFlowError where it cannot be written."""
    try:
        durable.write_whole(path, text.encode())
    except OSError as error:
        raise AsyncFlowError(f"cannot be written: {error}", where=str(path), hint=FULL_DISK) from error


def read_whole(path: Path) -> Any:
    """Give the JSON that ``write_whole`` wrote, None where nothing was written yet."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
