"""Atomic file replacement; written files survive a crash of the process and of the machine.

Invariants: a reader sees either the old bytes or the new bytes, never a mixture, even if the process or the machine
crashes or several threads write at the same time. After ``write_whole`` has returned, its bytes, or newer ones, are on
disk under the file's name.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path


def write_whole(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Replace ``path`` by a new file with ``content``, created with ``mode``.

    Raises OSError that names ``path`` on failure: the old file is then unchanged, and the temporary file is removed. If
    only the sync of the folder failed, the new file is in place, but may be lost in a crash of the machine.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident():x}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        draft.replace(path)
        sync(path.parent)
    except OSError as error:
        draft.unlink(missing_ok=True)
        error.filename = str(path)
        raise


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, and sync their directory entries to disk."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def sync(path: Path) -> None:
    """Sync the contents of a file, or the directory entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
