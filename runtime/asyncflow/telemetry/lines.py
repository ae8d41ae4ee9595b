"""Lines of JSON that another process appends to a file: those that came since the last look.

Invariant: a line is taken once it is whole; what is no JSON object with a time costs that line only.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec


def new_lines(path: Path, start: int) -> tuple[list[dict[str, Any]], int]:
    """Return the whole lines from byte ``start`` on, as far as they are JSON objects with a time, and where they end.

    Where the file is shorter than that, it is another one, and read from its beginning.
    """
    try:
        with path.open("rb") as file:
            begin = start if start <= os.fstat(file.fileno()).st_size else 0
            file.seek(begin)
            data = file.read()
    except FileNotFoundError:
        return [], 0
    *whole, torn = data.split(b"\n")
    found = []
    for written in whole:
        try:
            line = msgspec.json.decode(written)
            float(line["at"])
        except (msgspec.MsgspecError, KeyError, TypeError, ValueError):
            continue
        found.append(line)
    return found, begin + len(data) - len(torn)
