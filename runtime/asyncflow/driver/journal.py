"""Files of the driver, most of them lines of text, which users read and a restarted driver reads back.

Numbers are bounded when they are read back, so that figures computed from them fit into a status.

Invariants: neither the content of a file nor an error of the disk ends the run: a line that cannot be read is moved to
``NAME.bad``, and a line that cannot be written is kept in memory and written with the next one; a file contains only
complete lines, except for the last line of a writer that was killed, which is cut off when the file is opened again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from asyncflow import durable
from asyncflow.api.versions import MOST_COUNTED
from asyncflow.errors import AsyncFlowError

log = logging.getLogger(__name__)

T = TypeVar("T")

FILES = METRICS, EVENTS, LIVES, REWARDS, PROMPTS, SUMMARY = (
    "metrics.jsonl",
    "events.jsonl",
    "lives.json",
    "rewards.json",
    "put-prompts.jsonl",
    "summary.json",
)
"""The driver's files in the folder of a run."""
FIRST_DISPATCH = "first dispatch"
"""Event of the first dispatched prompt, at which the measured time starts."""
ASIDE = ".bad"
"""Suffix of the file that receives the unreadable content of another file."""

Count = Annotated[int, Meta(ge=0, le=MOST_COUNTED)]
Share = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Moment = Annotated[float, Meta(ge=0, le=1e11)]
"""Unix seconds that can be converted to a date."""
Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]

FULL_DISK = "Free some space; the run can be resumed"


class Journal:
    """A file of JSON lines that can be appended to.

    check: raises ValueError or msgspec.ValidationError for a JSON value that is not a line of this file.
    """

    def __init__(self, path: Path, *, check: Callable[[Any], object]) -> None:
        self.path = path
        self.lines: list[dict[str, Any]] = []
        self._check = check
        self._descriptor = -1
        self._whole = 0
        self._torn = False
        self._unwritten = b""
        self._failing = False
        self._read()

    def append(self, line: dict[str, Any]) -> None:
        """Write one line, and the lines that could not be written before."""
        self.lines.append(line)
        self._unwritten += json.dumps(line, separators=(",", ":")).encode() + b"\n"
        self.write()

    def write(self) -> None:
        """Write the lines that could not be written before."""
        if not self._unwritten:
            return
        try:
            self._write()
        except OSError as error:
            if not self._failing:
                log.warning("%s cannot be written; its lines are kept and will be retried: %s", self.path, error)
            self._failing = True
        else:
            self._unwritten, self._failing = b"", False

    def close(self) -> None:
        """Write the remaining lines, and close the file."""
        self.write()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self) -> None:
        if self._descriptor < 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if self._torn:
            os.ftruncate(self._descriptor, min(self._whole, os.fstat(self._descriptor).st_size))
        self._whole = os.fstat(self._descriptor).st_size
        self._torn = True
        written = os.write(self._descriptor, self._unwritten)
        if written < len(self._unwritten):
            os.ftruncate(self._descriptor, self._whole)
            raise OSError(f"only {written} of {len(self._unwritten)} bytes were written")
        self._torn = False

    def _read(self) -> None:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("%s cannot be read, its figures are lost: %s", self.path, error)
            return
        *whole, torn = data.split(b"\n")
        self._torn, self._whole = bool(torn), len(data) - len(torn)
        sound, bad = [], []
        for written in whole:
            try:
                line = msgspec.json.decode(written)
                self._check(line)
            except (ValueError, msgspec.MsgspecError, RecursionError):
                bad.append(written)
            else:
                sound.append(written)
                self.lines.append(line)
        if bad:
            self._set_aside(sound, bad)

    def _set_aside(self, sound: list[bytes], bad: list[bytes]) -> None:
        """Move the bad lines to a file of their own."""
        aside = self.path.with_name(f"{self.path.name}{ASIDE}")
        what = f"{len(bad)} line{'s' * (len(bad) > 1)} of {self.path.name} cannot be read"
        try:
            with aside.open("ab") as file:
                file.writelines(line + b"\n" for line in bad)
            durable.write_whole(self.path, b"".join(line + b"\n" for line in sound))
        except OSError as error:
            log.warning("%s, and cannot be moved to %s: %s", what, aside, error)
        else:
            self._torn = False
            log.warning("%s; see %s", what, aside)


class StateFile:
    """A file with one JSON value, which a driver replaces periodically and the next driver reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._failing = False

    def read(self, kind: type[T]) -> T | None:
        """Return the value that was written last; None if there is none or it cannot be read.

        A damaged file is renamed to ``NAME.bad``.
        """
        path = self.path
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("%s cannot be read: %s", path, error)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            aside = path.with_name(f"{path.name}{ASIDE}")
            log.warning("%s is damaged, see %s: %s", path.name, aside, error)
            with contextlib.suppress(OSError):
                path.rename(aside)
        return None

    def write(self, value: object) -> None:
        """Replace the file atomically; if it cannot be written, the previous content stays."""
        try:
            durable.write_whole(self.path, msgspec.json.encode(value))
        except OSError as error:
            if not self._failing:
                log.warning("%s cannot be written, so the next driver will lack it: %s", self.path, error)
            self._failing = True
        else:
            self._failing = False


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically. Raises AsyncFlowError if it cannot be written."""
    try:
        durable.write_whole(path, text.encode())
    except OSError as error:
        raise AsyncFlowError(f"cannot be written: {error}", where=str(path), hint=FULL_DISK) from error


def read_summary(path: Path) -> dict[str, Any] | None:
    """Read the driver's summary; None if there is none, or it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
