"""The folder for the state of one control plane, in the temporary directory; it is locked while the plane runs.

Invariant: a folder with a free lock has no owner and may be removed, so a new plane removes the folders that killed
processes left.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import IO, Final, Self

from kube.process import PlaneError

_PREFIX: Final = "asyncflow-kube-"
_LOCK: Final = "lock"
_GRACE_S: Final = 60.0
"""A folder this young may be about to be locked."""


class Folder:
    """A folder that is locked until it is removed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] = (path / _LOCK).open("a")
        if not _lock(self._lock):
            self._lock.close()
            raise PlaneError(f"another control plane runs in {path}")
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()

    @classmethod
    def fresh(cls) -> Self:
        """Create a folder with a unique name, and remove abandoned folders."""
        _sweep()
        return cls(Path(tempfile.mkdtemp(prefix=_PREFIX)))

    @classmethod
    def named(cls, name: str) -> Self:
        """Create or take over the folder of this name, and empty it. Raises PlaneError if another process holds it."""
        path = place_of(name)
        path.mkdir(mode=0o700, exist_ok=True)
        folder = cls(path)
        _empty(path)
        return folder

    def remove(self) -> None:
        """Remove the folder with its content. It stays locked until then, and its path becomes free atomically."""
        _empty(self.path)
        shutil.rmtree(self.path.rename(f"{self.path}.gone"), ignore_errors=True)
        self._lock.close()


def place_of(name: str) -> Path:
    """Return the path of the folder of this name."""
    return Path(tempfile.gettempdir()) / f"{_PREFIX}named-{name}"


def owner(path: Path) -> int | None:
    """Return the pid of the process that holds the folder at ``path``; None if no process does."""
    try:
        with (path / _LOCK).open() as lock:
            return None if _lock(lock) else int(lock.read())
    except FileNotFoundError:
        return None


def _empty(path: Path) -> None:
    for left in path.iterdir():
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        elif left.name != _LOCK:
            left.unlink(missing_ok=True)


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sweep() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            if time.time() - path.stat().st_mtime > _GRACE_S and (path / _LOCK).exists() and owner(path) is None:
                shutil.rmtree(path)
        except (FileNotFoundError, PermissionError):
            continue
