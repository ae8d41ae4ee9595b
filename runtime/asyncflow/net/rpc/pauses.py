"""How long is waited before what failed is tried again: longer and longer, so that who stays away costs little."""

from __future__ import annotations

from collections.abc import Iterator

_FIRST_S = 0.05


def pauses(*, longest: float = 1.0) -> Iterator[float]:
    """Give the pauses, in seconds, of one who tries until it succeeds: the second is twice the first, and so on."""
    pause = _FIRST_S
    while True:
        yield pause
        pause = min(2 * pause, longest)
