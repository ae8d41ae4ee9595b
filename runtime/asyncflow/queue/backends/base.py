"""The interface of a storage back end: a store of numbered arrays, written once.

The unit numbers cells, knows what they mean and keeps the budget; the controller is the truth about what exists. So a
back end needs to know nothing but bytes.

Invariants: ``get`` gives what ``put`` was given, bit by bit; an array that was put shares no memory with the caller's;
when ``free`` returns, its bytes can be used again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from asyncflow.net.frames import Array


class Backend(ABC):
    """Holds arrays by number."""

    @abstractmethod
    async def put(self, cells: Iterable[tuple[int, Array]]) -> None:
        """Store a copy of each array under its number, which was never used before."""

    @abstractmethod
    async def get(self, cells: Sequence[int]) -> list[Array]:
        """Give the arrays of these numbers, read-only; KeyError for one that is not there."""

    @abstractmethod
    async def free(self, cells: Iterable[int]) -> None:
        """Forget these numbers; one that is not there is passed over."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of everything."""
