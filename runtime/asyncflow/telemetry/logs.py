r"""Logging of a role: one line per record on stderr, with UTC time, level, role, logger and message.

Invariants: one record is one line, tracebacks included, so the lines of many processes can be merged, sorted and
searched. Line ends and other control characters are written as ``\n``, ``\x1b`` and so on: a record may contain text of
the model or of a reward function, which must not control a terminal. A record that cannot be written is dropped, and
blocks nothing.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

_CONTROLS = (*range(9), *range(10, 32), *range(127, 160), 0x2028, 0x2029)
"""All control characters but the tab, and the separators of lines and paragraphs."""
_ESCAPES = {code: chr(code).encode("unicode_escape").decode() for code in _CONTROLS}


class LineFormatter(logging.Formatter):
    """Formats a record as ``2026-01-31T12:00:00.123Z WARNING rollout-3 asyncflow.rpc.server: message``."""

    def __init__(self, process: str) -> None:
        line = f"%(asctime)s.%(msecs)03dZ %(levelname)s {process.replace('%', '%%')} %(name)s: %(message)s"
        super().__init__(line, datefmt="%Y-%m-%dT%H:%M:%S")
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        return super().format(record).translate(_ESCAPES)


class _Handler(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (the name is logging's)
        """Drop a record that cannot be written because its stream fails or was closed."""
        if not (isinstance(sys.exc_info()[1], OSError) or self.stream.closed):
            super().handleError(record)


def setup_logging(role: str, index: int, *, stream: TextIO | None = None) -> None:
    """Send log records of this process to ``stream`` (stderr), replacing any previous configuration: asyncflow's from
    INFO up, all others from WARNING up.
    """
    handler = _Handler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(f"{role}-{index}"))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("asyncflow").setLevel(logging.INFO)
    logging.captureWarnings(capture=True)
