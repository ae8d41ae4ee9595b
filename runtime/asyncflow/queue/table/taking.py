"""What it means for the table that a unit has taken rows over from another.

Invariant: a row that moved while nobody had told of it, because the controller has begun anew, is told of by that.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.queue.protocol.unit_calls import Held, MovedRows
from asyncflow.queue.table.cells import by_row
from asyncflow.queue.table.table import Table


def take_over(table: Table, home: int, numbers: Sequence[int], entry: MovedRows) -> list[bool]:
    """Let rows lie at ``home``, whose unit has taken them over; tell which lie there now."""
    moved = table.moves.take(home, numbers, source=entry.home, ticket=entry.ticket)
    names, sizes = by_row(entry.cells, len(numbers))
    for index, number in enumerate(numbers):
        if moved[index] and not table.books.rows[number].here:
            cells = dict(zip(names, sizes[index], strict=True))
            partial = {name: cells.pop(name) for name in entry.partial}
            tokens, tags = entry.tokens[index], entry.tags[index]
            table.hold(home, [Held(row=number, columns=cells, partial=partial, tokens=tokens, tags=tags)])
    return moved
