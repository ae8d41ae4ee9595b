"""The transcript of the end-to-end test: commands with their output, waits with their duration, checks with findings.

Invariant: every line goes to the terminal and to the file, in chronological order. A failed check is recorded, and the
test continues if it can.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_HIDDEN: Final = re.compile(r"/tmp/asyncflow-kube-[\w-]+")
_DONE: Final = "ok"


class Transcript:
    """The transcript of one test run. path: the file that it is written to."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        self._began = time.monotonic()
        self.broken: list[str] = []

    def chapter(self, title: str) -> None:
        """Start a chapter."""
        self._write(f"\n== {title}")

    def say(self, text: str) -> None:
        """Write a line, with the time since the start."""
        self._write(f"{time.monotonic() - self._began:7.1f} s  {text}")

    def command(self, words: str, printed: str) -> None:
        """Write a command and its output."""
        self.say(f"$ {words}")
        for line in printed.rstrip().splitlines():
            self._write(f"           {line.rstrip()}")

    def check(self, what: str, *, holds: bool, found: object) -> None:
        """Write the result of a check."""
        if not holds:
            self.broken.append(f"{what}: {found}")
        self.say(f"[{_DONE if holds else 'NOT SO'}] {what}: {found}")

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Write the duration of the block, unless it raises."""
        began = time.monotonic()
        yield
        self.say(f"{what}: {time.monotonic() - began:.1f} s")

    def end(self) -> int:
        """Write a summary, close the file, and return the exit status."""
        for each in self.broken:
            self.say(f"did not hold: {each}")
        self.say("all checks held" if not self.broken else f"{len(self.broken)} checks did not hold")
        self._file.close()
        return 1 if self.broken else 0

    def _write(self, line: str) -> None:
        shown = _HIDDEN.sub("/tmp/NODE", line)
        print(shown, flush=True)
        self._file.write(f"{shown}\n")
        self._file.flush()
