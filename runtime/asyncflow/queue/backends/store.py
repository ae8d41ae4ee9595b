"""What a packed back end needs of a key-value store, and what may become of one key.

Invariant: no method raises for what a store can do wrong; each key has an outcome of its own.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum, auto
from typing import TypeAlias, TypeVar

from asyncflow.net.jagged import Array
from asyncflow.net.retry import delays

T = TypeVar("T")

Fill: TypeAlias = Callable[[Array], None]
"""Writes values back to back into a buffer (uint8) of just their size."""
Take: TypeAlias = Callable[[int, memoryview], bool]
"""Is given the number of a key and its value, and says whether it is what was stored; it keeps no reference to it."""


class Outcome(Enum):
    """What became of one key."""

    DONE = auto()
    LOST = auto()
    """It is not there, or it is not what was stored."""
    FULL = auto()
    """Nothing was stored, because there is no room now."""
    HELD = auto()
    """It cannot be removed now."""
    FAILED = auto()
    """The store answers, but could not move these bytes."""
    AWAY = auto()
    """The store did not answer."""


async def answer_of(ask: Callable[[], Awaitable[T | None]]) -> T:
    """Return the first answer of ``ask`` that is not None; None means that the store is away, and it is asked again."""
    waits = delays()
    while (answer := await ask()) is None:
        await asyncio.sleep(next(waits))
    return answer


class Store(ABC):
    """Immutable values by key.

    most_keys, most_bytes: of one call; a single larger value goes alone.
    """

    most_keys: int = 512
    most_bytes: int = 16 << 20

    @abstractmethod
    async def open(self) -> None:
        """Wait until the store can be used, and remove what the unit's predecessors have left there."""

    @abstractmethod
    async def write(self, keys: Sequence[str], sizes: Sequence[int], fill: Fill) -> Sequence[Outcome]:
        """Store values of these sizes, each of at least a byte. ``fill`` may run in a thread, also after a cancel."""

    @abstractmethod
    async def read(self, keys: Sequence[str], sizes: Sequence[int], take: Take) -> Sequence[Outcome]:
        """Read values of these sizes, no key twice. ``take`` may run in a thread, also after a cancel."""

    @abstractmethod
    async def gone(self, unmoved: Sequence[str], others: Sequence[str]) -> list[str]:
        """Tell which of ``others`` are not there any more, or lie with one of ``unmoved``, which could not be moved."""

    @abstractmethod
    async def remove(self, keys: Sequence[str]) -> Sequence[Outcome]:
        """Remove values; one that is not there is done."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of the store."""
