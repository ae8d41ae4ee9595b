"""Files that are replaced in one step, and outlive the process and the machine that wrote them.

Invariant: whatever dies when, and whichever threads write at once, a reader sees the old bytes or the new ones, never a
mixture; when ``write_whole`` has returned, the new ones are on disk under their name, or newer ones are.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path


def write_whole(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Replace ``path``, or make it with ``mode``.

    An OSError leaves what was there, and nothing beside it; where only the folder could not be synced, it leaves the
    new bytes, which may not outlive the machine.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident():x}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    sync(path.parent)


def make_folder(path: Path) -> None:
    """Create a folder, and those that it lies in, and sync their names to disk."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def sync(path: Path) -> None:
    """Sync what was written to a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
