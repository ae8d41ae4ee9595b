"""Which serials of an open partition were used, so that a put that comes twice makes its rows once.

A serial is the number of its client above the client's own count (``SERIAL_BITS``). A client is known by a name that
nobody else has; its number is given to it with its first put, and is that of no other client of which anything is
known. Clients count on, so what one of them has used is nearly always one span, whatever became of the rows.

Invariants: a serial that was used is never taken for new, except by a client that has no living rows and of which
nothing was heard while at least half of ``_IDLE`` others without rows put; one that was not used is never taken for
used; memory grows with the clients and the puts that they gave up, not with the rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from asyncflow.queue.protocol.messages import SERIAL_BITS

Span = tuple[int, int]
"""Serials from the first up to, and without, the second."""

_IDLE = 65_536
_NUMBERS = (1 << 31) - 1


@dataclass(slots=True)
class _Client:
    """name: empty where only the number is known; starts, ends: of the spans that it used, in order."""

    name: bytes = b""
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    @property
    def spans(self) -> list[Span]:
        return list(zip(self.starts, self.ends, strict=True))


class Serials:
    """The clients of one partition, and the serials that they used."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._clients: dict[int, _Client] = {}
        self._most = _IDLE
        self._last = 0

    def __contains__(self, serial: int) -> bool:
        return self.overlaps(serial, 1)

    def number(self, client: bytes) -> int | None:
        """Return the number of a client, None where it has none yet."""
        return self._numbers.get(client)

    def unused_number(self) -> int:
        """Return a number that no client has."""
        number = self._last % _NUMBERS + 1
        while number in self._clients:
            number = number % _NUMBERS + 1
        return number

    def name(self, client: bytes, number: int) -> None:
        """Note which client has this number."""
        self._clients.setdefault(number, _Client()).name = client
        self._numbers[client] = self._last = number

    def overlaps(self, first: int, count: int) -> bool:
        """Tell whether one of ``count`` serials from ``first`` on was used."""
        client = self._clients.get(first >> SERIAL_BITS)
        if client is None:
            return False
        at = bisect_right(client.ends, first)
        return at < len(client.starts) and client.starts[at] < first + count

    def add(self, first: int, count: int, *, living: Iterable[int] = ()) -> None:
        """Note that ``count`` serials from ``first`` on are used. living: the serials whose rows live."""
        number = first >> SERIAL_BITS
        client = self._clients.pop(number, None) or _Client()
        if len(self._clients) >= self._most:
            self._forget(living)
        self._clients[number] = client
        _join(client, first, first + count)

    def clients(self) -> Iterator[tuple[bytes, int, list[Span]]]:
        """Return name, number and spans of each client, in the order in which they were last heard of."""
        return ((client.name, number, client.spans) for number, client in self._clients.items())

    def restore(self, name: bytes, number: int, spans: Iterable[Span]) -> None:
        """Add a client that ``clients`` returned."""
        if name:
            self.name(name, number)
        client = self._clients.setdefault(number, _Client())
        for first, end in spans:
            _join(client, first, end)

    def _forget(self, living: Iterable[int]) -> None:
        """Forget clients without living rows, but for those that were heard of last."""
        needed = {serial >> SERIAL_BITS for serial in living}
        idle = [number for number in self._clients if number not in needed]
        for number in idle[: -_IDLE // 2]:
            self._numbers.pop(self._clients.pop(number).name, None)
        self._most = len(self._clients) + _IDLE // 2


def _join(client: _Client, first: int, end: int) -> None:
    """Add a span, as one with those that it touches."""
    starts, ends = client.starts, client.ends
    low = bisect_right(ends, first - 1)
    high = bisect_right(starts, end)
    if low < high:
        first, end = min(first, starts[low]), max(end, ends[high - 1])
    starts[low:high] = [first]
    ends[low:high] = [end]
