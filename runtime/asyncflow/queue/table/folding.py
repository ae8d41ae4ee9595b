"""All folds together, and books that know them.

Invariant: every type of event has one fold.
"""

from __future__ import annotations

from typing import Final

from asyncflow.queue.table import folds, folds_gang, folds_open, snapshot
from asyncflow.queue.table.books import Books, Fold

FOLDS: Final[dict[type, Fold]] = folds.FOLDS | folds_gang.FOLDS | folds_open.FOLDS | snapshot.FOLDS


def empty_books() -> Books:
    """Make books of a queue in which nothing has happened yet."""
    return Books(FOLDS)
