"""Files that are replaced in one step. Invariant: a reader sees the old bytes or the new ones, whatever dies when."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomic(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Replace ``path`` by ``content`` in one step: a reader sees the old bytes or the new ones."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)
    fresh.replace(path)
