"""The interface of a storage backend, which stores immutable blobs, and of a key-value store for blobs.

A *blob* contains what one put brought: columns of the same rows, under a number that is never used again. The unit
knows the meaning of the rows and keeps the budget; the controller decides which rows exist. So a backend only handles
bytes. Cells may be freed while they are read, and are not requested afterwards.

Invariants: ``get`` returns exactly the bytes that ``put`` received. A blob exists as a whole or not at all, until cells
of it are freed. When ``free`` returns, those bytes can be used again.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple, Self, TypeVar

import numpy as np

from asyncflow.rpc.columns import Array, Jagged
from asyncflow.rpc.retry import delays

BACKENDS: Final = "asyncflow.storage_backends"
"""The group of entry points of backends."""


class Place(NamedTuple):
    """The location of a row in a blob: the blob's number, and the row's index in it, from 0."""

    blob: int
    row: int


class BytesLost(Exception):
    """Cells are missing in the store, although they were not freed; ``places`` are the places of their rows."""

    def __init__(self, places: Sequence[Place]) -> None:
        super().__init__(f"the store lost cells of {len(places)} rows")
        self.places = places


@dataclass(frozen=True, kw_only=True)
class Site:
    """The environment of a backend.

    owner: name of the queue, unique among the users of the same store; unit, incarnation: the unit whose cells it
    holds; host: the address of this process; find: returns the address of process i of a role, None if there is none;
    password: of the store, "" for none; lasting: whether the store outlives the queue, which must then remove all of
    its values.
    """

    owner: str = ""
    unit: int
    incarnation: str
    host: str
    find: Callable[[str, int], str | None]
    password: str = field(default="", repr=False)
    lasting: bool = False

    @property
    def unit_prefix(self) -> str:
        """The prefix of the keys of all incarnations of the unit."""
        return f"{self.owner}.u{self.unit}-"

    @property
    def prefix(self) -> str:
        """The prefix of the keys of this incarnation."""
        return f"{self.unit_prefix}{self.incarnation}-"


class Backend(ABC):
    """Holds blobs by number. Several calls may run concurrently, and each may be cancelled at any await."""

    @classmethod
    def create(cls, site: Site) -> Self:  # noqa: ARG003
        """Return a backend for a unit."""
        return cls()

    @classmethod  # noqa: B027
    def check(cls, *, servers: bool) -> None:
        """Raise ManifestError if this machine lacks what units need or, with ``servers``, what servers need."""

    async def open(self) -> None:  # noqa: B027
        """Wait until cells can be put; earlier puts wait, too."""

    @abstractmethod
    async def put(self, blob: int, columns: Mapping[str, Jagged]) -> None:
        """Store all columns, which never change afterwards, or none of them: a failed put leaves nothing behind."""

    @abstractmethod
    async def get(self, places: Sequence[Place], columns: Sequence[str]) -> dict[str, Jagged]:
        """Return cells of rows (at least one, none twice) that all have these columns, in the given order.

        The result is never written to. Raises BytesLost if cells are lost, PeerLost while the store is unreachable.
        """

    @abstractmethod
    async def free(self, places: Sequence[Place], columns: Sequence[str]) -> None:
        """Forget these columns of rows, which all have them and are named once."""

    @abstractmethod
    async def close(self) -> None:
        """Drop everything."""


T = TypeVar("T")


class Outcome(Enum):
    """The result of a call for one key. ``PackedBackend`` repeats failed calls, so a store never does."""

    DONE = auto()
    LOST = auto()
    """It does not exist, or has another size: a read treats it as lost."""
    FULL = auto()
    """Nothing was stored, because there is no room now: a write waits."""
    FAILED = auto()
    """The store answered, but could not transfer or remove these bytes: a read gives up after a few attempts."""
    AWAY = auto()
    """The store did not answer, so the call may or may not have taken effect."""


async def answer_of(ask: Callable[[], Awaitable[T | None]]) -> T:
    """Return the first answer of ``ask`` that is not None; None means that the store is unreachable, and is retried."""
    waits = delays()
    while (answer := await ask()) is None:
        await asyncio.sleep(next(waits))
    return answer


def split(values: Array, sizes: Sequence[int]) -> list[Array]:
    """Return the values of these sizes, which are stored back to back in a buffer."""
    return np.split(values, np.cumsum(sizes)[:-1])


class Store(ABC):
    """Immutable values by key, each of at least one byte; the values of a call are back to back in a buffer.

    most_keys, most_bytes: limits of one call; a single larger value is sent alone.
    """

    most_keys: int = 512
    most_bytes: int = 16 << 20

    @abstractmethod
    async def open(self) -> None:
        """Wait until the store can be used, and remove the values that earlier incarnations of the unit left there."""

    @abstractmethod
    async def write(self, keys: Sequence[str], sizes: Sequence[int], values: Array) -> Sequence[Outcome]:
        """Store values of these sizes."""

    @abstractmethod
    async def read(self, keys: Sequence[str], sizes: Sequence[int], values: Array) -> Sequence[Outcome]:
        """Read values of these sizes, no key twice, into a buffer. The caller checks their contents."""

    @abstractmethod
    async def find_lost(self, unmoved: Sequence[str], others: Sequence[str]) -> list[str]:
        """Return those of ``others`` that are lost, or stored with one of ``unmoved``, whose transfer failed."""

    @abstractmethod
    async def remove(self, keys: Sequence[str]) -> Sequence[Outcome]:
        """Remove values; a missing value counts as removed."""

    @abstractmethod
    async def close(self) -> None:
        """Close the store."""
