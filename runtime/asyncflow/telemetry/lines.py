"""Incremental reading of JSON lines that another process appends to a file.

Invariant: a line is read once it is complete; a line that is not a JSON object with a time is skipped, with a warning.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

log = logging.getLogger(__name__)


def new_lines(path: Path, start: int) -> tuple[list[dict[str, Any]], int]:
    """Return the new complete lines from byte ``start`` on that are JSON objects with a time, and the end offset.

    If the file is shorter than ``start``, it was replaced, and is read from its beginning.
    """
    whole, end = _complete(path, start)
    return _decoded(path, whole), end


def some_new_lines(path: Path, start: int, *, most: int) -> tuple[list[dict[str, Any]], int, int]:
    """Return ``new_lines``, but of more than ``most`` only each n-th and the last; and the end offset, and n."""
    whole, end = _complete(path, start)
    every = -(-len(whole) // most) or 1
    return _decoded(path, whole[::-1][::every][::-1]), end, every


def _complete(path: Path, start: int) -> tuple[list[bytes], int]:
    try:
        with path.open("rb") as file:
            begin = start if start <= os.fstat(file.fileno()).st_size else 0
            file.seek(begin)
            data = file.read()
    except FileNotFoundError:
        return [], 0
    *whole, incomplete = data.split(b"\n")
    return whole, begin + len(data) - len(incomplete)


def _decoded(path: Path, lines: Sequence[bytes]) -> list[dict[str, Any]]:
    found = []
    for written in lines:
        try:
            line = msgspec.json.decode(written)
            float(line["at"])
        except (msgspec.MsgspecError, KeyError, TypeError, ValueError):
            continue
        found.append(line)
    if len(found) < len(lines):
        log.warning("%s: %d of %d lines are damaged and are skipped", path, len(lines) - len(found), len(lines))
    return found
