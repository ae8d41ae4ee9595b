"""Which serials of an open partition were used, so that a put that comes twice makes its rows once.

A serial is its creator's nonce above the creator's own count (``SERIAL_BITS``). Creators count on, so what one of them
has used is nearly always one span, whatever became of the rows.

Invariants: a serial that was used is never taken for new, except by a creator of which nothing was heard while
``_CREATORS`` others put; memory grows with the creators, not with the rows.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator

from asyncflow.queue.protocol.messages import SERIAL_BITS

_CREATORS = 65_536
_SPANS = 64


class Serials:
    """The serials used in one partition."""

    def __init__(self) -> None:
        self._spans: dict[int, list[list[int]]] = {}

    def __contains__(self, serial: int) -> bool:
        return self.overlaps(serial, 1)

    def overlaps(self, first: int, count: int) -> bool:
        """Tell whether one of ``count`` serials from ``first`` on was used."""
        spans = self._spans.get(first >> SERIAL_BITS)
        if spans is None:
            return False
        if first >= spans[-1][1]:
            return False
        return any(start < first + count and first < end for start, end in spans)

    def add(self, first: int, count: int) -> None:
        """Note that ``count`` serials from ``first`` on are used."""
        nonce = first >> SERIAL_BITS
        spans = self._spans.pop(nonce, None)
        if spans is None:
            spans = []
            while len(self._spans) >= _CREATORS:
                del self._spans[next(iter(self._spans))]
        self._spans[nonce] = spans
        if spans and spans[-1][1] == first:
            spans[-1][1] = first + count
            return
        bisect.insort(spans, [first, first + count])
        _merge(spans)
        if len(spans) > _SPANS:
            spans[:2] = [[spans[0][0], spans[1][1]]]

    def spans(self) -> Iterator[tuple[int, int]]:
        """Give all as (first, end), creators in the order in which they were last heard of."""
        for spans in self._spans.values():
            yield from ((first, end) for first, end in spans)

    def update(self, spans: Iterable[tuple[int, int]]) -> None:
        """Add what another's ``spans`` gave."""
        for first, end in spans:
            self.add(first, end - first)


def _merge(spans: list[list[int]]) -> None:
    merged = spans[:1]
    for first, end in spans[1:]:
        if first <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([first, end])
    spans[:] = merged
