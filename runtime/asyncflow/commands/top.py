"""Live view of a run: ``asyncflow top DIR|ADDRESS``."""

from __future__ import annotations

from pathlib import Path

from asyncflow.doctor.reading import address_of
from asyncflow.local.folder import check_run
from asyncflow.view.console import make_console
from asyncflow.view.watch import WatchedDriver, WatchedFolder, watch


def top(target: str, *, once: bool) -> None:
    """Show the run in a folder, or of the driver at an address, until it is over. Raises AsyncFlowError."""
    if (url := address_of(target)) is None:
        check_run(Path(target))
    watch(WatchedFolder(Path(target)) if url is None else WatchedDriver(url), console=make_console(), once=once)
