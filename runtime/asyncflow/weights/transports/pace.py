"""Pace of a pull: how much to ask for at once and how long to wait, from the rate so far. Pure: time is passed in.

Invariant: patience grows with the time that what is in flight should take, so a link that is slow, however slow, is not
taken for a dead peer once a first piece has come; chunks never exceed ``most`` bytes.
"""

from __future__ import annotations

_FIRST_CHUNK = 64 * 1024
_CHUNK_S = 0.25
_SLACK = 8.0
_SMOOTHING = 0.3


class Pace:
    """The pace of one pull: ``window`` requests in flight of at most ``most`` bytes each, begun at time ``now``.

    patience_s: the least patience, that of a pull of which nothing has come yet.
    """

    def __init__(self, *, most: int, window: int, patience_s: float, now: float) -> None:
        self._most = most
        self._window = window
        self._patience_s = patience_s
        self._last = now
        self._seconds_per_byte: float | None = None
        self.chunk = min(_FIRST_CHUNK, most)

    def arrived(self, nbytes: int, *, now: float) -> None:
        """Note that an answer of ``nbytes`` came; the next chunk is at most twice as large as the last."""
        measured = max(now - self._last, 1e-6) / max(nbytes, 1)
        self._last = now
        if self._seconds_per_byte is None:
            self._seconds_per_byte = measured
        else:
            self._seconds_per_byte += _SMOOTHING * (measured - self._seconds_per_byte)
        wanted = int(_CHUNK_S / self._seconds_per_byte)
        self.chunk = max(min(wanted, 2 * self.chunk, self._most), min(_FIRST_CHUNK, self._most))

    @property
    def patience(self) -> float:
        """Seconds without any arrival after which the peer counts as stalled."""
        expected = (self._seconds_per_byte or 0.0) * self._window * self.chunk
        return max(self._patience_s, _SLACK * expected)
