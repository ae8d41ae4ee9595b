"""Live view of a run: ``asyncflow top DIR|ADDRESS``."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from asyncflow.doctor.reading import address_of
from asyncflow.view.watch import WatchedDriver, WatchedFolder, watch

_WIDTH = 160
"""Columns where there is no terminal whose width could be asked for."""


def top(target: str, *, once: bool) -> None:
    """Show the run in a folder, or of the driver at an address, until it is over. Raises AsyncFlowError."""
    url = address_of(target)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    watch(WatchedFolder(Path(target)) if url is None else WatchedDriver(url), console=console, once=once)
