"""The source ``put://``: prompts that the user's process puts while the job runs, e.g. for a curriculum.

Invariant: an acknowledged prompt is in the file, and its serial never changes. A restarted driver therefore gets the
same prompts again, and a caller that does not know whether its prompts arrived may put them again with the same first
serial.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from asyncflow import durable
from asyncflow.data.base import Prompt
from asyncflow.errors import ManifestError, Refused

SCHEME: Final = "put"
_ENDING: Final = b"\n"


class PutPrompts(msgspec.Struct, frozen=True):
    """Request to put prompts.

    first: the serial of the first prompt; prompts: the prompts, none to query only their number; check: whether the
    driver only checks that the prompts can be put.
    """

    first: int = 0
    prompts: list[Prompt] = []
    check: bool = False


class PromptsThere(msgspec.Struct, frozen=True):
    """Reply with the number of prompts of all puts together."""

    count: int


class PutSource:
    """Prompts in the order in which they were put. Thread-safe."""

    size = None

    def __init__(self) -> None:
        self._prompts: list[Prompt] = []
        self._file: Path | None = None
        self._lock = threading.Lock()

    @property
    def available(self) -> int:
        """Number of prompts put so far."""
        return len(self._prompts)

    def prompt(self, serial: int) -> Prompt:
        """Return prompt ``serial``. Raises IndexError if it was not put yet."""
        return self._prompts[serial]

    def keep(self, file: Path) -> None:
        """Read the prompts of ``file``, if it exists, and append all further prompts to it.

        An incomplete last line, which was never acknowledged, is cut off. Raises ManifestError if a line is not a
        prompt.
        """
        written = file.read_bytes() if file.exists() else b""
        whole = written[: written.rfind(_ENDING) + 1]
        if len(whole) < len(written):
            os.truncate(file, len(whole))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                self._prompts.append(msgspec.json.decode(line, type=Prompt))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                hint = "Start the run from scratch (--fresh): the serials of all further prompts depend on this line"
                raise ManifestError(f"line {number} is not a prompt: {error}", where=str(file), hint=hint) from error
        self._file = file

    def put(self, prompts: Sequence[Prompt], *, first: int) -> int:
        """Add prompts with serials from ``first`` on, and return the number of all prompts, which are then on disk.

        Prompts that were put before are left unchanged. Raises Refused if the serials do not fit, since ``first`` is
        beyond the next serial or other prompts have these serials. Raises OSError of the disk; then no prompt is added.
        """
        lines = [msgspec.json.encode(each) for each in prompts]
        prompts = [msgspec.json.decode(line, type=Prompt) for line in lines]
        with self._lock:
            known = len(self._prompts)
            repeated = prompts[: max(0, known - first)]
            if first > known or repeated != self._prompts[first : first + len(repeated)]:
                what = f"{first} is not the next serial, which is {known}, or other prompts already have these serials"
                hint = "Another process also puts prompts: get the next serial from Engines.prompts and continue there"
                raise Refused(what, where="put_prompts_data", hint=hint)
            fresh = lines[len(repeated) :]
            if fresh and self._file is not None:
                created = not self._file.exists()
                _append(self._file, b"".join(line + _ENDING for line in fresh))
                if created:
                    durable.sync(self._file.parent)
            self._prompts.extend(prompts[len(repeated) :])
            return len(self._prompts)


def _append(file: Path, lines: bytes) -> None:
    """Append all lines to a file and sync it; if that fails, append none of them."""
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        before = os.fstat(descriptor).st_size
        try:
            written = 0
            while written < len(lines):
                written += os.write(descriptor, lines[written:])
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, before)
            raise
    finally:
        os.close(descriptor)
