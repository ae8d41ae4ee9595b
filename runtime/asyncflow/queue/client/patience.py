"""How long a put stays with one unit.

Where there are others a unit has a moment to find room, another to answer, and the time that its bytes take on a
slow link: so one that was stopped, or is gone without a word, costs seconds and not the caller's whole deadline. Where
there is none but it, nothing is gained by leaving.

Invariant: the caller waits longer than the unit does, so a unit that is there says itself that it found no room.
"""

from __future__ import annotations

from typing import Final, NamedTuple

_LONGEST_S: Final = 15.0
_ROOM_S: Final = 2.0
_ANSWER_S: Final = 2.0
_SLOW: Final = 8 << 20
"""Bytes a second."""


class Patience(NamedTuple):
    """room_s: seconds that the unit may wait for room; answer_s: seconds until its answer must be here."""

    room_s: float
    answer_s: float


def patience(left_s: float, *, nbytes: int, others: bool) -> Patience:
    """Return it for ``nbytes``, which are to be done in ``left_s`` seconds. others: whether there are other units."""
    longest = min(_LONGEST_S + nbytes / _SLOW, left_s)
    if not others:
        return Patience(0.9 * longest, longest)
    answer_s = min(longest, _ROOM_S + _ANSWER_S + nbytes / _SLOW)
    return Patience(min(_ROOM_S, 0.9 * answer_s), answer_s)
