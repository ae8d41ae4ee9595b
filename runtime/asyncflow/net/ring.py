"""Where the next bytes go in a ring of memory that one side fills and the other empties: places only, no memory.

Both sides count alike, so that no place is ever told: the filler says how many bytes it put there, the emptier how many
it has given back. An emptier gives back at the latest when it owes a quarter of the ring.

Invariants: a place lies within the ring; nothing is overwritten that was not given back; a peer that says otherwise
gets a ProtocolError.
"""

from __future__ import annotations

from asyncflow.errors import ProtocolError

ALIGN = 64
"""Bytes that each place is a multiple of, a cache line."""
_NOWHERE = slice(0, 0)


class Filling:
    """The side that fills a ring of ``size`` bytes, a multiple of ``4 * ALIGN``."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = size
        self._at = 0

    def has_room(self, count: int) -> bool:
        """Whether ``count`` bytes, at most half a ring, may be put there now."""
        return _rounded(count) <= self._free

    def place(self, count: int) -> slice:
        """Give where the next bytes go: ``count`` of them, or less at the end of the ring, or none without room."""
        if not self.has_room(count):
            return _NOWHERE
        count = min(count, self.size - self._at)
        place = slice(self._at, self._at + count)
        self._at = (self._at + _rounded(count)) % self.size
        self._free -= _rounded(count)
        return place

    def given_back(self, count: int) -> None:
        """Take note that the other side has emptied so much."""
        if not 0 < count <= self.size - self._free or count % ALIGN:
            raise ProtocolError(f"a peer gives back {count} bytes of the {self.size - self._free} that it has")
        self._free += count


class Emptying:
    """The side that empties a ring of ``size`` bytes. owed: bytes emptied and not given back."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.owed = 0
        self._at = 0

    @property
    def owes_much(self) -> bool:
        """Whether it is time to give back."""
        return 4 * self.owed >= self.size

    def place(self, count: int) -> slice:
        """Give where the next ``count`` bytes lie."""
        step = _rounded(count)
        if not 0 < step <= min(self.size - self._at, self.size - self.owed):
            raise ProtocolError(f"a peer has put {count} bytes where there is no room for them")
        place = slice(self._at, self._at + count)
        self._at = (self._at + step) % self.size
        self.owed += step
        return place

    def give_back(self) -> int:
        """Give how many bytes are given back now."""
        owed, self.owed = self.owed, 0
        return owed


def _rounded(count: int) -> int:
    return -(-count // ALIGN) * ALIGN
