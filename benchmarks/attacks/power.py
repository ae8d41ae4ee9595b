"""The content of a disk after a power cut: only the synced bytes of each file, under the synced names.

This assumes the least that a file system guarantees: a file that was never synced is empty, and a file whose folder was
not synced after the file got its name is lost.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def cut(run: Path, synced: Path, into: Path) -> None:
    """Copy the parts of ``run`` that survive a power cut to ``into``. synced: the list that the shim wrote."""
    sizes, names = _read(synced.read_text(errors="replace"))
    paths = {
        entry.inode(): Path(entry.path)
        for folder, *_ in os.walk(run)
        for entry in os.scandir(folder)
        if not entry.is_symlink()
    }

    def copy(folder: int, target: Path) -> None:
        target.mkdir(parents=True)
        for name, inode in names.get(folder, {}).items():
            path = paths.get(inode)
            if path is None:
                continue
            if path.is_dir():
                copy(inode, target / name)
            else:
                shutil.copy(path, target / name)
                os.truncate(target / name, min(sizes.get(inode, 0), path.stat().st_size))

    copy(run.stat().st_ino, into)


def _read(lines: str) -> tuple[dict[int, int], dict[int, dict[str, int]]]:
    """Return the synced bytes by inode, and the synced names by inode of their folder."""
    sizes: dict[int, int] = {}
    names: dict[int, dict[str, int]] = {}
    listing: dict[str, int] = {}
    for line in lines.splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "C":
            sizes[int(rest)] = 0
        elif kind == "F":
            inode, size = rest.split()
            sizes[int(inode)] = int(size)
        elif kind == "D":
            names[int(rest)] = listing = {}
        elif kind == "N":
            inode, _, name = rest.partition(" ")
            listing[name] = int(inode)
    return sizes, names
