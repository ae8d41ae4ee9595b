"""Cells in the unit's own memory.

Invariant: every cell is a copy of its own, so that one row never pins the batch in which it came.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asyncflow.net.frames import Array
from asyncflow.queue.backends.base import Backend


class MemoryBackend(Backend):
    """Arrays in a dict."""

    def __init__(self) -> None:
        self._arrays: dict[int, Array] = {}

    async def put(self, cells: Iterable[tuple[int, Array]]) -> None:
        """Store copies."""
        for number, array in cells:
            copy = array.copy()
            copy.flags.writeable = False
            self._arrays[number] = copy

    async def get(self, cells: Sequence[int]) -> list[Array]:
        """Give the arrays."""
        return [self._arrays[number] for number in cells]

    async def free(self, cells: Iterable[int]) -> None:
        """Forget them."""
        for number in cells:
            self._arrays.pop(number, None)

    async def close(self) -> None:
        """Forget all."""
        self._arrays.clear()
