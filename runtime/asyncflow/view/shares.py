"""A table of how the processes of a run spent their time; pure."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from asyncflow.timeline.causes import Shares

_LEAST = 0.0005
"""Least share of a process's time that is shown."""


def shares_table(found: Mapping[str, Shares]) -> Table:
    """Return a table with the seconds of each process, and their shares by activity and by cause of idleness."""
    table = Table(box=None, pad_edge=False)
    for title in ("process", "seconds", "worked", "of that", "idle", "because of"):
        table.add_column(title, justify="right" if title in ("seconds", "worked", "idle") else "left")
    for name, share in found.items():
        worked, idle = sum(share.kinds.values()), sum(share.idle.values())
        table.add_row(
            name,
            f"{share.seconds:.1f}",
            _percent(worked, share.seconds),
            _parts({str(kind): spent for kind, spent in share.kinds.items()}, share.seconds),
            _percent(idle, share.seconds),
            _parts(
                {_why(cause, by): spent for cause, whose in share.by.items() for by, spent in whose.items()},
                share.seconds,
            ),
        )
    return table


def _why(cause: str, by: str) -> str:
    return f"{cause} ({by})" if by else cause


def _parts(spent: Mapping[str, float], seconds: float) -> str:
    most = sorted(spent.items(), key=lambda item: -item[1])
    return ", ".join(f"{what} {_percent(value, seconds)}" for what, value in most if value >= _LEAST * seconds)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""
