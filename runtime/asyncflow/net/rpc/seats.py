"""Who has which seat: a number by which others can name a peer, although they do not share a stream with it.

Invariant: a peer has one seat at most, and a seat one peer, the last that took it.
"""

from __future__ import annotations


class Seats:
    """The seats of the peers of one server."""

    def __init__(self) -> None:
        self._peers: dict[int, int] = {}
        self._seats: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def sit(self, peer: int, seat: int) -> None:
        """Give ``peer`` a seat."""
        self.rise(peer)
        if (before := self._peers.get(seat)) is not None:
            self.rise(before)
        self._peers[seat], self._seats[peer] = peer, seat

    def rise(self, peer: int) -> None:
        """Take its seat, if any, from a peer."""
        if (seat := self._seats.pop(peer, None)) is not None:
            del self._peers[seat]

    def at(self, seat: int) -> int | None:
        """Give the peer that has a seat."""
        return self._peers.get(seat)
