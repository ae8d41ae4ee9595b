"""Ids on the wire: those that follow one another as one id and how many more, so that a batch costs a few bytes.

``[7, 8, 9, 12]`` is ``[7, -2, 12]``. Ids are never negative, so a list that nobody shortened means itself.

Invariant: ``expand(shrink(ids)) == ids``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from asyncflow.errors import ProtocolError

T = TypeVar("T")

MOST = 1 << 20
"""Rows or groups that one message, or one item of a feed, stands for at most."""


def shrink(ids: Sequence[int]) -> list[int]:
    """Return ``ids`` with each run of consecutive ones as its first and minus the number of the others."""
    count = len(ids)
    if isinstance(ids, range) and count > 1:
        return [ids[0], 1 - count]
    if count > 1 and ids[-1] - ids[0] == count - 1 and list(ids) == list(range(ids[0], ids[0] + count)):
        return [ids[0], 1 - count]
    made: list[int] = []
    follows = -1
    for number in ids:
        if number != follows:
            made.append(number)
        elif made[-1] < 0:
            made[-1] -= 1
        else:
            made.append(-1)
        follows = number + 1
    return made


def expand(ids: Sequence[int]) -> Sequence[int]:
    """Return the ids that ``shrink`` was given. ProtocolError for what it never makes, or more than ``MOST`` ids."""
    if len(ids) == 2 and ids[0] >= 0 and -MOST < ids[1] < 0:
        return range(ids[0], ids[0] + 1 - ids[1])
    if not ids or min(ids) >= 0:
        return ids
    if ids[0] < 0 or len(ids) - sum(number + 1 for number in ids if number < 0) > MOST:
        raise ProtocolError(f"{len(ids)} numbers do not stand for ids")
    made: list[int] = []
    for number in ids:
        if number >= 0:
            made.append(number)
        else:
            made.extend(range(made[-1] + 1, made[-1] + 1 - number))
    return made


def shrink_equal(values: list[T]) -> list[T]:
    """Return one value where all are that one."""
    return values[:1] if len(values) > 1 and values.count(values[0]) == len(values) else values


def expand_equal(values: list[T], count: int) -> list[T]:
    """Return the ``count`` values that ``shrink_equal`` was given."""
    return values * count if len(values) == 1 else values
