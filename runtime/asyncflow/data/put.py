"""The source ``put://``: prompts that somebody puts while the job runs, such as a loop with a curriculum of its own.

Invariant: a prompt that was acknowledged is in the file, under its serial for ever; so a driver that is started again
gives the same prompts again, and a caller that does not know whether its prompts arrived puts them once more, with the
serial that it wanted for the first one.
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
    """Prompts to be put.

    first: the serial of the first one; prompts: none of them to ask only how many there are; check: whether it is only
    asked if they can be put.
    """

    first: int = 0
    prompts: list[Prompt] = []
    check: bool = False


class PromptsThere(msgspec.Struct, frozen=True):
    """Answer: how many prompts there are, all puts together."""

    count: int


class PutSource:
    """Prompts in the order in which they were put. Thread-safe."""

    size = None

    def __init__(self) -> None:
        self._prompts: list[Prompt] = []
        self._file: Path | None = None
        self._lock = threading.Lock()

    @property
    def there(self) -> int:
        """Number of prompts that were put."""
        return len(self._prompts)

    def prompt(self, serial: int) -> Prompt:
        """Return prompt ``serial``. Raises IndexError for one that was not put yet."""
        return self._prompts[serial]

    def keep(self, file: Path) -> None:
        """Read what was put before, and write to ``file`` what is put from now on.

        The beginning of a line that nobody acknowledged is cut off. Raises ManifestError for a line that is no prompt.
        """
        written = file.read_bytes() if file.exists() else b""
        whole = written[: written.rfind(_ENDING) + 1]
        if len(whole) < len(written):
            os.truncate(file, len(whole))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                self._prompts.append(msgspec.json.decode(line, type=Prompt))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                hint = "Begin the run anew (--fresh): the serials of later prompts depend on it"
                raise ManifestError(f"line {number} is no prompt: {error}", where=str(file), hint=hint) from error
        self._file = file

    def put(self, prompts: Sequence[Prompt], *, first: int) -> int:
        """Add prompts, of which the first is to have serial ``first``, and return how many there are; on disk then.

        Those that are there already are left as they are. Raises Refused where that cannot be their place: there are
        fewer prompts, or others have these serials; OSError of the disk, and then none is added.
        """
        lines = [msgspec.json.encode(each) for each in prompts]
        prompts = [msgspec.json.decode(line, type=Prompt) for line in lines]
        with self._lock:
            known = len(self._prompts)
            there = prompts[: max(0, known - first)]
            if first > known or there != self._prompts[first : first + len(there)]:
                what = f"prompt {first} is not the next one: there are {known}, and others have its place"
                hint = "Another process puts prompts too: ask Engines.prompts how many there are, and go on from there"
                raise Refused(what, where="put_prompts_data", hint=hint)
            fresh = lines[len(there) :]
            if fresh and self._file is not None:
                made = not self._file.exists()
                _append(self._file, b"".join(line + _ENDING for line in fresh))
                if made:
                    durable.sync(self._file.parent)
            self._prompts.extend(prompts[len(there) :])
            return len(self._prompts)


def _append(file: Path, lines: bytes) -> None:
    """Add whole lines to a file, or none of them."""
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
