"""Writing a model folder so that it is there whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncflow.durable import make_folder, sync


@contextmanager
def whole_folder(target: Path, *, replace: bool) -> Iterator[Path]:
    """Yield an empty folder beside ``target`` that takes its name when the block ends well, and is removed when not.

    replace: what becomes of a ``target`` that is already there: replaced, or kept, for contents that are the same
    whoever writes them, so that several processes may write at once.
    """
    make_folder(target.parent)
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        made.chmod(0o755)
        yield made
        for file in made.rglob("*"):
            if file.is_file():
                file.chmod(0o644)
                sync(file)
        sync(made)
        if replace and target.exists():
            _swap(made, target)
        else:
            _settle(made, target, replace=replace)
        sync(target.parent)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _swap(made: Path, target: Path) -> None:
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    target.rename(old / target.name)
    made.rename(target)
    shutil.rmtree(old)


def _settle(made: Path, target: Path, *, replace: bool) -> None:
    try:
        made.rename(target)
    except OSError:
        if replace or not target.is_dir():
            raise
