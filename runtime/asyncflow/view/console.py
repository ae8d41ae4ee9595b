"""Console output of commands: tables and JSON.

Invariant: text is printed literally, never interpreted as rich markup.
"""

from __future__ import annotations

from collections.abc import Collection

import click
import msgspec
from rich.console import Console
from rich.table import Table

from asyncflow.plan.describe import TextTable

WIDTH = 160
"""Width in columns without a terminal."""


def make_console(*, width: int = WIDTH) -> Console:
    """Return a console as wide as the terminal, or ``width`` columns wide without a terminal."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = width
    return console


def make_table(*columns: str, right: Collection[str] = ()) -> Table:
    """Return a table without rows. right: columns to align right, such as numbers."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, header_style="dim", justify="right" if column in right else "left")
    return table


def print_table(described: TextTable, *, width: int = WIDTH) -> None:
    """Print a titled table and an empty line."""
    table = make_table(*described.columns)
    table.title, table.title_justify, table.title_style = described.title, "left", "bold"
    for row in described.rows:
        table.add_row(*row)
    console = make_console(width=width)
    console.print(table)
    console.print()


def print_json(value: object) -> None:
    """Print a value as JSON with line breaks."""
    click.echo(msgspec.json.format(msgspec.json.encode(value)).decode())
