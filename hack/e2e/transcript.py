"""A transcript: commands with what they printed, waits with how long they took, checks with what they found.

Invariant: every line goes to the terminal and to the transcript, in the order in which it happened; a check that did
not hold is remembered, and the story goes on where it can.
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
    """The transcript of one story. path: where it goes."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        self._began = time.monotonic()
        self.broken: list[str] = []

    def chapter(self, title: str) -> None:
        """Begin another part."""
        self._write(f"\n== {title}")

    def say(self, text: str) -> None:
        """Tell a line, with the time since the story began."""
        self._write(f"{time.monotonic() - self._began:7.1f} s  {text}")

    def command(self, words: str, printed: str) -> None:
        """Tell what was run and what it printed."""
        self.say(f"$ {words}")
        for line in printed.rstrip().splitlines():
            self._write(f"           {line.rstrip()}")

    def check(self, what: str, *, holds: bool, found: object) -> None:
        """Tell whether something is as it should be."""
        if not holds:
            self.broken.append(f"{what}: {found}")
        self.say(f"[{_DONE if holds else 'NOT SO'}] {what}: {found}")

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Tell how long the block took, if it ends well."""
        began = time.monotonic()
        yield
        self.say(f"{what}: {time.monotonic() - began:.1f} s")

    def end(self) -> int:
        """Tell how it ended, and return the exit status."""
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
